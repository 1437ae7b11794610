"""Write a model with random weights, of a named shape and format, in seconds, for tests and to measure speed.

    python scripts/measure make-synthetic model.gguf --shape 1.2b --format Q4_K_M

Nothing is quantized: a block's codes are random bytes and its scales are set such that the weights have a mean near 0
and a standard deviation of 1/sqrt(columns), so that activations keep their size and logits are finite and varied. The
tokenizer works (byte-level BPE with merges) and there is a chat template, so that the file runs in any GGUF runner.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType
from synthetic_blocks import PLAIN, random_matrix
from synthetic_recurrent import ALWAYS_F32, RecurrentShape, sizes_of
from synthetic_recurrent import SHAPES as RECURRENT

from localllm.quant.formats import BY_NAME, Format


class Shape(NamedTuple):
    """The hyperparameters of a Llama model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    rope_base: float
    tied: bool  # the output matrix is the token embedding
    experts: int = 0
    experts_used: int = 0  # by each token

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


SHAPES = {
    "tiny": Shape(4, 256, 4, 2, 512, 512, 2048, 10000.0, tied=True),
    "135m": Shape(30, 576, 9, 3, 1536, 49152, 8192, 100000.0, tied=True),  # SmolLM2
    "1.2b": Shape(16, 2048, 32, 8, 8192, 128256, 131072, 500000.0, tied=True),  # Llama 3.2 1B
    "moe": Shape(16, 1024, 16, 4, 2048, 32000, 32768, 1000000.0, tied=False, experts=8, experts_used=2),  # as Mixtral
    "moe-10b": Shape(24, 2048, 16, 4, 1024, 50304, 4096, 10000.0, tied=False, experts=64, experts_used=8),  # wide OLMoE
    "8b": Shape(32, 4096, 32, 8, 14336, 128256, 131072, 500000.0, tied=False),  # Llama 3.1
}

# ---- which tensor has which format


