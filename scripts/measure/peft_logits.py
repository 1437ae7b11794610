"""Compare logits with low-rank adapters with those of transformers and PEFT.

    PYTHON scripts/measure peft-logits [VARIANT...]
    PYTHON scripts/measure peft-logits --all

PYTHON has torch, transformers and peft besides localllm. A variant is a tiny random checkpoint of
tests/goldens/checkpoints.json; without one: a family of each kind. PEFT wraps all linear layers and experts with three
adapters whose matrices are random, of different ranks, factors and layers, and saves them. A row has the squared error
of localllm's logits relative to the squares of PEFT's, which are computed in float64: for the base model, for the first
adapter at the scales 1, 0.5, -1 and 0, and for all three at once; `config`: with the base model's config.json beside
the adapter, `file`: with the GGUF file alone. A 0 says that no bit differs from the model without adapters. The last
column is the same measure of what the first adapter changes.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import edit_json, spelled_out, write_family
from common import ROOT, localllm_command, print_header, print_row, run_process

import localllm
from localllm.errors import LocalllmError

sys.path.insert(0, str(ROOT / "scripts" / "record"))
FAMILIES = ("llama", "qwen2", "phi3", "gemma3", "mixtral", "qwen3moe", "deepseek2", "deepseek3", "mamba", "qwen3_next")
NAMES = ("first", "second", "third")
SCALES = ((1.0, 0.0, 0.0), (0.5, 0.0, 0.0), (-1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.5, -1.0))
MAMBAS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")  # whose out_proj PEFT refuses
TIED = ("lm_head", "embed_out", "output_projection")
STRENGTH = 0.2  # standard deviation of the adapters' matrices


def read_variants() -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "goldens" / "checkpoints.json").read_text("utf-8"))


def list_variants() -> list[str]:
    """Return the names of all variants that generate text and whose logits by transformers are known."""
    import transformers

    variants = read_variants()
    kinds = {name: content["config"].get("architectures", [""])[0] for name, content in variants.items()}
    return [
        name for name, kind in kinds.items()
        if kind.endswith("ForCausalLM") and hasattr(transformers, kind) and "logits" in variants[name]
    ]  # fmt: skip


def open_with_transformers(folder: Path, kind: str) -> Any:
    """Open a checkpoint in float64."""
    import torch
    import transformers

    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64, **kinds).eval()


def list_targets(model: Any) -> list[str]:
    """Return the names of all linear layers that work when PEFT has wrapped them.

    A router of Llama 4 returns more than its product. transformers multiplies by the weights of a Mamba layer's dt_proj
    without calling it, and by those of its out_proj where fused kernels are installed: PEFT refuses the second.
    """
    import torch

    is_tied, kind = model.config.tie_word_embeddings, model.config.model_type
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = [name for name in names if not (is_tied and name.endswith(TIED))]
    names = [name for name in names if not name.endswith(("dt_proj", "router"))]
    return [name for name in names if kind not in MAMBAS or not name.endswith("out_proj")]


def list_parameters(model: Any) -> list[str]:
    """Return the ends of the names of parameters that have the matrices of all experts, or a router's."""
    names = [name for name, parameter in model.named_parameters() if ".mlp." in name or ".feed_forward." in name]
    ends = ("experts.gate_up_proj", "experts.down_proj")
    return [end for end in ends if any(name.endswith(end) for name in names)]


