"""Receipts of a server's responses: record a request, and send it again."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version

from localllm.generation.options import GenerationOptions
from localllm.services.receipts import (
    FORMAT_VERSION,
    REMOTE,
    SEEDS,
    Receipt,
    ReceiptPrompt,
    has_shape,
    serialize_options,
)
from localllm.services.remote.dialect import OutputFormat
from localllm.services.remote.model import RemoteModel


def is_remote(receipt: Receipt) -> bool:
    return has_shape(receipt, REMOTE)


def add_seed(options: GenerationOptions) -> GenerationOptions:
    """Return the options with a seed; the server fills in the other defaults."""
    if options.sampling.seed is not None:
        return options
    return replace(options, sampling=replace(options.sampling, seed=secrets.randbelow(SEEDS)))


def make_receipt(
    model: RemoteModel, prompt: ReceiptPrompt, options: GenerationOptions, n: int, result: Mapping[str, object]
) -> Receipt:
    """Create the receipt. Raises UsageError for options that cannot be recorded."""
    plain = serialize_options(replace(options, constraint=None))
    return {
        "receipt": FORMAT_VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"endpoint": model.endpoint.url, "name": model.name, "server": model.dialect.name},
        "prompt": {"asked": prompt, "sha256": sha256(json.dumps(prompt).encode()).hexdigest()},
        "options": {**plain, "n": n, "beams": 0, "speculate": "off", "form": asdict(model.form)},
        "made_by": {"localllm": version("localllm")},
        "result": {name: value for name, value in result.items() if name != "model"},
    }


def restore_output_format(receipt: Receipt) -> OutputFormat:
    return OutputFormat(**{name: receipt["options"]["form"].get(name) for name in ("schema", "grammar", "regex")})


def regenerate(model: RemoteModel, receipt: Receipt, options: GenerationOptions) -> Receipt:
    """Send the receipt's request again; return the response. Raises the errors of RemoteSession's methods."""
    prompt, n = receipt["prompt"]["asked"], receipt["options"]["n"]
    if n > 1:
        answers = model.session.candidates(prompt, options, n)
        return {"answers": [{"text": answer.text, "tokens": []} for answer in answers]}
    answer = model.session.complete(prompt, options) if isinstance(prompt, str) else model.session.chat(prompt, options)
    text = "".join(answer)
    return {"text": text, "tokens": []}
