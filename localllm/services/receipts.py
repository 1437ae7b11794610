"""Receipts: record how a response was generated, and check whether it can be reproduced.

A receipt is readable JSON: the model's files with their SHA-256, the prompt, every option and the seed, the
environment (versions, processor, instruction set), and the response with its timings. The same program on the same
processor type reproduces the tokens exactly. Another processor may round differently, and so choose another token where
two are about equally likely.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypedDict

from localllm.errors import UsageError
from localllm.files.cache.checksummed_cache import OnProgress, get_sha256
from localllm.files.gguf.header import printable
from localllm.files.safe_file import SafeFile
from localllm.generation.options import CALLABLES, GenerationOptions
from localllm.generation.sampling.options import DEFAULTS, SamplingOptions
from localllm.generation.speculation.acceptance import Drafter
from localllm.kernels.build.objects import get_object_folder
from localllm.kernels.machine import describe_processor, get_lane
from localllm.system.cpu import get_system_name
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.scheduler import Generation

FORMAT_VERSION = 1  # version of the file format; others are rejected
PACKAGES = "localllm", "numpy", "numba", "llvmlite"
SEEDS = 1 << 32
# CPU features that determine the choice of kernels.
INSTRUCTIONS = {"avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-bf16"}
INSTRUCTIONS |= {"neon", "dotprod", "i8mm"}
LIST_OF_NUMBERS = re.compile(r"\[\n[\d,\s]+\]")  # in indented JSON, whose strings have no line breaks
SHAPE: dict[str, object] = {  # the fields that `replay` reads
    "receipt": int,
    "model": {"files": [{"path": str, "sha256": str}]},
    "prompt": {"asked": str | list},
    "opening": {"context": int, "threads": int, "kv_type": str, "chat_template": str | None},
    "options": {"sampling": dict, "n": int, "beams": int, "speculate": str},
    "made_by": dict,
    "result": dict,
}
REMOTE: dict[str, object] = {  # fields of a server's response
    "receipt": int,
    "model": {"endpoint": str, "name": str},
    "prompt": {"asked": str | list},
    "options": {"sampling": dict, "n": int, "beams": int, "speculate": str, "form": dict},
    "result": dict,
}
REMOTE_ANSWER: dict[str, object] = {"text": str}
ANSWER: dict[str, object] = {**REMOTE_ANSWER, "tokens": list}
SHOWN = 40  # characters to show of a difference

ReceiptPrompt = str | list[Message]
Receipt = dict[str, Any]


class ReceiptFile(TypedDict):
    """A file of a model; size in bytes."""

    path: str
    size: int
    sha256: str


class AnswerSettings(TypedDict):
    """Settings of a response that are not in GenerationOptions.

    speculate: with the path of a draft model, if there is one.  chat_template: the user's, or None.
    """

    n: int
    beams: int
    speculate: str
    chat_template: str | None


def fill_options(model: "Model", options: GenerationOptions) -> GenerationOptions:
    """Fill in the options: the file's recommendations, the defaults and a random seed."""
    sampling = model.session.with_defaults(options).sampling.fill_unset(SamplingOptions(**DEFAULTS))
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbelow(SEEDS))
    return replace(options, sampling=sampling)


def make_receipt(
    model: "Model",
    prompt: ReceiptPrompt,
    options: GenerationOptions,
    choices: AnswerSettings,
    result: Mapping[str, object],
    on_progress: OnProgress | None = None,
) -> Receipt:
    """Create the receipt of one or several responses.

    result: a response with "text" and "tokens", or several of them as "answers".  on_progress: called while the model's
    files are hashed. Raises UsageError for options that cannot be recorded, OSError.
    """
    return {
        "receipt": FORMAT_VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"arch": model.arch, "format": model.format, "files": identify_files(model, on_progress)},
        "prompt": {"asked": prompt, "sha256": sha256(json.dumps(prompt).encode()).hexdigest()},
        "opening": get_open_arguments(model, choices["chat_template"]),
        "options": serialize_options(options) | {k: value for k, value in choices.items() if k != "chat_template"},
        "made_by": describe_environment(model),
        "result": {name: value for name, value in result.items() if name != "model"},
    }


