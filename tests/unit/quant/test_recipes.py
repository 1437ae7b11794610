"""Compare the type that each tensor gets with llama-quantize.


llama_quantize_plans.json holds what `llama_model_quantize` of llama.cpp (llama-cpp-python 0.3.36) plans in a dry run
for models that have a header only: by recipe, with "pure" or "imatrix" where the user asks for that, the types of each
group of matrices, in the order of the layers ("Q6_K*2 Q4_K*3"). Vectors and the experts' router stay F32 and are not
listed.
"""

import json
import re

import pytest
from project import GOLDENS

from localllm.quant.formats import BY_NAME, RECIPES
from localllm.quant.recipes import (
    ALIASES,
    FormatPlanner,
    ModelProperties,
    RecipeOptions,
    find_recipe,
    fit_format,
    get_role,
    is_quantized,
    needs_importance,
    sort_like_llama,
)

CASES = json.loads((GOLDENS / "llama_quantize_plans.json").read_text())


def shapes(arch="llama", layers=4, width=256, heads=8, kv=2, ff=512, experts=0, tied=False, qkv=False):
    """Return the shapes of a model's tensors, by name."""
    tensors = {"token_embd.weight": (32, width), "output_norm.weight": (width,)}
    if not tied:
        tensors["output.weight"] = (32, width)
    kv_width = width // heads * kv
    attention = {"attn_q": (width, width), "attn_k": (kv_width, width), "attn_v": (kv_width, width)}
    attention = {"attn_qkv": (width + 2 * kv_width, width)} if qkv else attention
    dense = {"ffn_gate": (ff, width), "ffn_up": (ff, width), "ffn_down": (width, ff)}
    if experts:
        stacks = {f"{name}_exps": (experts, *shape) for name, shape in dense.items()}
        dense = {"ffn_gate_inp": (experts, width), **stacks, **{f"{name}_shexp": dense[name] for name in dense}}
    norms = {"attn_norm": (width,), "ffn_norm": (width,)}
    for layer in range(layers):
        for name, shape in (norms | attention | {"attn_output": (width, width)} | dense).items():
            tensors[f"blk.{layer}.{name}.weight"] = shape
    return tensors


def facts(arch="llama", layers=4, heads=8, kv=2, experts=0, importance=False, **others):
    keys = {
        "block_count": layers,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "expert_count": experts,
    }
    metadata = {f"{arch}.{key}": value for key, value in keys.items()}
    return ModelProperties.from_metadata({"general.architecture": arch, **metadata}, importance)


def planned(recipe, model, tensors, options=RecipeOptions()):  # noqa: B008
    """Return the type of every tensor that is quantized."""
    planner = FormatPlanner(recipe, model, tensors, options)
    choices = {name: planner.choose(name, tensors[name]) for name in sort_like_llama(tensors)}
    return {name: choice.format for name, choice in choices.items() if choice}


def by_kind(plan):
    """Group a plan as the recorded file does."""
    kinds = {}
    for name, format in plan.items():
        kinds.setdefault(re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight"), []).append(format)
    return kinds


def expanded(plan):
    """Expand a row of the recorded file to the types of all layers; one name stands for any number."""
    return {
        kind: [format for run in text.split() for format in [run.partition("*")[0]] * int(run.partition("*")[2] or 1)]
        for kinds, text in plan.items()
        for kind in kinds.split()
    }


def same(ours, theirs):
    return ours == theirs or (len(theirs) == 1 and set(ours) == set(theirs))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RECIPES)
def test_plans_are_those_of_llama_quantize(case: str, name: str):
    model, plans = CASES[case]["model"], CASES[case]["plans"]
    compared = 0
    for key in (name, f"{name} pure", f"{name} imatrix"):
        if key not in plans:
            continue
        if plans[key] is None:
            compared += 1
            continue  # llama-quantize has no fallback for Q1_0's blocks of 128, and ends
        importance, pure = key.endswith("imatrix"), key.endswith("pure")
        plan = planned(RECIPES[name], facts(**model, importance=importance), shapes(**model), RecipeOptions(pure=pure))
        ours = by_kind({tensor: format for tensor, format in plan.items() if format != "F32"})
        theirs = expanded(plans[key])
        different = {kind for kind in ours | theirs if not same(ours.get(kind, []), theirs.get(kind, []))}
        assert different == set(), (key, {kind: (ours.get(kind), theirs.get(kind)) for kind in different})
        compared += 1
    assert compared in (1, 3)


