"""Build a CheckpointFamily from the record that a family declares (see localllm/arch/checkpoint.py)."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, cast

from localllm.arch import ARCHITECTURES
from localllm.arch.checkpoint import CheckpointDeclaration
from localllm.convert.config import CheckpointConfig
from localllm.convert.family import (
    BYTES,
    GROUPS,
    NUMBERS,
    ROTATED,
    CheckpointFamily,
    DerivedTensor,
    Dimensions,
    Layer,
    list_expert_tensors,
    list_mtp_tensors,
)
from localllm.convert.hyperparameters import (
    GELU,
    SILU,
    CheckpointHyperparameters,
    add_experts,
    approximate_gelu,
    count_rotary_dims,
    read_decoder,
    warn_ignored_window,
)
from localllm.convert.quantized import read_method, require_method
from localllm.convert.transforms import FUNCTIONS, Sizes
from localllm.files.gguf.header import printable

COUNTS = re.compile(r".*(count|length|window|loops|layers|used|top_k|block_size|local_blocks|interval)")
FLAGS = ("expert_weights_norm", "use_parallel_residual", "skip_loop_final_norm")
STORED = re.compile(r"(\S+?)(?:\[([^\]]*)\])?(?:\s+|$)")


@cache
def load_records() -> dict[str, tuple[str, CheckpointDeclaration]]:
    """Return all records by class name, each with its architecture, which is the name of its module."""
    result = dict[str, tuple[str, CheckpointDeclaration]]()
    usual = {module: arch for arch, module in reversed(ARCHITECTURES.items())}
    usual |= {module: arch for arch, module in ARCHITECTURES.items() if arch.replace("-", "_") == module}
    for module, arch in usual.items():
        family = import_module(f"localllm.arch.families.{module}")
        for names, record in getattr(family, "CHECKPOINTS", {}).items():
            result |= {name: (record.get("arch", arch), record) for name in names.split()}
    return result


def resolve_record(name: str) -> CheckpointDeclaration:
    """Return the record of a class, with the keys of those that it refers to by "like"."""
    record = load_records()[name][1]
    return cast(CheckpointDeclaration, {**resolve_record(record["like"]), **record}) if "like" in record else record


def list_class_names() -> set[str]:
    """Return the model classes of config.json that can be converted."""
    return {name for name in load_records() if "+" not in name}


def can_keep_blocks(config: CheckpointConfig) -> bool:
    """Return whether a GGUF file can hold a checkpoint's quantized weights without requantizing them."""
    return read_method(config) == "mxfp4" and f"{config.architecture}+mxfp4" in load_records()


def find_family(config: CheckpointConfig) -> CheckpointFamily:
    """Find the family that converts a checkpoint.

    Raises ModelError if its class, or the quantization of its weights, is not supported.
    """
    name = config.architecture
    if name not in (names := list_class_names()):
        near = get_close_matches(name, names) or ["LlamaForCausalLM"]
        supported = f"{', '.join(near)} and {len(names) - len(near)} others are"
        if not name:
            raise config.make_error('"architectures" must name the model class, e.g. ["LlamaForCausalLM"]')
        raise config.make_error(f"architecture {printable(name)} is not supported ({supported})")
    if can_keep_blocks(config):
        return make_family(f"{name}+mxfp4")
    select = load_records()[name][1].get("select")
    family = make_family(load_function(select)(config) if select else name)
    require_method(config)
    return family


@cache
def make_family(name: str) -> CheckpointFamily:
    """Build the family of a class from its record."""
    record = resolve_record(name)
    content: Mapping[str, Any] = record
    more = {key: content[key] for key in COPIED if key in content}
    more |= {key: tuple(content.get(key, "").split()) for key in ("transposed", "bare", "prefixes")}
    more |= {key: load_function(content[key]) for key in ("named", "of_tensors") if content.get(key)}
    whole = record.get("whole", {})
    return CheckpointFamily(
        load_records()[name][0],
        make_layer_function(record),
        make_reader(record),
        whole=load_function(whole) if isinstance(whole, str) else parse_tensors(whole),
        rotated=ROTATED if record.get("rotated") else (),
        parted=ROTATED if record.get("parted") else (),
        biased=tuple(name for word in record.get("biased", "").split() for name in GROUPS.get(word, (word,))),
        unread=re.compile(record["unread"]) if record.get("unread") else None,
        **more,
    )


