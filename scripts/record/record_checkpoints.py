#!/usr/bin/env python3
"""Record what transformers and llama.cpp's converter make of tiny checkpoints, in tests/goldens/checkpoints.json.

    PYTHON scripts/record/record_checkpoints.py LLAMA_CPP NAME...
    PYTHON scripts/record/record_checkpoints.py LLAMA_CPP NAME --new CLASS CONFIG

PYTHON has torch, transformers and safetensors (recorded: 2.13, 5.23), LLAMA_CPP is a folder with its sources. A model's
row has its config.json and its tensors' shapes (0-3 in a name stands for 0, 1, 2 and 3); its weights are those of
tests/support/checkpoint.py, by the tensors' names. What else the row has is recorded again, of a row with nothing else
everything that can be. --new begins a row with what transformers' CLASS saves, CONFIG being JSON of what its config has
besides SMALL. What publishers call otherwise, and models that transformers lacks, are written into the file by hand.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
TEXT = [(i * 37) % 250 + 3 for i in range(100)]  # as of tests/unit/convert/test_hyperparameters.py
OF_TEXT = 60  # tokens of TEXT that an encoder reads
GENERAL = ("general.architecture", "general.size_label", "general.file_type")
SMALL = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
# Whose config.json the converter should read as it is: transformers hides a key of one, and adds some to the other.
WITH_MTP = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "MiMoV2FlashForCausalLM"
AS_IT_IS = (
    "GPTNeoXForCausalLM", "NemotronHForCausalLM", "MiMoV2FlashForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "Glm5NextForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration",
)  # fmt: skip
# What does not belong to a model's computation.
NOISE = (
    "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "classifier_dropout", "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip
RECORDED = {"metadata", "tensors", "logits", "rows"}  # parts of a row
SAID = ("scoring_func", "topk_method", "layer_types", "architectures")  # as publishers say it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--new", nargs=2, metavar=("CLASS", "CONFIG"))
    options = parser.parse_args()
    path = ROOT / "tests" / "goldens" / "checkpoints.json"
    known = json.loads(path.read_text())
    sys.path[:0] = [str(options.list_sources), str(options.list_sources / "gguf-py")]
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            if options.new:
                known[name] = new_row(options.new[0], json.loads(options.new[1]), Path(folder))
            known[name] |= recorded(known[name], known, Path(folder))
        print(name, (known[name].get("logits") or known[name].get("rows", []))[:2], flush=True)
    path.write_text(written(known), encoding="utf-8")


def written(known: dict[str, Any]) -> str:
    """Return the file's text: a line for each part of a model."""
    models = []
    for name, model in known.items():
        parts = (f"  {json.dumps(part)}: {json.dumps(content)}" for part, content in model.items())
        models.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(models) + "\n}\n"