@pytest.mark.parametrize(
    ("model", "is_70b"),
    [
        ({"arch": "llama", "layers": 80}, True),
        ({"arch": "llama", "layers": 80, "kv": 8}, False),  # Llama 1 65B
        ({"arch": "llama", "layers": 79}, False),
        ({"arch": "llama", "layers": 81}, False),
        ({"arch": "llama-embed", "layers": 80}, True),
        ({"arch": "llama-embed", "layers": 80, "kv": 8}, False),
        *[({"arch": arch, "layers": 80, "kv": kv}, True) for arch in ("deci", "olmo", "qwen2") for kv in (2, 8)],
        *[({"arch": arch, "layers": 64}, False) for arch in ("deci", "olmo", "qwen2")],
        *[({"arch": arch, "layers": 80}, False) for arch in ("qwen3", "olmo2", "gemma3", "deci2", "")],
    ],
    ids=str,
)
def test_models_shaped_like_llama_2_70b_get_better_values(model: dict, is_70b: bool):
    """Give their small attn_v 5 bits in recipes of 3 and 4 bits, depending on the architecture as in llama.cpp."""
    values = {f"blk.{layer}.attn_v.weight": (256, 1024) for layer in range(80)}
    for name, usual in (("Q3_K_S", "Q3_K"), ("Q4_K_S", "Q4_K")):
        plan = planned(RECIPES[name], facts(**model), values)
        assert plan["blk.40.attn_v.weight"] == ("Q5_K" if is_70b else usual)
    assert facts(**model).is_70b == is_70b


def test_recipes_are_found_by_name_number_and_alias():
    assert find_recipe("q4_k_m") is find_recipe("15") is find_recipe("Q4_K") is RECIPES["Q4_K_M"]
    for text in ("Q4", "", "33", "-1", "²"):
        with pytest.raises(KeyError):
            find_recipe(text)


def test_recipes_have_different_numbers_and_known_types():
    assert len({recipe.number for recipe in RECIPES.values()}) == len(RECIPES)
    assert set(ALIASES.values()) <= RECIPES.keys() and not ALIASES.keys() & RECIPES.keys()
    assert all(recipe.base in BY_NAME for recipe in RECIPES.values())


def test_recipes_have_the_numbers_of_llama_cpp():
    import gguf

    theirs = {kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(kind) for kind in gguf.LlamaFileType}
    assert {
        recipe.name: recipe.number for recipe in RECIPES.values() if recipe.name in theirs
    }.items() <= theirs.items()


def test_options_override_the_recipe():
    model, tensors = facts(), shapes()
    chosen = RecipeOptions(output="F16", embedding="Q8_0", patterns=((re.compile("attn_[qk]"), "Q5_1"),))
    plan = planned(RECIPES["Q4_K_S"], model, tensors, chosen)
    assert (plan["output.weight"], plan["token_embd.weight"]) == ("F16", "Q8_0")
    assert {plan[f"blk.{n}.attn_{name}.weight"] for n in range(4) for name in "qk"} == {"Q5_1"}
    assert plan["blk.3.attn_v.weight"] == "Q5_K" and plan["blk.3.ffn_up.weight"] == "Q4_K"
    assert "output.weight" not in planned(RECIPES["Q4_K_S"], model, tensors, RecipeOptions(keep_output=True))


def test_the_first_matching_pattern_decides():
    patterns = ((re.compile("attn"), "Q8_0"), (re.compile("attn_v"), "Q2_K"))
    assert (
        planned(RECIPES["Q6_K"], facts(), shapes(), RecipeOptions(patterns=patterns))["blk.0.attn_v.weight"] == "Q8_0"
    )


