"""Test the comparison of options with llama-quantize of October 2026."""

import sys
from pathlib import Path

from project import ROOT
from tiny_model import write_tiny_model

sys.path.insert(0, str(ROOT / "scripts" / "record"))
from compare_quantize_options import main, missing, options_of, types_of

OPTIONS = [
    "--allow-requantize",
    "--leave-output-tensor",
    "--pure",
    "--imatrix",
    "--include-weights",
    "--exclude-weights",
    "--output-tensor-type",
    "--token-embedding-type",
    "--tensor-type",
    "--tensor-type-file",
    "--prune-layers",
    "--keep-split",
    "--override-kv",
    "--dry-run",
    "--max-buffer-size",
]
TYPES: dict[str, int | None] = {
    "Q1_0": 40,
    "Q2_0": 41,
    "Q4_0": 2,
    "Q4_1": 3,
    "MXFP4_MOE": 38,
    "Q5_0": 8,
    "Q5_1": 9,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ2_S": 28,
    "IQ2_M": 29,
    "IQ1_S": 24,
    "IQ1_M": 31,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "Q2_K": 10,
    "Q2_K_S": 21,
    "IQ3_XXS": 23,
    "IQ3_S": 26,
    "IQ3_M": 27,
    "Q3_K": 12,
    "IQ3_XS": 22,
    "Q3_K_S": 11,
    "Q3_K_M": 12,
    "Q3_K_L": 13,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "Q4_K": 15,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K": 17,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "Q8_0": 7,
    "F16": 1,
    "BF16": 32,
    "F32": 0,
    "COPY": None,
}


def usage(options: list[str], types: dict[str, int | None]) -> str:
    lines = [f"  {name} value\n      what it does" for name in options]
    lines += [f"  {number:>2}  or  {name:<7} : described" if number is not None
              else f"          {name:<7} : described" for name, number in types.items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def test_every_option_and_type_of_llama_quantize_is_accepted():
    text = usage(OPTIONS, TYPES)
    assert options_of(text) == OPTIONS and [name for _, name in types_of(text)] == [*TYPES]
    assert missing(text) == []


def test_missing_options_and_types_are_listed():
    assert missing(usage(["--pure", "--new-option"], {"Q9_9": 99})) == ["--new-option", "Q9_9", "99 (Q9_9)"]


def test_the_usage_of_another_program_is_refused():
    assert main("true") == 2


def test_a_command_line_with_all_options_runs(tmp_path: Path, cli):
    model, types = write_tiny_model(tmp_path / "model.gguf"), tmp_path / "types.txt"
    types.write_text("attn_k=q8_0")
    code, _, err = cli(
        "quantize", "--allow-requantize", "--leave-output-tensor", "--pure", "--token-embedding-type", "q8_0",
        "--tensor-type", "attn_v=f16", "--tensor-type-file", types, "--prune-layers", "1", "--override-kv",
        "llama.context_length=int:300", "--max-buffer-size", "100", "--output-tensor-type", "q8_0",
        model, tmp_path / "out.gguf", "Q4_0", "2",
    )  # fmt: skip
    assert code == 0 and "--max-buffer-size" in err
    assert cli("run", tmp_path / "out.gguf", "-p", "Hi", "-n", "1")[0] == 0
