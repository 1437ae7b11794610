"""Declarations of a family's checkpoints, the folders in which models are published.

Such a folder has a config.json and safetensors files. CHECKPOINTS at the end of a family's file has a record for each,
by the class names that `architectures` of config.json may have. A record is plain data, so that it costs nothing where
a GGUF file is opened; localllm/convert interprets it. A computation is a function of localllm/convert/families, named
as "@module.function".

Sizes have names: vocab, layers, width, hidden, heads, kv_heads, head_dim, queries, keys, rotary_dims, context, experts,
expert_hidden, and those of `sizes`. An amount is a sum of products of integers, sizes and keys of config.json:
"queries + 2 * keys", "n_shared_experts=0 * expert_hidden" (=0: default if config.json lacks the key); "use_qk_norm?" is
1 for true. "?" before an amount of metadata omits 0.

A tensor is its shape by names of sizes ("queries width") if gguf's tables know its name in checkpoints, or else that
name, after the layer's index, and its shape ("mlp.expert_bias: experts"); [...] is the stored shape where it differs,
and a word before it is a function of convert/transforms.py ("reshape conv.weight[inner one taps]: inner taps");
"?" marks a tensor that may be missing.

"CLASS+mxfp4" is the record of checkpoints whose quantized weights GGUF can hold unchanged; another name with "+" is one
that a function chooses.
"""

from collections.abc import Mapping
from typing import Any, TypedDict


class CheckpointDeclaration(TypedDict, total=False):
    """The declaration of a checkpoint. Every matrix of a layer may have a bias."""

    arch: str  # general.architecture, if the family's file has several
    select: str  # function of config.json that names the record to take, e.g. "CLASS+experts"
    like: str  # a class of a similar checkpoint, from which missing fields are taken, except `arch`

    # Tensors
    layer: str  # groups of a layer's tensors, by their names in convert/family.py
    parts: Mapping[str, tuple[str, str]]  # groups if a size is not 0, by its name, or else; SIZE_N of layer N; < layers
    tensors: Mapping[str, str]  # further ones, by GGUF names without "blk.N." and ".weight"; if named in `parts`, there
    whole: Mapping[str, str] | str  # tensors outside layers
    last_norm: str  # the last norm's name; "": it has no weights
    rotated: bool  # queries and keys rotate halves of a head, where GGUF rotates pairs
    parted: bool  # queries and keys rotate pairs, where GGUF rotates halves
    transposed: str  # matrices that are stored transposed
    offset_norms: bool  # norms multiply by 1 + weight
    biased: str  # tensors and groups that must have a bias
    bare: str  # tensors whose GGUF names do not end with .weight
    prefixes: str  # prefixes of tensor names that are removed
    renamed: Mapping[str, str]  # stored to GGUF names, both without suffix
    unread: str  # pattern of names, without prefixes, of tensors that are ignored
    named: str  # maps a tensor's name and the layer count to a name that gguf's tables know
    named_as: str  # architecture whose tensor names gguf's tables have, if they lack this one
    sees: bool  # has vision tensors, which are ignored
    decodes: bool  # computes logits: has an output norm, and an output matrix unless tied
    projects: bool  # may have Dense modules after pooling

    # config.json
    defaults: Mapping[str, object]  # values that it may omit
    only: Mapping[str, object]  # the only values that GGUF can express; a tuple: one of them
    reads: Mapping[str, object]  # keys that have other names here: amounts; "a|b": the first that is said
    activations: str  # "gelu", ...; silu if not said
    approximated: str  # key of an activation that may be exact GELU, which GGUF's readers take for its approximation
    scalings: str  # kinds of RoPE scaling that GGUF can say; "linear yarn" if not said
    partial_rope: bool  # RoPE may rotate only the beginning of a head
    window_ignored: bool  # GGUF's readers ignore a sliding window, so a warning says so
    windows: int  # every so many layers the last one has no window
    experts: str  # keys of an expert's hidden size, of the number of experts, and of those that are used
    layer_norm: str  # key of the epsilon of layer norms
    sizes: Mapping[str, str]  # further sizes: amounts
    keys: Mapping[str, str | tuple[str, Any]]  # GGUF keys after "ARCH." of further values, and what is meant if unsaid
    amounts: Mapping[str, str]  # metadata that are amounts
    metadata: Mapping[str, object]  # metadata that are the same in all checkpoints; None: left out
    unsaid: Mapping[str, object]  # metadata unless what is read says otherwise
    read: str  # function of config.json and of the reader that this record describes
    more: Mapping[str, object]  # metadata with full keys
    of_tensors: str  # function of the stored tensors that makes further metadata
    vocabulary: str  # tokenizer.ggml.model of SentencePiece vocabularies, if not "llama"


Checkpoints = Mapping[str, CheckpointDeclaration]  # by class names, separated by spaces