# Fields with the same meaning in the record and in the family.
COPIED = ("last_norm", "offset_norms", "sees", "decodes", "renamed", "named_as", "projects", "defaults", "more",
          "vocabulary")  # fmt: skip


def load_function(name: str) -> Any:
    """Import the function that a record names as "@module.function", from localllm/convert/families."""
    module, _, attribute = name.removeprefix("@").partition(".")
    return getattr(import_module(f"localllm.convert.families.{module}"), attribute)


def make_layer_function(record: CheckpointDeclaration) -> Callable[[Sizes, int], Layer]:
    """Build the function that lists the tensors of a layer, given sizes and index."""
    own, parts = parse_tensors(record.get("tensors", {})), record.get("parts", {})
    conditional = {name for names in parts.values() for name in " ".join(names).split()}
    always = {name: its for name, its in own.items() if name not in conditional}

    def layer(sizes: Sizes, number: int) -> Layer:
        names = [record.get("layer", "")]
        for condition, (then, otherwise) in parts.items():
            names.append(then if is_condition_met(condition, sizes, number) else otherwise)
        return exclude_empty({**list_group_tensors(" ".join(names), sizes, number, own), **always}, sizes)

    return layer


def is_condition_met(condition: str, sizes: Sizes, number: int) -> bool:
    """Return whether a record's condition is true for a layer.

    "< SIZE" is true for the first SIZE layers; "SIZE" if that size, of this layer or of all layers, is not 0.
    """
    if condition.startswith("< "):
        return number < sizes[condition[2:]]
    return bool(sizes[by_layer] if (by_layer := f"{condition}_{number}") in sizes else sizes[condition])


def list_group_tensors(names: str, sizes: Sizes, number: int, own: Layer) -> Layer:
    """List the tensors of the named groups.

    names: separated by spaces. A group of the record itself (in `own`) takes precedence; "experts:PREFIX" are experts
    that the checkpoint stores under this prefix.
    """
    result = dict[str, Dimensions | DerivedTensor]()
    for name in names.split():
        if name.startswith("@"):
            result |= load_function(name)(sizes, number)
        elif name in own:
            result[name] = own[name]
        elif name.startswith("experts:"):
            result |= list_expert_tensors(sizes, name.removeprefix("experts:"))
        else:
            result |= list_mtp_tensors(sizes, number) if name == "mtp" else GROUPS[name]
    return result


def exclude_empty(layer: Layer, sizes: Sizes) -> Layer:
    """Drop tensors with a size of 0, such as shared experts of a model without them."""
    shapes = {name: its.dimensions if isinstance(its, DerivedTensor) else its for name, its in layer.items()}
    return {name: layer[name] for name, shape in shapes.items() if all(sizes[dimension] for dimension in shape)}


def parse_tensors(tensors: Mapping[str, str]) -> Layer:
    """Parse the tensor declarations of a record, by GGUF name."""
    return {name: parse_tensor(text) for name, text in tensors.items()}


def parse_tensor(text: str) -> Dimensions | DerivedTensor:
    """Parse a tensor declaration: "SHAPE", or "[?][FUNCTION] STORED[ITS SHAPE] ...: SHAPE".

    "?" marks an optional tensor.
    """
    head, colon, shape = text.rpartition(":")
    dimensions = tuple(shape.split())
    if not colon:
        return dimensions
    words = STORED.findall(head.removeprefix("?"))
    named = words[0][0] if words and (words[0][0] in FUNCTIONS or words[0][0].startswith("@")) else "same"
    stored = {name: tuple(its.split()) or dimensions for name, its in words if name != named}
    build = FUNCTIONS[named] if named in FUNCTIONS else load_function(named)
    dtypes = BYTES if "mxfp4" in named else NUMBERS
    return DerivedTensor(dimensions, stored, build, dtypes, needed=not head.startswith("?"))


def make_reader(record: CheckpointDeclaration) -> Callable[[CheckpointConfig], CheckpointHyperparameters]:
    """Build the function that reads config.json as a record declares."""

    def declared(config: CheckpointConfig) -> CheckpointHyperparameters:
        return read_config(config, record)

    if "read" not in record:
        return declared
    computed = load_function(record["read"])
    return lambda config: computed(config, declared)