def test_a_type_that_does_not_fit_the_rows_falls_back():
    assert [fit_format("Q4_K", columns) for columns in (512, 320, 80)] == ["Q4_K", "Q5_0", "F16"]
    assert [fit_format("Q8_0", columns) for columns in (96, 80)] == ["Q8_0", "F16"]
    for recipe in RECIPES.values():
        for columns in (256, 32, 16, 1):
            assert columns % BY_NAME[fit_format(recipe.base, columns)].block == 0
    planner = FormatPlanner(RECIPES["Q4_K_S"], facts(), ["blk.0.ffn_up.weight"], RecipeOptions())
    choice = planner.choose("blk.0.ffn_up.weight", (512, 320))
    assert (choice.format, choice.wanted, choice.is_fallback) == ("Q5_0", "Q4_K", True)


def test_vectors_norms_and_small_matrices_are_not_quantized():
    assert is_quantized("blk.0.ffn_up_exps.weight", (4, 512, 256))
    for name, shape in [
        ("blk.0.attn_q.bias", (256, 256)),
        ("blk.0.attn_norm.weight", (256, 256)),
        ("blk.0.ffn_gate_inp.weight", (8, 256)),
        ("blk.0.ssm_conv1d.weight", (256, 4)),
        ("output.weight", (256,)),
        ("output.weight", (1, 256)),
        ("position_embd.weight", (512, 256)),
    ]:
        assert not is_quantized(name, shape), name


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("hc_attn_fn", None), ("indexer.attn_q_b", None), ("indexer_compressor_gate", None), ("attn_kv_a_mqa", None),
        ("ssm_f_a", None), ("attn_v_b", None), ("attn_q_a", "Q8_0"), ("attn_q_b", "Q8_0"), ("ffn_gate_shexp", "Q4_K"),
    ],
)  # fmt: skip
def test_delicate_matrices_of_glm_5_3_keep_more_bits(name, format):
    """llama-quantize writes them so in Q4_K_M; other architectures treat them like any matrix."""
    name = f"blk.1.{name}.weight"
    for arch, expected in (("glm5-next", format), ("deepseek2", "Q4_K")):
        model = facts(layers=4, experts=8)._replace(arch=arch)
        choice = FormatPlanner(RECIPES["Q4_K_M"], model, [name], RecipeOptions()).choose(name, (512, 256))
        assert (choice and choice.format) == expected


def test_an_expert_without_a_layer_is_refused():
    planner = FormatPlanner(
        RECIPES["Q4_K_M"], facts(experts=8, layers=2), ["blk.2.ffn_down_exps.weight"], RecipeOptions()
    )
    with pytest.raises(ValueError, match=r"blk\.2\.ffn_down_exps"):
        planner.choose("blk.2.ffn_down_exps.weight", (8, 256, 256))


def test_model_facts_tolerate_missing_and_odd_metadata():
    assert ModelProperties.from_metadata({}, False) == ModelProperties("", 0, 0, 0, False, False)
    per_layer = {"general.architecture": "x", "x.attention.head_count": [8, 16], "x.attention.head_count_kv": [2, 0]}
    assert ModelProperties.from_metadata(per_layer, True).grouping == 4
    assert (
        ModelProperties.from_metadata({"general.architecture": "x", "x.attention.head_count": 8}, False).grouping == 1
    )
    assert ModelProperties.from_metadata(
        {"general.architecture": "x", "x.attention.head_count": "8", "x.block_count": []}, False
    ) == ModelProperties("x", 0, 0, 0, False, False)


def test_tensors_are_ordered_as_in_llama_cpp():
    names = ["blk.10.a", "output.weight", "blk.2.b", "blk.2.a", "blkx", "token_embd.weight"]
    assert sort_like_llama(names) == ["blkx", "output.weight", "token_embd.weight", "blk.2.a", "blk.2.b", "blk.10.a"]


def test_low_bit_types_need_an_importance_matrix():
    assert needs_importance(RECIPES["Q2_K_S"], "blk.0.ffn_up.weight", "Q2_K")
    assert not needs_importance(RECIPES["Q2_K"], "blk.0.ffn_up.weight", "Q2_K")
    assert not needs_importance(RECIPES["Q2_K_S"], "token_embd.weight", "Q2_K")
    assert needs_importance(RECIPES["IQ2_XXS"], "blk.0.ffn_up.weight", "IQ2_XXS")
    assert get_role("blk.0.attn_kv_b.weight") == get_role("blk.0.attn_qkv.weight") == "value"