def more_bits(layer: int, layers: int) -> bool:
    """Return whether llama-quantize's mixes give more bits to the sensitive tensors of this layer."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def mixed(mix: str, tensor: str, layer: int, shape: Shape | RecurrentShape) -> str:
    """Return the format of `tensor` (the last part of its name without .weight) in llama-quantize's `mix`."""
    if tensor == "output" or (tensor == "token_embd" and shape.tied):
        return "Q6_K"
    base = mix.removesuffix("_M")
    if mix in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if tensor in ("attn_v", "ffn_down") and more_bits(layer, shape.layers) else base
    if mix == "Q3_K_M":
        if tensor in ("attn_v", "ffn_down"):
            return "Q5_K" if layer < (2 if tensor == "attn_v" else shape.layers // 16) else "Q4_K"
        return "Q4_K" if tensor == "attn_output" else base
    if tensor == "attn_v":
        return "Q4_K" if shape.heads // shape.kv_heads >= 4 else "Q3_K"
    return "Q3_K" if tensor in ("attn_output", "ffn_down") else base


MIXES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M")
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0"}


def format_of(name: str, columns: int, wanted: str, shape: Shape | RecurrentShape) -> Format:
    """Return the format of tensor `name`; a row that is no multiple of the block gets llama-quantize's substitute."""
    if name.endswith(ALWAYS_F32) or not name.endswith(".weight") or "norm" in name:
        return BY_NAME["F32"]
    parts = name.split(".")
    if wanted in MIXES:
        wanted = mixed(wanted, parts[-2], int(parts[1]) if parts[0] == "blk" else 0, shape)
    if columns % BY_NAME[wanted].block:
        wanted = NARROW.get(wanted, "IQ4_NL")
    return BY_NAME[wanted]


class Plan(NamedTuple):
    """A tensor to write: a matrix, or a norm's vector (rows 0)."""

    name: str
    format: Format
    rows: int  # of all experts
    columns: int
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        if self.experts:
            return self.experts, self.rows // self.experts, self.columns
        return (self.rows, self.columns) if self.rows else (self.columns,)

    @property
    def size(self) -> int:
        return max(self.rows, 1) * self.format.row_bytes(self.columns)


Weights = Callable[[Plan, np.random.Generator], Iterator[np.ndarray]]


def planned(shape: Shape | RecurrentShape, wanted: str) -> list[Plan]:
    plans = []
    for name, (rows, columns) in (llama_sizes(shape) if isinstance(shape, Shape) else sizes_of(shape)).items():
        is_plain = not rows or "ffn_gate_inp" in name
        format = BY_NAME["F32"] if is_plain else format_of(name.replace("_exps", ""), columns, wanted, shape)
        plans.append(Plan(name, format, rows, columns, getattr(shape, "experts", 0) if "_exps" in name else 0))
    return plans


def llama_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return all tensors' sizes, (rows, columns)."""
    matrices = {
        "attn_q": (shape.width, shape.width),
        "attn_k": (shape.kv_width, shape.width),
        "attn_v": (shape.kv_width, shape.width),
        "attn_output": (shape.width, shape.width),
    }
    kind, count = ("_exps", shape.experts) if shape.experts else ("", 1)
    matrices |= {f"ffn_{part}{kind}": (count * shape.feed_forward, shape.width) for part in ("gate", "up")}
    matrices[f"ffn_down{kind}"] = count * shape.width, shape.feed_forward
    if shape.experts:
        matrices["ffn_gate_inp"] = shape.experts, shape.width
    sizes = {"token_embd": (shape.vocabulary, shape.width)}
    for layer in range(shape.layers):
        sizes |= {f"blk.{layer}.{norm}": (0, shape.width) for norm in ("attn_norm", "ffn_norm")}
        sizes |= {f"blk.{layer}.{name}": size for name, size in matrices.items()}
    sizes["output_norm"] = (0, shape.width)
    if not shape.tied:
        sizes["output"] = (shape.vocabulary, shape.width)
    return {f"{name}.weight": size for name, size in sizes.items()}


# ---- the tokenizer

CONTROLS = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL = 1, 3  # token types
LONGEST_PART = 6  # characters of a piece that others are made of
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_pieces() -> list[str]:
    """GPT-2's alphabet: a printable character for every byte; those that are not printable begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def vocabulary(size: int, random: np.random.Generator) -> tuple[list[str], list[str]]:
    """`size` pieces (the bytes, invented words, the control tokens) and the merges that make the words."""
    pieces = byte_pieces()
    known = set(pieces)
    parts = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    starts = ["Ġ", *parts]  # Ġ stands for a space, which only begins a word
    merges: list[str] = []
    wanted = size - len(pieces) - len(CONTROLS)
    if wanted < 0:
        raise SystemExit(f"the vocabulary needs at least {len(pieces) + len(CONTROLS)} tokens")
    while len(merges) < wanted:
        for left, right in random.random((4096, 2)).tolist():
            start, part = starts[int(left * len(starts))], parts[int(right * len(parts))]
            piece = start + part
            if piece in known or len(merges) == wanted:
                continue
            known.add(piece)
            pieces.append(piece)
            merges.append(f"{start} {part}")
            if len(piece) <= LONGEST_PART:
                starts.append(piece)
                parts += [] if start.startswith("Ġ") else [piece]
    return pieces + CONTROLS, merges


def add_tokenizer(writer: gguf.GGUFWriter, size: int, random: np.random.Generator) -> None:
    tokens, merges = vocabulary(size, random)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (size - len(CONTROLS)) + [CONTROL] * len(CONTROLS))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|end_of_text|>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


# ---- the file


def add_hyperparameters(writer: gguf.GGUFWriter, shape: Shape | RecurrentShape, name: str, wanted: str) -> None:
    writer.add_name(name)
    kind = "ALL_F32" if wanted == "F32" else f"MOSTLY_{wanted}"
    writer.add_file_type(getattr(LlamaFileType, kind, LlamaFileType.GUESSED))
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    if not isinstance(shape, Shape):
        for key, value in shape.hyperparameters().items():
            add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{shape.arch}.{key}", value)
        return
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)


def random_weights(plan: Plan, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield a tensor's data, in pieces."""
    if plan.name.endswith("ssm_a"):
        yield (-random.uniform(0.01, 0.5, plan.size // 4)).astype(np.float32)
    elif plan.rows:
        yield from random_matrix(plan.format, plan.rows, plan.columns, random)
    else:
        yield random.uniform(0.9, 1.1, plan.columns).astype(np.float32)


def write_model(
    path: Path,
    shape: Shape | RecurrentShape,
    wanted: str,
    seed: int = 0,
    name: str = "synthetic",
    weights: Weights = random_weights,
) -> None:
    """Write the model to `path`, by way of a temporary file beside it, in the format or mix `wanted`."""
    random = np.random.Generator(np.random.SFC64(seed))  # the fastest of NumPy's
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    plans = planned(shape, wanted)
    writer = gguf.GGUFWriter(temporary, getattr(shape, "arch", "llama"))
    add_hyperparameters(writer, shape, name, wanted)
    add_tokenizer(writer, shape.vocabulary, random)
    for plan in plans:
        writer.add_tensor_info(
            plan.name, plan.shape, np.dtype(np.float32), plan.size, GGMLQuantizationType(plan.format.id)
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with open(temporary, "ab") as file:
            writer.flush()
            write_weights(file, plans, writer.data_alignment, random, weights)
        writer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_weights(
    file: BinaryIO, plans: list[Plan], alignment: int, random: np.random.Generator, weights: Weights
) -> None:
    for plan in plans:
        file.write(b"\0" * (-file.tell() % alignment))
        for piece in weights(plan, random):
            file.write(piece.data)
    file.write(b"\0" * (-file.tell() % alignment))


def count(text: str) -> int:
    """Parse a number; a final k multiplies it by 1024."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices={**SHAPES, **RECURRENT}, default="tiny")
    parser.add_argument("--format", choices=sorted({*PLAIN, *MIXES}), default="Q4_K_M")
    parser.add_argument("--vocab", type=count, help="tokens, 32000 or 32k; default: as the named model")
    parser.add_argument("--context", type=count, help="tokens; default: as the named model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = {**SHAPES, **RECURRENT}[options.shape]
    shape = shape._replace(vocabulary=options.vocab or shape.vocabulary, context=options.context or shape.context)
    start = time.perf_counter()
    write_model(options.out, shape, options.format, options.seed, f"synthetic {options.shape} {options.format}")
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s")
