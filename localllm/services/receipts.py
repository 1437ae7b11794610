"""Receipts: what an answer came from, in a file that a person can read; and whether the same comes again.

A receipt is JSON: the model's files with their SHA-256, the prompt, every option and the seed, what computed (versions,
processor, its instructions), and the answer with its timings. The same program on the same kind of processor gives the
same tokens for them, to the bit; another may round differently, and where two tokens are as likely take the other.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import UsageError
from localllm.files.cache.file_hash import OnProgress, sha256_of
from localllm.files.gguf.header import printable
from localllm.files.safe_file import SafeFile
from localllm.generation.generate import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.speculation.draft_model import Drafter
from localllm.kernels.build.objects import object_folder
from localllm.kernels.machine import this_lane
from localllm.services.bench import processor
from localllm.system.cpu import system_name
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.api import Model

LAYOUT = 1  # of receipts; one with another number is not read
PACKAGES = "localllm", "numpy", "numba", "llvmlite"
SEEDS = 1 << 32
# The instructions by which kernels differ.
INSTRUCTIONS = {"avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-bf16"}
INSTRUCTIONS |= {"neon", "dotprod", "i8mm"}
LIST_OF_NUMBERS = re.compile(r"\[\n[\d,\s]+\]")  # in indented JSON, whose strings have no line breaks
SHAPE: dict[str, Any] = {  # what `replay` looks at
    "receipt": int,
    "model": {"files": [{"path": str, "sha256": str}]},
    "prompt": {"asked": str | list},
    "opening": {"context": int, "threads": int, "kv_type": str, "chat_template": str | None},
    "options": {"sampling": dict, "n": int, "beams": int, "speculate": str},
    "made_by": dict,
    "result": dict,
}
REMOTE: dict[str, Any] = {  # the same of an answer that a server gave
    "receipt": int,
    "model": {"endpoint": str, "name": str},
    "prompt": {"asked": str | list},
    "options": {"sampling": dict, "n": int, "beams": int, "speculate": str, "form": dict},
    "result": dict,
}
SAID: dict[str, Any] = {"text": str}
ANSWER: dict[str, Any] = {**SAID, "tokens": list}
SHOWN = 40  # characters of a text that differs

Asked = str | list[Message]
Receipt = dict[str, Any]


def repeatable(model: "Model", options: GenerationOptions) -> GenerationOptions:
    """The same with nothing left to what the file recommends, to defaults or to chance: a seed is drawn now."""
    sampling = model.session.completed(options).sampling.complete
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbelow(SEEDS))
    return replace(options, sampling=sampling)


def make(
    model: "Model",
    asked: Asked,
    options: GenerationOptions,
    choices: Mapping[str, Any],
    result: Mapping[str, Any],
    on_progress: OnProgress | None = None,
) -> Receipt:
    """The receipt for an answer, or several.

    choices: what options do not know: n and beams of `candidates`, speculate, perhaps with the draft model's path, and
    the user's chat_template, or None.  result: what came, with its "text" and "tokens", or several of them as
    "answers".  on_progress: hears how far the model's files are hashed. Raises UsageError for options that cannot be
    written down, OSError.
    """
    return {
        "receipt": LAYOUT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"arch": model.arch, "format": model.format, "files": identified(model, on_progress)},
        "prompt": {"asked": asked, "sha256": sha256(json.dumps(asked).encode()).hexdigest()},
        "opening": opening(model, choices["chat_template"]),
        "options": plain_options(options) | {name: choices[name] for name in ("n", "beams", "speculate")},
        "made_by": circumstances(model),
        "result": {name: value for name, value in result.items() if name != "model"},
    }


def identified(model: "Model", on_progress: OnProgress | None = None) -> list[dict[str, Any]]:
    """Each of a model's files: where it is, its size, its hash. Raises OSError."""
    paths = [os.path.realpath(path) for path in model.file.parts]
    return [{"path": path, "size": os.stat(path).st_size, "sha256": sha256_of(path, on_progress)} for path in paths]


def opening(model: "Model", chat_template: str | None) -> dict[str, Any]:
    """The arguments of api.open_model with which the model is opened alike."""
    kv_type = model.engine.kv_type
    return {
        "context": model.context,
        "threads": model.engine.thread_count,
        "kv_type": f"k={kv_type.keys},v={kv_type.values}",
        "chat_template": chat_template and model.session.template.source,
    }


def circumstances(model: "Model") -> dict[str, Any]:
    """What computes: of equal ones come equal answers."""
    return {
        **{name: version(name) for name in PACKAGES},
        "python": sys.version.split()[0],
        "system": system_name(),
        "processor": processor(),
        "device": model.engine.device,
        "instructions": " ".join(sorted(INSTRUCTIONS & this_lane().features)),
        "kernels": object_folder().name,
    }


def plain_options(options: GenerationOptions) -> dict[str, Any]:
    """The options as JSON has them. Raises UsageError for one that it cannot have."""
    plain: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "on_progress":
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
            raise UsageError(f"{field.name} cannot be written to a receipt: {value!r}") from None
    return plain