def make_answer_receipt(
    model: "Model", prompt: ReceiptPrompt, options: GenerationOptions, answer: "Generation"
) -> Receipt:
    """Return the receipt of an answer that Python has made; generates the rest of it first if it has not begun.

    Raises UsageError for a prompt or options that cannot be recorded, OSError.
    """
    result = answer.to_dict()
    try:
        asked: ReceiptPrompt = json.loads(json.dumps(prompt, allow_nan=False))
    except (TypeError, ValueError):
        raise UsageError("the prompt cannot be stored in a receipt: it must be a string or messages of texts") from None
    if not isinstance(asked, str) and not (asked and isinstance(asked[0], dict)):
        raise UsageError("a prompt of token ids cannot be stored in a receipt: give a string or messages")
    filled = fill_options(model, replace(options, sampling=replace(options.sampling, seed=answer.seed)))
    speculate = options.speculate if isinstance(options.speculate, str) else "auto"
    choices = AnswerSettings(n=1, beams=0, speculate=speculate, chat_template=model.session.template_choice)
    return make_receipt(model, asked, filled, choices, result)


def identify_files(model: "Model", on_progress: OnProgress | None = None) -> list[ReceiptFile]:
    paths = [os.path.realpath(path) for path in model.file.parts]
    return [{"path": path, "size": os.stat(path).st_size, "sha256": get_sha256(path, on_progress)} for path in paths]


def get_open_arguments(model: "Model", chat_template: str | None) -> dict[str, object]:
    """Return arguments for api.open_model that open the model in the same way."""
    kv_type = model.engine.kv_type
    return {
        "context": model.context,
        "threads": model.engine.thread_count,
        "kv_type": f"k={kv_type.keys},v={kv_type.values}",
        **({"rope": asdict(model.engine.rope)} if model.engine.rope else {}),
        **({"lora": describe_adapters(model)} if model.engine.adapters else {}),
        **({"control_vectors": describe_vectors(model)} if model.engine.control_vectors else {}),
        **({"control_layers": model.engine.control_layers} if model.engine.control_vectors else {}),
        "chat_template": chat_template and model.session.template.source,
    }


def describe_adapters(model: "Model") -> list[dict[str, object]]:
    """Describe the adapters of a model, with the scales that its answers have by default."""
    scales = [*model.engine.adapter_scales, *[0.0] * len(model.engine.adapters)]
    pairs = zip(model.engine.adapters, scales, strict=False)
    return [{"path": os.path.realpath(each.path), "digest": each.digest, "scale": scale} for each, scale in pairs]


def describe_vectors(model: "Model") -> list[dict[str, object]]:
    """Describe the control vectors of a model. Raises OSError."""
    pairs = [(os.path.realpath(path), scale) for path, scale in model.engine.control_vectors]
    return [{"path": path, "digest": get_sha256(path), "scale": scale} for path, scale in pairs]


def describe_environment(model: "Model") -> dict[str, object]:
    """Describe the environment; responses are equal in equal environments."""
    return {
        **{name: version(name) for name in PACKAGES}, "python": sys.version.split()[0], "system": get_system_name(),
        "processor": describe_processor(), "device": model.engine.device,
        "instructions": " ".join(sorted(INSTRUCTIONS & get_lane().features)), "kernels": get_object_folder().name,
    }  # fmt: skip


def serialize_options(options: GenerationOptions) -> dict[str, object]:
    """Convert the options to JSON. Raises UsageError for an option that cannot be converted."""
    plain: dict[str, object] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "on_progress" or (value is None and field.name in CALLABLES):
            continue
        if isinstance(value, SamplingOptions):
            biases = [[token, str(bias)] for token, bias in (value.logit_bias or {}).items()]  # some are infinite
            value = {each.name: getattr(value, each.name) for each in fields(value)} | {"logit_bias": biases}
        if field.name == "constraint" and value is not None:
            value = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, Drafter):
            continue
        try:
            plain[field.name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            raise UsageError(f"{field.name} cannot be stored in a receipt: {value!r}") from None
    return plain


def restore_options(receipt: Receipt) -> GenerationOptions:
    """Restore the options of a receipt; limit an interrupted response to its tokens. Raises UsageError."""
    other_fields = ("n", "beams", "speculate", "form")
    field_values = {name: value for name, value in receipt["options"].items() if name not in other_fields}
    speculate = receipt["options"]["speculate"]
    if receipt["result"].get("finish_reason") == "interrupted":
        field_values["max_tokens"] = receipt["result"]["completion_tokens"]
    try:
        sampling_fields = field_values.pop("sampling")
        biases = {token: float(bias) for token, bias in sampling_fields.pop("logit_bias")}
        sampling = SamplingOptions(**sampling_fields, logit_bias=biases)
        if field_values.get("constraint") is not None:
            from localllm.generation.constraints.constraint import Constraint  # llguidance takes 30 ms to import

            field_values["constraint"] = Constraint(**field_values["constraint"])
        kind = "auto" if speculate.startswith("draft:") else speculate
        return GenerationOptions(**field_values, sampling=sampling, speculate=kind)
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"the receipt was written by another version of localllm: {error}") from None


