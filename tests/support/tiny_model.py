"""A tiny random model in a real GGUF file, so that tests run without downloads.

A llama of two layers with a byte-level BPE vocabulary and a ChatML template. What it says is noise; everything around
it is as in a real file.
"""

from pathlib import Path

import gguf
import numpy as np

from localllm.files.gguf.file import GGUFFile, Tensor
from localllm.kernels.reference import dequantize
from localllm.quant.formats import BY_NAME

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d", "Ġwo rld"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_pieces() -> list[str]:
    """Return the 256 characters by which byte-level BPE writes the bytes 0 to 255: printable ones as themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def vocabulary() -> list[str]:
    """Return all pieces: special tokens first (ids 0, 1, 2), one per byte (id 3 + byte), then merged ones."""
    return SPECIAL_TOKENS + byte_pieces() + [merge.replace(" ", "") for merge in MERGES]


def write_tiny_model(
    path: Path, context: int = 512, chat_template: str | None = CHATML, seed: int = 0, metadata: dict | None = None
) -> Path:
    """Write the model to `path` (about 440 KB, F32) and return the path.

    context: its trained context length; metadata: further keys, numeric or string.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    add_hyperparameters(writer, context)
    add_vocabulary(writer, chat_template)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    add_weights(writer, np.random.default_rng(seed))
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 64, 4, 2, 128, 2


def add_hyperparameters(writer: gguf.GGUFWriter, context: int) -> None:
    writer.add_name("Tiny Test")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))


def add_vocabulary(writer: gguf.GGUFWriter, chat_template: str | None) -> None:
    pieces = vocabulary()
    normal = len(pieces) - len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS) + [gguf.TokenType.NORMAL] * normal)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def add_weights(writer: gguf.GGUFWriter, random: np.random.Generator) -> None:
    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))

    kv_width = WIDTH // HEADS * KV_HEADS
    matrix("token_embd.weight", len(vocabulary()), WIDTH)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
        matrix(f"blk.{layer}.attn_k.weight", kv_width, WIDTH)
        matrix(f"blk.{layer}.attn_v.weight", kv_width, WIDTH)
        matrix(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.ffn_gate.weight", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_up.weight", HIDDEN, WIDTH)
        matrix(f"blk.{layer}.ffn_down.weight", WIDTH, HIDDEN)
    norm("output_norm.weight")
    output = random.normal(0, WIDTH**-0.5, (len(vocabulary()), WIDTH)).astype(np.float32)
    output[: len(SPECIAL_TOKENS)] = 0  # never the most likely: greedy answers do not end
    writer.add_tensor("output.weight", output)


def damage(path: Path, name: str = "output.weight") -> Path:
    """Fill a tensor of a written model with NaN."""
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == name:
            tensor.data[...] = np.nan
    return path


def exact(file: GGUFFile) -> GGUFFile:
    """Dequantize all weights of a file to F32."""
    for name, tensor in file.tensors.items():
        data = dequantize(tensor).view(np.uint8)
        file.tensors[name] = Tensor(name, BY_NAME["F32"], tensor.shape, data)
    return file
