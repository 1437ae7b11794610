"""Receipts of responses from a server: what was requested, and whether it can be reproduced."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from localllm.generation.generate import GenerationOptions
from localllm.services.receipts import LAYOUT, REMOTE, SEEDS, Asked, Receipt, has_shape, plain_options
from localllm.services.remote.dialect import Form
from localllm.services.remote.model import RemoteModel


def is_remote(receipt: Receipt) -> bool:
    return has_shape(receipt, REMOTE)


def fully_specified(options: GenerationOptions) -> GenerationOptions:
    """Return the options with a seed; other defaults are up to the server."""
    if options.sampling.seed is not None:
        return options
    return replace(options, sampling=replace(options.sampling, seed=secrets.randbelow(SEEDS)))


def make(model: RemoteModel, asked: Asked, options: GenerationOptions, n: int, result: Mapping[str, Any]) -> Receipt:
    """Create the receipt. Raises UsageError for options that cannot be recorded."""
    given = plain_options(replace(options, constraint=None))
    return {
        "receipt": LAYOUT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"endpoint": model.endpoint.url, "name": model.name, "server": model.dialect.name},
        "prompt": {"asked": asked, "sha256": sha256(json.dumps(asked).encode()).hexdigest()},
        "options": {**given, "n": n, "beams": 0, "speculate": "off", "form": asdict(model.form)},
        "made_by": {"localllm": version("localllm")},
        "result": {name: value for name, value in result.items() if name != "model"},
    }


def form_of(receipt: Receipt) -> Form:
    return Form(**{name: receipt["options"]["form"].get(name) for name in ("schema", "grammar", "regex")})


def regenerate(model: RemoteModel, receipt: Receipt, options: GenerationOptions) -> Receipt:
    """Generate the receipt's response again. Raises as RemoteSession's methods."""
    asked, n = receipt["prompt"]["asked"], receipt["options"]["n"]
    if n > 1:
        answers = model.session.candidates(asked, options, n)
        return {"answers": [{"text": answer.text, "tokens": []} for answer in answers]}
    answer = model.session.complete(asked, options) if isinstance(asked, str) else model.session.chat(asked, options)
    text = "".join(answer)
    return {"text": text, "tokens": []}