def write_receipt(path: str | os.PathLike[str], receipt: Receipt) -> None:
    """Write a receipt atomically. Raises LocalllmError."""
    text = json.dumps(receipt, ensure_ascii=False, indent=1)
    text = LIST_OF_NUMBERS.sub(lambda match: " ".join(match[0].split()), text)
    with SafeFile(path) as file:
        file.write(text.encode(errors="replace") + b"\n")


def read_receipt(path: str | os.PathLike[str]) -> Receipt:
    """Read a receipt. Raises UsageError for any other file."""
    name = printable(os.fsdecode(path), 4096)
    try:
        receipt: Receipt = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        receipt = {}
    is_known = has_shape(receipt, SHAPE) or has_shape(receipt, REMOTE)
    answer = ANSWER if has_shape(receipt, SHAPE) else REMOTE_ANSWER
    if not is_known or not has_shape(get_answers(receipt["result"]), [answer]):
        raise UsageError(f"{name}: not a receipt; `localllm run --receipt FILE` writes one")
    if receipt["receipt"] != FORMAT_VERSION:
        raise UsageError(f"{name}: the receipt was written by another version of localllm")
    return receipt


def has_shape(value: object, shape: object) -> bool:
    """Return whether a JSON value matches a shape: a type, [shape of the items], or {field: shape}."""
    if isinstance(shape, list):
        return isinstance(value, list) and value != [] and all(has_shape(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(has_shape(value.get(name), inner) for name, inner in shape.items())
    return isinstance(shape, type | UnionType) and isinstance(value, shape)


def regenerate(
    model: "Model", receipt: Receipt, options: GenerationOptions, on_token: Callable[[int], None]
) -> Receipt:
    """Generate the receipt's response again.

    on_token: called with the count of tokens so far. Raises the errors of Session.candidates.
    """
    session, prompt = model.session, receipt["prompt"]["asked"]
    n, beams = receipt["options"]["n"], receipt["options"]["beams"]
    if n > 1 or beams:
        answers = session.candidates(prompt, options, n, beams)
        return {"answers": [{"text": answer.text, "tokens": answer.tokens} for answer in answers]}
    answer = session.complete(prompt, options) if isinstance(prompt, str) else session.chat(prompt, options)
    for _ in answer:
        on_token(len(answer.tokens))
    return {"text": answer.text, "tokens": answer.tokens}


def list_changes(receipt: Receipt, model: "Model", on_progress: OnProgress | None = None) -> list[str]:
    """List how environment and model differ from those of the receipt. Raises OSError."""
    old, new = receipt["made_by"], describe_environment(model)
    lines = [f"{name} was {old.get(name)}, is now {new[name]}" for name in new if old.get(name) != new[name]]
    files: list[ReceiptFile] = receipt["model"]["files"]
    old_hashes = [file["sha256"][:16] for file in files]
    new_hashes = [file["sha256"][:16] for file in identify_files(model, on_progress)]
    if old_hashes != new_hashes:
        lines.append(f"the model differs: its SHA-256 was {', '.join(old_hashes)}…, is now {', '.join(new_hashes)}…")
    additions = {"lora": describe_adapters(model), "control_vectors": describe_vectors(model)}
    for name, described in additions.items():
        recorded: list[dict[str, object]] = receipt["opening"].get(name, [])
        if [each.get("digest") for each in recorded] != [each["digest"] for each in described]:
            lines.append(f"the {'adapters differ' if name == 'lora' else 'control vectors differ'}")
    return lines


def find_difference(old_result: Receipt, new_result: Receipt) -> str | None:
    """Describe where the text of two results first differs; return None if they are equal.

    An interrupted response is compared up to its end; its last character may be incomplete.
    """
    if old_result.get("finish_reason") == "interrupted":
        new_result = {**new_result, "text": new_result["text"][: len(old_result["text"])]}
    old, new = get_answers(old_result), get_answers(new_result)
    if len(old) != len(new):
        return f"there were {len(old)} answers, and now {len(new)}"
    for number, (old_answer, new_answer) in enumerate(zip(old, new, strict=True), 1):
        if old_answer["text"] != new_answer["text"]:
            character, token = (
                count_common_prefix(old_answer.get(name, ()), new_answer[name]) for name in ("text", "tokens")
            )
            texts = (repr(answer["text"][character : character + SHOWN]) for answer in (old_answer, new_answer))
            place = f"answer {number}, " if len(old) > 1 else ""
            place += f"token {token + 1}, " if "tokens" in old_answer else ""
            return f"{place}character {character + 1}: it was {' and is now '.join(texts)}"
    return None


def get_answers(result: Receipt) -> list[Receipt]:
    answers: list[Receipt] = result.get("answers", [result])
    return answers


def count_common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