def make_adapters(model: Any, folder: Path) -> Any:
    """Wrap a model with three random adapters, save each as FOLDER/NAME, and return the wrapped model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from peft.utils import transformers_weight_conversion

    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    names = list_targets(model)
    parameters = list_parameters(model) or None
    shared = {"init_lora_weights": False, "task_type": "CAUSAL_LM", "target_parameters": parameters}
    last = names[-1].rpartition(".")[2]
    configs = [
        LoraConfig(r=4, lora_alpha=6, target_modules=names, **shared),
        LoraConfig(
            r=3, lora_alpha=5, use_rslora=True, target_modules=names[::2], rank_pattern={names[0]: 6}, **shared,
        ),
        LoraConfig(
            r=2, lora_alpha=4, target_modules=names[len(names) // 3 :], rank_pattern={last: 5},
            alpha_pattern={last: 3, names[-2]: 9}, **shared,
        ),
    ]  # fmt: skip
    torch.manual_seed(0)
    wrapped = get_peft_model(model, configs[0], adapter_name=NAMES[0], autocast_adapter_dtype=False)
    for name, config in zip(NAMES[1:], configs[1:], strict=True):
        wrapped.add_adapter(name, config)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            parameter.data = (STRENGTH * torch.randn(parameter.shape)).double()
    for name in NAMES:
        wrapped.save_pretrained(folder, selected_adapters=[name])
    return wrapped


def compute_with_peft(wrapped: Any, ids: Sequence[int], scales: Sequence[float]) -> np.ndarray:
    """Compute logits in float64 with these scales of the adapters."""
    import torch
    from record_checkpoints import in_float64

    wrapped.base_model.set_adapter([*NAMES])
    modules = [module for module in wrapped.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]
    usual = [dict(module.scaling) for module in modules]
    by_name = dict(zip(NAMES, scales, strict=True))
    for module, factors in zip(modules, usual, strict=True):
        module.scaling.update({name: factor * by_name[name] for name, factor in factors.items()})
    with torch.no_grad(), in_float64():
        logits = wrapped(input_ids=torch.tensor([ids])).logits[0].numpy()
    for module, factors in zip(modules, usual, strict=True):
        module.scaling.update(factors)
    return logits


def compute_with_localllm(path: Path, lora: Sequence[Path], ids: Sequence[int], backend: str) -> Iterator[np.ndarray]:
    """Compute logits without adapters, then with the scales of SCALES."""
    with localllm.open(str(path), backend=backend, kv_type="f32", threads=1, cache=False) as model:
        yield model.logits(ids)
    adapters = {str(folder): 1.0 for folder in lora}
    with localllm.open(str(path), backend=backend, kv_type="f32", threads=1, cache=False, lora=adapters) as model:
        for scales in SCALES:
            with closing(model.engine.sequence()) as sequence:
                sequence.set_adapter_scales(scales)
                yield sequence.append([*ids], "all")


def relative_error(expected: np.ndarray, computed: np.ndarray) -> float:
    """Return the squared error relative to the squares of the expected numbers; without masked logits."""
    wanted, computed = (np.clip(each[:, : computed.shape[1]].astype(np.float64), -1e3, 1e3)
                        for each in (expected, computed))  # fmt: skip
    return float(((wanted - computed) ** 2).sum() / (wanted**2).sum())


def compare(variant: str, backend: str, ids: Sequence[int], folder: Path) -> Iterator[list[object]]:
    """Yield a table's rows for a variant."""
    content = read_variants()
    config = content[variant]["config"]
    shapes = content[content[variant].get("like", variant)]["shapes"]
    checkpoint, path = write_family(folder / "model", config, spelled_out(shapes)), folder / "model.gguf"
    run_process(localllm_command("quantize", checkpoint, path, "F32"))
    model = open_with_transformers(checkpoint, config["architectures"][0])
    wrapped = make_adapters(model, folder)
    scales = [(0.0,) * len(NAMES), *SCALES]
    expected = [compute_with_peft(wrapped, ids, each) for each in scales]
    for way in ("config", "file"):
        for name in NAMES:
            edit_json(folder / name / "adapter_config.json", base_model_name_or_path=None)
            place = folder / name / "config.json"
            shutil.copy(checkpoint / "config.json", place) if way == "config" else place.unlink()
        try:
            computed = list(compute_with_localllm(path, [folder / name for name in NAMES], ids, backend))
        except LocalllmError as error:
            yield [variant, way, str(error).replace(str(folder), "")]
            continue
        errors = [f"{relative_error(*pair):.1e}" for pair in zip(expected, computed, strict=True)]
        if np.array_equal(computed[0], computed[1 + SCALES.index((0.0, 0.0, 0.0))]):
            errors[1 + SCALES.index((0.0, 0.0, 0.0))] = "0"
        effect = f"{relative_error(expected[0], expected[1]):.1e}"
        yield [variant, way, *errors, effect]


def main() -> None:
    """Compare variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--all", action="store_true", help="all variants that transformers has")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    ids = [(number * 37) % 250 + 3 for number in range(options.tokens)]
    print_header(["variant", "base by", "none", "1", "0.5", "-1", "0", "three", "their effect"])
    for variant in list_variants() if options.all else options.variants or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for row in compare(variant, options.backend, ids, Path(folder)):
                    print_row(row)
            except (ValueError, RuntimeError, SystemExit) as error:  # of transformers, or of `quantize`
                print_row([variant, str(error).strip().splitlines()[0]])
