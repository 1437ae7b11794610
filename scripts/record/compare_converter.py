#!/usr/bin/env python3
"""Compare what `quantize FOLDER F32` and llama.cpp's converter make of tiny checkpoints: every key, every tensor.

    python scripts/record/compare_converter.py PYTHON LLAMA_CPP [NAME...]

PYTHON has torch, transformers, sentencepiece; LLAMA_CPP is a folder with its sources. NAME: models of
tests/goldens/checkpoints.json, with "+spm" for a SentencePiece vocabulary; without one, FAMILIES. Each checkpoint has a
model card, sampling defaults and a chat template. Prints each key and tensor that differs, and ends with 1 if there are
any.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from checkpoint import edit_json, sentencepiece, spelled_out, write_family, write_json  # noqa: E402
from tiny_model import CHATML  # noqa: E402

FAMILIES = (
    "llama", "ministral3", "qwen2", "qwen3", "qwen3moe", "gemma3", "mixtral", "olmo2", "granite", "cohere2",
    "deepseek3", "gpt-oss", "lfm2", "smollm3", "mamba2", "qwen3_next", "gemma-embedding", "llama+spm", "phi3+spm",
    "gemma3+spm",
)  # fmt: skip
CARD = """---
license: apache-2.0
language:
- en
- de
- no
library_name: transformers
pipeline_tag: text-generation
tags:
- chat
- code
datasets:
- tiny-people/tiny-texts
base_model:
- tiny-people/Tiny-Base-1B
---
# Tiny
"""
SAMPLING = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
    "eos_token_id": [2, 1],
}  # fmt: skip
# Keys that only localllm writes: without them, readers guess from the vocabulary's name or the tokens' texts.
OURS = ("add_bos_token", "add_space_prefix", "eot_token_id", "unknown_token_id")
# Its converter knows vocabularies by a hash of what they make of a text, and the tests' is none of them.
CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion
named = conversion.TextModel.get_vocab_base_pre
def name(self, tokenizer):
    try:
        return named(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"
conversion.TextModel.get_vocab_base_pre = name
sys.argv[1:] = sys.argv[2:]
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def write_published(folder: Path, name: str) -> Path:
    """Write a checkpoint as its publishers would: with a card, sampling defaults, and a chat template."""
    models = json.loads((ROOT / "tests" / "goldens" / "checkpoints.json").read_text(encoding="utf-8"))
    name, _, vocabulary = name.partition("+")
    model = {**models.get(models[name].get("like", ""), {}), **models[name]}
    write_family(folder, model["config"], spelled_out(model["shapes"]))
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    write_json(folder / "generation_config.json", SAMPLING)
    edit_json(folder / "tokenizer_config.json", chat_template=CHATML)
    if vocabulary:
        write_sentencepiece(folder)
    return folder


def write_sentencepiece(folder: Path) -> None:
    """Replace the vocabulary by a tokenizer.model of 272 pieces: bytes, letters and a few words."""
    words = ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "hell", "hello", "▁hello", "w", "r"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * (len(pieces) - len(words)) + [float(-number) for number in range(len(words))]
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece(pieces, scores, types, has_bytes=True))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    edit_json(folder / "tokenizer_config.json", **special)
    edit_json(folder / "config.json", bos_token_id=1, eos_token_id=2)


def run(command: list[str]) -> str:
    """Run a command; returns the last line of stderr if it failed, else ""."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def fields(path: Path) -> dict[str, tuple[str, Any]]:
    """Read the metadata of a file: type and value by key."""
    found = {}
    for key, field in GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            kinds = "/".join(GGUFValueType(kind).name for kind in field.types[:2])
            found[key] = kinds, field.contents()
    return found


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read the tensors of a file: format, shape and bytes by name."""
    return {t.name: (t.tensor_type.name, t.shape.tolist(), np.ascontiguousarray(t.data).tobytes())
            for t in GGUFReader(path).tensors}  # fmt: skip


def short(value: Any) -> str:
    """Format a value in a few words."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def are_near(a: tuple[str, list[int], bytes], b: tuple[str, list[int], bytes]) -> bool:
    """Tell whether two tensors are the same but for the last bits of exponentials and the like."""
    if a[:2] != b[:2] or a[0] != "F32":
        return False
    return np.allclose(np.frombuffer(a[2], np.float32), np.frombuffer(b[2], np.float32), rtol=1e-6, atol=0)


def differences(theirs: Path, ours: Path) -> list[str]:
    """Return a line for each key and each tensor that is not the same in both files."""
    lines = []
    for kind, read in (("key", fields), ("tensor", tensors)):
        a, b = read(theirs), read(ours)
        for name in [*a, *(name for name in b if name not in a)]:
            if name not in b:
                lines.append(f"{kind} {name}: theirs only: {short(a[name])}")
            elif name not in a and name.removeprefix("tokenizer.ggml.") not in OURS:
                lines.append(f"{kind} {name}: ours only: {short(b[name])}")
            elif name in a and a[name] != b[name] and not (kind == "tensor" and are_near(a[name], b[name])):
                lines.append(f"{kind} {name}: theirs {short(a[name])}, ours {short(b[name])}")
    return lines


def compare(name: str, python: str, sources: Path) -> list[str]:
    """Convert one checkpoint with both, and return what differs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_published(Path(temporary) / f"Tiny-{name}-1B-Instruct", name)
        theirs, ours = Path(temporary) / "theirs.gguf", Path(temporary) / "ours.gguf"
        command = [python, "-c", CONVERT, str(sources), str(folder), "--outtype", "f32", "--outfile", str(theirs)]
        if problem := run(command):
            return [f"llama.cpp's converter: {problem}"]
        if problem := run([sys.executable, "-m", "localllm", "quantize", str(folder), str(ours), "F32"]):
            return [f"localllm: {problem}"]
        return differences(theirs, ours)


def main() -> int:
    """Compare each model; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    count = 0
    for name in options.names or FAMILIES:
        lines = compare(name, options.python, options.list_sources)
        count += len(lines)
        print("\n".join([f"{name}: {'the same' if not lines else ''}".rstrip(), *(f"  {line}" for line in lines)]))
        sys.stdout.flush()
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
