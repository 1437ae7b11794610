"""The settings of a model's name as values, for the server and for Python, which parse no options."""

import json
from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.files.settings import load_settings
from localllm.files.text_file import read_template_choice, read_text
from localllm.frozen import frozen
from localllm.generation.conversation import UNSET_VALUES, AnswerDefaults
from localllm.generation.options import OPTIONS, GenerationOptions
from localllm.generation.sampling.options import DEFAULTS, SamplingOptions, parse_sampler_letters
from localllm.generation.sampling.options import OPTIONS as SAMPLING
from localllm.services.hub.name_settings import find_stored_model, iter_settings, read_messages
from localllm.values import parse_layer_range, parse_scaled_files

# Options whose values have other names in this module, with "_" for "-".
RENAMED = {
    **{other: name for name, option in {**OPTIONS, **SAMPLING}.items() for other in option.names},
    "sampler_seq": "sampling_seq", "system_prompt": "system",
    "chat_template_kwargs": "template_var", "ctx_size": "context", "n_gpu_layers": "gpu_layers", "device": "backend",
    "chat_template_file": "chat_template", "lora_scaled": "lora", "control_vector_scaled": "control_vector",
    "control_vector_layer_range": "control_layers",
}  # fmt: skip
TEXTS = ("stop", "ban", "dry_sequence_breakers", "template_var")  # a list of strings, or one string
INTEGERS = ("max_tokens", "think_budget", "context", "threads", "seed")  # -1 means the default
OPEN_ARGUMENTS = (
    "context",
    "threads",
    "backend",
    "gpu_layers",
    "chat_template",
    "mmproj",
    "kv_type",
    "lora",
    "control_vector",
    "control_layers",
)  # arguments of open_model
# Options that apply only in the commands that have them.
COMMAND_ONLY = (
    "json_schema", "json_schema_file", "grammar", "grammar_file", "regex", "logit_bias", "rope_scaling", "rope_scale",
    "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx",
)  # fmt: skip


@frozen
class NameValues:
    """The settings of a name.

    Attributes:
        defaults: of answers.  opening: arguments of open_model.  warnings: lines about settings that are not applied.
    """

    defaults: AnswerDefaults
    opening: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def load_name_values(model: str) -> NameValues:
    """Return the settings of a name.

    Raises UsageError for invalid settings, ModelError for damaged layers of Ollama's store.
    """
    settings, stored = load_settings(), find_stored_model(model)
    values, ignored = dict[str, Any](), list[str]()
    for setting in iter_settings(settings, model, stored):
        name = RENAMED.get(plain_name := setting.key.replace("-", "_"), plain_name)
        try:
            values |= convert_option(name, setting.value)
        except UsageError as error:
            raise UsageError(f"{setting.source}: {setting.written}: {error}") from None
        if name in COMMAND_ONLY:
            ignored.append(
                f"{setting.source}: {setting.written} is ignored: only commands that have this option use it"
            )
    sampling = SamplingOptions(**{name: values[name] for name in values.keys() & DEFAULTS.keys()})
    answer = {name: values[name] for name in UNSET_VALUES if name in values}
    options = GenerationOptions(sampling=sampling, template_variables=values.get("template_var", {}), **answer)
    defaults = AnswerDefaults(values.get("system"), read_messages(model) or (), options)
    opening = {name: values[name] for name in (*OPEN_ARGUMENTS, "cache") if name in values}
    if values.get("lora_init_without_apply"):
        opening["lora"] = dict.fromkeys(opening.get("lora", ()), 0.0)
    if types := {part: values[key] for part, key in (("k", "cache_type_k"), ("v", "cache_type_v")) if key in values}:
        usual = values.get("kv_type", "f16")
        opening["kv_type"] = f"k={types.get('k', usual)},v={types.get('v', usual)}"
    return NameValues(defaults, opening, tuple(ignored))


def convert_option(name: str, value: Any) -> dict[str, Any]:
    """Convert an option's value to argument names and values. Raises UsageError."""
    if name in INTEGERS and value in (-1, "-1", 0 if name == "context" else -1):
        return {name: None}
    if name in TEXTS:
        value = tuple(map(str, value)) if isinstance(value, list) else (str(value),)
    if name == "template_var":
        return {name: {key: each for text in value for key, each in parse_variables(text).items()}}
    if name == "sampling_seq":
        return {"samplers": parse_sampler_letters(str(value))}
    if name in ("lora", "control_vector", "control_layers", "lora_init_without_apply"):
        return {name: convert_adapters(name, value)}
    if name in ("system_prompt_file", "chat_template"):
        return {"system": read_text(value)} if name == "system_prompt_file" else {name: read_template_choice(value)}
    if name == "no_cache":
        return {"cache": not value}
    if name in INTEGERS or name in DEFAULTS:
        value = to_number(value)
    if name in DEFAULTS and name != "logit_bias":
        return {name: getattr(SamplingOptions(**{name: value}), name)}
    if name in UNSET_VALUES:
        return {name: getattr(GenerationOptions(**{name: value}), name)}
    return {name: value} if name in (*OPEN_ARGUMENTS, "cache_type_k", "cache_type_v", "system") else {}


def convert_adapters(name: str, value: Any) -> object:
    """Convert an option of adapters to the value of open_model's argument. Raises UsageError."""
    try:
        if name == "lora_init_without_apply":
            return bool(value)
        if name == "control_layers":
            return parse_layer_range(str(value))
        return dict(
            pair for text in (value if isinstance(value, list) else [value]) for pair in parse_scaled_files(str(text))
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def to_number(value: object) -> object:
    """Return the number that a string contains; anything else unchanged."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    return value


def parse_variables(text: str) -> dict[str, object]:
    """Parse NAME=VALUE, or a JSON object with several variables of a chat template. Raises UsageError."""
    if text.lstrip().startswith("{"):
        try:
            result: dict[str, object] = json.loads(text)
            return result
        except ValueError as error:
            raise UsageError(f"template_var must be NAME=VALUE or a JSON object: {error}") from None
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"template_var must be NAME=VALUE or a JSON object, not {text!r}")
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}