def read_config(config: CheckpointConfig, record: CheckpointDeclaration) -> CheckpointHyperparameters:
    """Read config.json as a record declares. Raises ModelError."""
    for key, allowed in record.get("only", {}).items():
        section, name = config.find_key(key)
        section.require_value(name, *(allowed if isinstance(allowed, tuple) else (allowed,)))
    renamed = config.update(**{key: read_renamed_value(config, its) for key, its in record.get("reads", {}).items()})
    partial = record.get("partial_rope", False)
    if "approximated" in record:
        renamed = approximate_gelu(renamed, record["approximated"])
    activations = [ACTIVATIONS.get(name, (name,)) for name in record.get("activations", "silu").split()]
    h = read_decoder(
        renamed,
        activations=tuple(name for names in activations for name in names),
        scalings=tuple(record.get("scalings", "linear yarn").split()),
        whole_heads=not partial,
    )
    if record.get("window_ignored"):
        warn_ignored_window(config)
    if "experts" in record:
        h = add_experts(renamed, h, *(find_key(renamed, keys) for keys in record["experts"].split()))
    if period := record.get("windows"):
        config.require_windows([(number + 1) % period != 0 for number in range(h.sizes["layers"])])
    dims = {"rotary_dims": count_rotary_dims(renamed, h.sizes["head_dim"]), "context": h.metadata["context_length"]}
    for name, text in record.get("sizes", {}).items():
        h = h.update({name: evaluate(renamed, {**h.sizes, **dims}, text)})
    metadata: dict[str, Any] = {key: its for key, its in record.get("unsaid", {}).items() if key not in h.metadata}
    metadata |= {"rope.dimension_count": dims["rotary_dims"]} if partial else {}
    if "layer_norm" in record:
        metadata |= {"attention.layer_norm_rms_epsilon": None}
        metadata |= {"attention.layer_norm_epsilon": config.read_number(record["layer_norm"], 1e-5)}
    for key, text in record.get("amounts", {}).items():
        size = evaluate(renamed, {**h.sizes, **dims}, text.removeprefix("?"))
        metadata[key] = size or None if text.startswith("?") else size
    for key, its in record.get("keys", {}).items():
        gguf_key, *default = (its,) if isinstance(its, str) else its
        metadata[gguf_key] = read_value(config, key, gguf_key, *default)
    return h.update(**{key.replace(".", "__"): its for key, its in {**metadata, **record.get("metadata", {})}.items()})


ACTIVATIONS = {"silu": SILU, "gelu": GELU, "exact_gelu": ("gelu",)}


def read_value(config: CheckpointConfig, key: str, gguf_key: str, *default: Any) -> Any:
    """Read a value of config.json with the type of its GGUF key; a default of None makes it optional.

    Raises ModelError.
    """
    section, name = config.find_key(key)
    if default == (None,):
        if section.get(name) is None:
            return None
        default = ()
    if gguf_key in FLAGS:
        return section.read_flag(name, *default)
    return section.read_count(name, *default) if COUNTS.fullmatch(gguf_key) else section.read_number(name, *default)


def read_renamed_value(config: CheckpointConfig, its: object) -> object:
    """Return the value for a renamed key.

    its: an expression, keys of which the first that exists is used ("a|b"), or a constant.
    """
    if isinstance(its, tuple):
        return config.read_number(*its)
    if not isinstance(its, str):
        return its
    if re.search(r"[*+=]", its):
        return evaluate(config, {}, its)
    section, name = config.find_key(find_key(config, its))
    return section.get(name)


def find_key(config: CheckpointConfig, keys: str) -> str:
    """Return the first of several keys that config.json has, or the last: "num_experts|num_local_experts"."""
    named = [key for key in keys.split("|") if config.find_key(key)[0].get(key.rpartition(".")[2]) is not None]
    return named[0] if named else keys.rpartition("|")[2]


def evaluate(config: CheckpointConfig, sizes: Sizes, text: str) -> int:
    """Compute an integer from a sum of products, whose factors are integers, sizes and keys of config.json."""
    return sum(
        prod(evaluate_factor(config, sizes, name.strip()) for name in term.split("*")) for term in text.split("+")
    )


def evaluate_factor(config: CheckpointConfig, sizes: Sizes, text: str) -> int:
    name, _, default = text.partition("=")
    if name.isdecimal() or name in sizes:
        return int(name) if name.isdecimal() else sizes[name]
    section, key = config.find_key(name.removesuffix("?"))
    if name.endswith("?"):
        return int(section.read_flag(key))
    return section.read_count(key, *((int(default) if default.isdecimal() else sizes[default],) if default else ()))