def new_row(kind: str, own: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a model's config.json, and its tensors' shapes, as transformers saves them."""
    import transformers
    from safetensors import safe_open

    made = getattr(transformers, kind)
    made(made.config_class(**{**SMALL, **own})).save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        shapes = {key: " ".join(map(str, file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118
    content = json.loads((folder / "saved" / "config.json").read_text())
    content = {key: value for key, value in content.items() if key not in NOISE}
    content |= {key: value for key, value in own.items() if key in SAID or key not in content}
    return {"config": content, "shapes": together(shapes)}


def recorded(row: Mapping[str, Any], known: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a row has besides its config and shapes, computed again."""
    from checkpoint import spelled_out, write_family

    config, shapes = row["config"], spelled_out((known[row["like"]] if "like" in row else row)["shapes"])
    parts = RECORDED & {*row} or RECORDED
    kind, found = config["architectures"][0], dict[str, Any]()
    checkpoint = write_family(folder / "model", config, shapes)
    if parts & {"logits", "rows"}:
        found |= computed(checkpoint, kind, config)
    if kind == "NomicBertModel":  # whose publishers' config.json the converter knows
        write_family(checkpoint, known["nomic-bert-old"]["config"], shapes)
    if parts & {"metadata", "tensors"}:
        found["metadata"], found["tensors"] = converted(checkpoint, folder / "model.gguf")
    return {part: value for part, value in found.items() if part in parts}


def computed(checkpoint: Path, kind: str, config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return some of transformers' logits, of an encoder the mean of its rows, or its scores; {} if it lacks the model.

    GGUF's readers compute something else of MPT and PhiMoE (another GELU; norms without mean), of Hy V4 (neighbours are
    rotated, not halves) and of Hunyuan VL (the fourth position of a text stands still): their rows have none.
    """
    import numpy as np
    import torch
    import transformers

    if not (made := getattr(transformers, kind, None)):
        return {}
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = made.from_pretrained(checkpoint, dtype=torch.float64, **kinds).eval()
    with torch.no_grad(), in_float64():
        read, answer = TEXT[:OF_TEXT], [config.get("decoder_start_token_id"), *TEXT[OF_TEXT:]]
        is_t5 = config.get("is_encoder_decoder", False)
        given = {"input_ids": read, "decoder_input_ids": answer} if is_t5 else {"input_ids": TEXT}
        output = model(**{key: torch.tensor([ids]) for key, ids in given.items()})
    if kind.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        logits = output.logits[0, -1].numpy().astype(np.float64)
        return {"logits": [round(float(x), 7) for x in logits[:251:50]]}
    rows = output.logits[0] if "logits" in output else output.last_hidden_state[0].mean(dim=0)
    return {"rows": [round(float(x), 6) for x in rows]}


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 what models compute in float32 in any type.

    It is off by up to 3e-5 (the delta rule of Qwen 3.5).
    """
    import torch

    single, cast = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, cast  # type: ignore[method-assign]


def together(shapes: dict[str, str]) -> dict[str, str]:
    """Merge names that differ by a number only into one: 0-3 for 0, 1, 2 and 3."""
    behind = (r"\.experts\.", r"\.norms\.", r"\.layers\.", r"\.h\.", r"\.blocks\.")
    for place in (rf"(?<={name})\d+(?=\.)" for name in behind):
        key = lambda item: (re.sub(place, "#", item[0]), item[1])  # noqa: E731, B023
        found: dict[str, str] = {}
        for (name, shape), group in groupby(sorted(shapes.items(), key=key), key):
            numbers = sorted(int(match[0]) for one, _ in group if (match := re.search(place, one)))
            for first, last in runs(numbers) if numbers else [(0, 0)]:
                found[name.replace("#", f"{first}-{last}" if last > first else f"{first}", 1)] = shape
        shapes = found
    return shapes


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Format sorted numbers as ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def layer_of(name: str) -> int:
    """Of a tensor; -1 if it is of none."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def converted(checkpoint: Path, target: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Metadata and check sums of what llama.cpp's converter makes of it."""
    import gguf

    conversion = importlib.import_module("conversion")
    conversion.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    config = json.loads((checkpoint / "config.json").read_text())
    kind = (config.get("text_config", {}).get("architectures") or config["architectures"])[0]
    made = conversion.get_model_class(kind)
    made.set_vocab = conversion.TextModel.set_vocab
    if kind == "BaichuanForCausalLM":  # whose converter calls itself forever for all other tensors
        own_way, usual = made.modify_tensors, conversion.TextModel.modify_tensors
        made.modify_tensors = lambda self, data, name, bid: (own_way if "W_pack" in name else usual)(
            self, data, name, bid
        )
    made._get_suppress_tokens = lambda self: None  # by the vocabulary
    own = {"hparams": config} if kind in AS_IT_IS else {}
    guesses = b"mtp.fc.weight" in (checkpoint / "model.safetensors").read_bytes()
    if kind in WITH_MTP:
        made.no_mtp = not guesses
    if kind == "NomicBertModel":  # which is known by its publishers' config.json only
        made._is_tokenizer_xlmroberta = lambda self: False
    made(checkpoint, gguf.LlamaFileType.ALL_F32, target, **own).write()
    reader = gguf.GGUFReader(target)
    of_arch = f"{reader.fields['general.architecture'].contents()}."
    fields = {key: field.contents() for key, field in reader.fields.items()}
    metadata = {key: value for key, value in fields.items() if key in GENERAL or key.startswith(of_arch)}
    sums: dict[str, int] = {}
    for tensor in sorted(reader.tensors, key=lambda tensor: layer_of(tensor.name)):
        short = re.sub(r"^blk\.\d+\.", "blk.", tensor.name)
        shape = " ".join(map(str, reversed(tensor.shape.tolist())))
        known = crc32(f"{tensor.tensor_type.name} {shape}".encode(), sums.get(short, 0))
        sums[short] = crc32(tensor.data.tobytes(), known)
    for unlike in ("blk.ssm_a", "dec.output_norm.weight"):  # see tests/unit/convert/families/test_families.py
        sums.pop(unlike, None)
    return metadata, {short: f"{number:08x}" for short, number in sums.items()}


if __name__ == "__main__":
    main()