def options_of(receipt: Receipt) -> GenerationOptions:
    """The options that a receipt has; of an interrupted answer only so many tokens as came. Raises UsageError."""
    apart = ("n", "beams", "speculate", "form")
    given = {name: value for name, value in receipt["options"].items() if name not in apart}
    speculate = receipt["options"]["speculate"]
    if receipt["result"].get("finish_reason") == "interrupted":
        given["max_tokens"] = receipt["result"]["completion_tokens"]
    try:
        drawn = given.pop("sampling")
        biases = {token: float(bias) for token, bias in drawn.pop("logit_bias")}
        sampling = SamplingOptions(**drawn, logit_bias=biases)
        if given.get("constraint") is not None:
            from localllm.generation.constraints.constraint import Constraint  # llguidance takes 30 ms to import

            given["constraint"] = Constraint(**given["constraint"])
        kind = "auto" if speculate.startswith("draft:") else speculate
        return GenerationOptions(**given, sampling=sampling, speculate=kind)
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"the receipt is of another version of localllm: {error}") from None


def write(path: str | os.PathLike[str], receipt: Receipt) -> None:
    """There when it is whole, or not at all. Raises LocalllmError."""
    text = json.dumps(receipt, ensure_ascii=False, indent=1)
    text = LIST_OF_NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    with SafeFile(path) as file:
        file.write(text.encode(errors="replace") + b"\n")


def read(path: str | os.PathLike[str]) -> Receipt:
    """Raises UsageError for a file that is no receipt."""
    name = printable(os.fsdecode(path), 4096)
    try:
        receipt = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        receipt = None
    is_known = has_shape(receipt, SHAPE) or has_shape(receipt, REMOTE)
    if not is_known or not has_shape(answers_of(receipt["result"]), [ANSWER if has_shape(receipt, SHAPE) else SAID]):
        raise UsageError(f"{name}: not a receipt; run --receipt FILE writes one")
    if receipt["receipt"] != LAYOUT:
        raise UsageError(f"{name}: a receipt of another version of localllm")
    return receipt


def has_shape(value: Any, shape: Any) -> bool:
    """Whether a value of JSON is of a type, a list of such values, or an object that has at least these fields."""
    if isinstance(shape, list):
        return isinstance(value, list) and value != [] and all(has_shape(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(has_shape(value.get(name), inner) for name, inner in shape.items())
    return isinstance(value, shape)


def again(model: "Model", receipt: Receipt, options: GenerationOptions, on_token: Callable[[int], None]) -> Receipt:
    """The result that the receipt's prompt has now; on_token: hears how many tokens one answer has so far.

    Raises as Session.candidates.
    """
    session, asked = model.session, receipt["prompt"]["asked"]
    n, beams = receipt["options"]["n"], receipt["options"]["beams"]
    if n > 1 or beams:
        answers = session.candidates(asked, options, n, beams)
        return {"answers": [{"text": answer.text, "tokens": answer.tokens} for answer in answers]}
    answer = session.complete(asked, options) if isinstance(asked, str) else session.chat(asked, options)
    for _ in answer:
        on_token(len(answer.tokens))
    return {"text": answer.text, "tokens": answer.tokens}


def changes(receipt: Receipt, model: "Model", on_progress: OnProgress | None = None) -> list[str]:
    """What is not as it was when the receipt was made, a line each. Raises OSError."""
    then, now = receipt["made_by"], circumstances(model)
    lines = [f"{name} was {then.get(name)}, is {now[name]}" for name in now if then.get(name) != now[name]]
    both = receipt["model"]["files"], identified(model, on_progress)
    before, after = ([file["sha256"][:16] for file in files] for files in both)
    if before != after:
        lines.append(f"the model is another one: its SHA-256 was {', '.join(before)}…, is {', '.join(after)}…")
    return lines


def difference(then: Receipt, now: Receipt) -> str | None:
    """Where the texts of two results differ first, None if they are the same. Of an answer that was interrupted only
    what came is compared: a character may have been half said.
    """
    if then.get("finish_reason") == "interrupted":
        now = {**now, "text": now["text"][: len(then["text"])]}
    old, new = answers_of(then), answers_of(now)
    if len(old) != len(new):
        return f"there were {len(old)} answers, now there are {len(new)}"
    for number, (before, after) in enumerate(zip(old, new, strict=True), 1):
        if before["text"] != after["text"]:
            character, token = (common(before.get(name, ()), after[name]) for name in ("text", "tokens"))
            texts = (repr(one["text"][character : character + SHOWN]) for one in (before, after))
            place = f"answer {number}, " if len(old) > 1 else ""
            place += f"token {token + 1}, " if "tokens" in before else ""
            return f"{place}character {character + 1}: it was {' and is '.join(texts)}"
    return None


def answers_of(result: Receipt) -> Any:
    """A list of all answers of a result, which is one or has several."""
    return result.get("answers", [result])


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
