"""Choose the format of each tensor by a recipe such as Q4_K_M, with the rules of llama-quantize.

A recipe names one format for most matrices. More sensitive ones get more bits: attn_v and ffn_down, above all in the
first and last layers, and the output matrix. Vectors, norms and small matrices are not quantized.

Source: llama.cpp's src/llama-quant.cpp; tests compare with its dry runs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

from localllm.quant.formats import BY_NAME, RECIPES, Recipe

UNQUANTIZED = re.compile(  # small or sensitive matrices, which are not quantized
    r"""_norm\.weight | ffn_gate_inp\.weight | ffn_gate_tid2eid\.weight | altup | laurel | per_layer_model_proj
    | ^position_embd\.weight$ | ^token_types\.weight$ | ssm_conv1d | shortconv\.conv\.weight
    | indexer\.[kq]_proj\.weight | time_mix_(?:first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight
    | attn_rel_b\.weight | \.position_embd | sam\.pos_embd | sam\.neck\. | sam\.net_ | \.rel_pos | \.patch_embd
    | \.patch_merger | a\.rvq\.codebook | mm\.a\.code_embd""",
    re.VERBOSE,
)


UNQUANTIZED_BY_ARCH = {  # further matrices that are not quantized, by architecture
    "clip": re.compile(r"^mm\.input_projection\.weight$"),  # Gemma 3's is transposed: llama-quantize breaks the file
    "glm5-next": re.compile(
        r"""hc_ | indexer\.(?:attn_q_b|attn_k|proj) | indexer_compressor | ssm_(?:[fg]_[ab]|beta)\.weight
        | attn_kv_a_mqa\.weight | attn_[kv]_b\.weight""",
        re.VERBOSE,
    ),
}
EIGHT_BIT_BY_ARCH = {"glm5-next": re.compile(r"attn_q_[ab]|nextn\.eh_proj")}  # matrices that get Q8_0 in every recipe


def is_quantized(name: str, shape: tuple[int, ...], arch: str = "") -> bool:
    """Return whether recipes quantize a tensor, which must be a matrix or a stack of them."""
    of_arch = UNQUANTIZED_BY_ARCH.get(arch)
    is_kept = UNQUANTIZED.search(name) or (of_arch and of_arch.search(name))
    return max(shape[:-1], default=1) > 1 and name.endswith("weight") and not is_kept


# ---- roles

OUTPUT, EMBEDDING, QUERY, KEY, VALUE, ATTENTION_OUTPUT, UP, GATE, DOWN, OTHER = (
    "output",
    "embedding",
    "query",
    "key",
    "value",  # also fused with query and key (attn_qkv), or expanded from MLA's latent cache (attn_kv_b)
    "attention output",
    "up",
    "gate",
    "down",
    "other",
)
ROLES = [  # (role, substrings of names); the first match counts
    (VALUE, ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    (KEY, ("attn_k.weight",)),
    (QUERY, ("attn_q.weight",)),
    (ATTENTION_OUTPUT, ("attn_output.weight",)),
    (UP, ("ffn_up",)),
    (GATE, ("ffn_gate",)),
    (DOWN, ("ffn_down",)),
]


def get_role(name: str) -> str:
    """Return the role of a tensor by its name; OTHER if it has none of the roles above."""
    if name == "output.weight":
        return OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return EMBEDDING
    return next((role for role, parts in ROLES if any(part in name for part in parts)), OTHER)


ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4_MOE": "MXFP4"}


def find_recipe(text: str) -> Recipe:
    """Return the recipe with this name, in any case, or number. Raises KeyError."""
    if text.isascii() and text.isdigit():
        return {str(recipe.number): recipe for recipe in RECIPES.values()}[text]
    name = text.upper()
    return RECIPES[ALIASES.get(name, name)]


class ModelProperties(NamedTuple):
    """The facts about a model that the rules depend on."""

    arch: str
    layers: int
    experts: int
    grouping: int  # query heads per key-value head, in the first layer
    is_70b: bool  # Llama 2 70B's shape, whose attn_v is small
    importance: bool  # an importance matrix is used

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], importance: bool) -> "ModelProperties":
        """Read the properties. Missing counts are 0; a missing head_count_kv equals head_count."""
        arch = str(metadata.get("general.architecture", ""))

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{arch}.{key}", default)
            if hasattr(value, "__len__"):  # one per layer
                value = value[0] if len(value) else default
            return int(value) if isinstance(value, Integral) else default

        heads = number("attention.head_count")
        kv_heads = number("attention.head_count_kv", heads)
        layers = number("block_count")
        is_70b = layers == 80 and (
            arch in ("deci", "olmo", "qwen2") or (arch in ("llama", "llama-embed") and heads != kv_heads)
        )
        grouping = heads // kv_heads if kv_heads > 0 else 0
        return cls(arch, layers, number("expert_count"), grouping, is_70b, importance)


# ---- the rules; each returns the name of a format, or "" for the base format of the recipe


class MatrixPosition(NamedTuple):
    """The index of a matrix among the `layers` matrices of its role."""

    model: ModelProperties
    layer: int
    layers: int

    @property
    def in_first_eighth(self) -> bool:
        return self.layer < self.layers // 8

    @property
    def in_last_eighth(self) -> bool:
        return self.layer >= 7 * self.layers // 8

    @property
    def gets_more_bits(self) -> bool:
        """Return whether the layer is in the first or last eighth, or every third one in between."""
        return self.in_first_eighth or self.in_last_eighth or (self.layer - self.layers // 8) % 3 == 2

    @property
    def shares_keys(self) -> bool:
        """Return whether at least 4 query heads share a key-value head, so that attn_v is small and matters more."""
        return self.model.grouping >= 4


Rule = Callable[[MatrixPosition], str]
TINY_RECIPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")
SMALL_RECIPES = ("IQ2_S", "IQ2_M")


def build_rules(*rows: tuple[str, Rule]) -> dict[str, Rule]:
    """Build a table of rules by recipe.

    rows: (names of recipes separated by spaces, rule).
    """
    return {name: rule for names, rule in rows for name in names.split()}


VALUE_RULES = build_rules(
    ("Q2_K", lambda at: "Q4_K" if at.shares_keys else "Q3_K"),
    ("Q2_K_S IQ3_XS IQ3_S", lambda at: "Q4_K" if at.shares_keys else ""),
    ("IQ3_XXS", lambda at: "Q4_K" if at.shares_keys else "" if at.model.importance else "IQ3_S"),
    ("IQ3_M", lambda at: "Q4_K"),
    ("Q3_K_M", lambda at: "Q5_K" if at.layer < 2 else "Q4_K"),
    ("Q3_K_L", lambda at: "Q5_K"),
    ("IQ4_NL IQ4_XS", lambda at: "Q5_K" if at.shares_keys else ""),
    ("Q4_K_M Q5_K_M", lambda at: "Q6_K" if at.gets_more_bits else ""),
    ("Q4_K_S", lambda at: "Q5_K" if at.layer < 4 else ""),
    (" ".join(TINY_RECIPES), lambda at: "Q4_K" if at.shares_keys or at.model.experts >= 4 else "Q2_K"),
    (" ".join(SMALL_RECIPES), lambda at: "Q4_K" if at.shares_keys or at.model.experts >= 4 else "IQ3_S"),
)

DOWN_RULES = build_rules(
    ("Q2_K", lambda at: "Q3_K"),
    ("Q2_K_S", lambda at: "Q4_K" if at.in_first_eighth else ""),
    ("IQ3_XXS", lambda at: "" if at.model.importance else "Q4_K" if at.in_first_eighth else "Q3_K"),
    ("Q3_K_M", lambda at: "Q5_K" if at.layer < at.layers // 16 else "Q4_K"),
    ("IQ3_M", lambda at: "Q4_K" if at.in_first_eighth or (at.model.experts == 8 and at.gets_more_bits) else ""),
    ("Q3_K_L", lambda at: "Q5_K"),
    ("Q4_K_M Q5_K_M", lambda at: "Q6_K" if at.gets_more_bits else ""),
    ("Q4_K_S", lambda at: "Q5_K" if at.in_first_eighth else ""),
    ("IQ4_NL IQ4_XS", lambda at: "Q5_K" if at.in_first_eighth and not at.model.importance else ""),
    ("Q4_0", lambda at: "Q4_1" if at.in_first_eighth and at.model.importance else ""),
    ("Q5_0", lambda at: "Q5_1" if at.in_first_eighth and at.model.importance else ""),
    (" ".join(TINY_RECIPES), lambda at: "Q2_K" if at.in_first_eighth else ""),
    (" ".join(SMALL_RECIPES), lambda at: "IQ3_S" if at.in_first_eighth else ""),
)

FALCON_DOWN_RULES = DOWN_RULES | build_rules(
    ("Q3_K_M", lambda at: "Q5_K" if at.layer < at.layers // 16 else "Q4_K" if at.gets_more_bits else ""),
    ("Q3_K_L", lambda at: "Q4_K"),
    ("Q4_K_M", lambda at: "Q6_K" if at.layer < at.layers // 16 else "Q5_K" if at.gets_more_bits else ""),
    ("Q4_K_S", lambda at: ""),
)

ATTENTION_OUTPUT_RULES = build_rules(
    ("Q2_K", lambda at: "Q3_K"),
    ("IQ3_XXS", lambda at: "IQ3_S"),
    ("Q3_K_M IQ3_M", lambda at: "Q4_K"),
    ("Q3_K_L", lambda at: "Q5_K"),
    ("IQ1_S IQ1_M", lambda at: "IQ2_XXS"),
    (" ".join(SMALL_RECIPES), lambda at: "IQ3_S"),
)
FALCON_ATTENTION_OUTPUT_RULES = build_rules(("Q3_K_L", lambda at: "Q4_K"))
EIGHT_EXPERTS_ATTENTION_OUTPUT_RULES = build_rules(
    ("Q2_K Q3_K_S Q3_K_M Q4_K_S Q4_K_M IQ4_NL IQ4_XS IQ3_XS IQ3_XXS IQ3_S IQ3_M", lambda at: "Q5_K"),
    (" ".join((*TINY_RECIPES, *SMALL_RECIPES)), lambda at: "Q5_K"),
)

QUERY_RULES = build_rules(("IQ3_XS", lambda at: "IQ3_XXS"), ("IQ3_XXS", lambda at: "IQ2_S"))
UP_RULES = build_rules(("IQ3_XS", lambda at: "" if at.in_first_eighth or at.in_last_eighth else "IQ3_XXS"))

EMBEDDING_FORMATS = {
    **dict.fromkeys(TINY_RECIPES, "Q2_K"),
    **dict.fromkeys((*SMALL_RECIPES, "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_K"),
}


def choose_value_format(recipe: str, at: MatrixPosition) -> str:
    if recipe in TINY_RECIPES or recipe in SMALL_RECIPES:
        return VALUE_RULES[recipe](at)
    if at.model.experts == 8:  # attention is small compared with the experts
        return "Q8_0"
    chosen = VALUE_RULES.get(recipe, lambda at: "")(at)
    return "Q5_K" if at.model.is_70b and (chosen or RECIPES[recipe].base) in ("Q3_K", "Q4_K") else chosen


def choose_key_format(recipe: str, at: MatrixPosition) -> str:
    if at.model.experts == 8:
        return "Q4_K" if recipe in TINY_RECIPES or recipe in SMALL_RECIPES else "Q8_0"
    return QUERY_RULES.get(recipe, lambda at: "")(at)


def choose_attention_output_format(recipe: str, at: MatrixPosition) -> str:
    falcon, eight = at.model.arch == "falcon", at.model.experts == 8
    if falcon and recipe not in TINY_RECIPES and recipe not in SMALL_RECIPES:
        table = FALCON_ATTENTION_OUTPUT_RULES
    else:
        table = EIGHT_EXPERTS_ATTENTION_OUTPUT_RULES if eight else ATTENTION_OUTPUT_RULES
    return table.get(recipe, lambda at: "")(at)


def choose_output_format(recipe: Recipe, model: ModelProperties, columns: int) -> str:
    """Return the format of the output matrix, or of an embedding that also computes the logits."""
    if recipe.name == "MXFP4" or model.arch == "falcon" or columns % BY_NAME[recipe.base].block:
        return "Q8_0"
    if recipe.name in (*TINY_RECIPES, *SMALL_RECIPES, "IQ3_XXS"):
        return "Q5_K"
    return "Q8_0" if recipe.base == "Q8_0" else "Q6_K"


def fit_format(name: str, columns: int) -> str:
    """Return the format, or its fallback if a row of `columns` weights is not whole blocks of it."""
    if columns % BY_NAME[name].block == 0:
        return name
    name = BY_NAME[name].fallback
    return name if columns % BY_NAME[name].block == 0 else "F16"


# ---- the plan for a model


class RecipeOptions(NamedTuple):
    """The user's overrides. Formats are given by name; "" leaves the choice to the recipe."""

    pure: bool = False  # whether every matrix gets the base format
    output: str = ""  # the format of the output matrix
    embedding: str = ""  # the format of the embedding matrix
    keep_output: bool = False  # whether output.weight is not quantized
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()  # (pattern searched in tensor names, format)
    formats: Mapping[str, str] = MappingProxyType({})  # by tensor name


class FormatChoice(NamedTuple):
    """The format of a tensor, and the format that the recipe wants, which may need longer rows."""

    format: str
    wanted: str

    @property
    def is_fallback(self) -> bool:
        return self.format != self.wanted


class FormatPlanner:
    """Chooses the formats of a model's tensors.

    It counts the matrices of each role, so `choose` must be called in llama.cpp's order of tensors.
    """

    def __init__(self, recipe: Recipe, model: ModelProperties, names: Iterable[str], options: RecipeOptions):
        roles = [get_role(name) for name in names]
        self.recipe, self.model, self.options = recipe, model, options
        self.tied = OUTPUT not in roles
        self.counts = {VALUE: roles.count(VALUE)}
        self.seen: dict[str, int] = {}

    def choose(self, name: str, shape: tuple[int, ...]) -> FormatChoice | None:
        """Return the format of a tensor; None if it is not quantized. Raises ValueError if no rule fits its name."""
        role = get_role(name)
        if not is_quantized(name, shape, self.model.arch) or (self.options.keep_output and role == OUTPUT):
            return None
        override = {EMBEDDING: self.options.embedding, OUTPUT: self.options.output}.get(role)
        base = self.recipe.base
        if name in self.options.formats:
            wanted = self.options.formats[name]
        elif override:
            wanted = override
        elif base in ("F32", "F16", "BF16"):
            return FormatChoice(base, base)
        else:
            wanted = self.find_pattern_format(name) or (
                base if self.options.pure else self.find_rule_format(name, shape, role) or base
            )
        return FormatChoice(fit_format(wanted, shape[-1]), wanted)

    def makes_logits(self, name: str) -> bool:
        """Return whether a matrix computes the logits: output.weight, or the embedding of a model without one."""
        return name == "output.weight" or (name == "token_embd.weight" and self.tied)

    def find_pattern_format(self, name: str) -> str:
        return next((format for pattern, format in self.options.patterns if pattern.search(name)), "")

    def find_rule_format(self, name: str, shape: tuple[int, ...], role: str) -> str:
        """Return the format that the recipe's rules give a tensor, or ""."""
        recipe, in_8_bits = self.recipe.name, EIGHT_BIT_BY_ARCH.get(self.model.arch)
        if in_8_bits and in_8_bits.search(name):
            return "Q8_0"
        if role == OUTPUT or (role == EMBEDDING and self.tied):
            return self.options.output or choose_output_format(self.recipe, self.model, shape[-1])
        if recipe == "MXFP4":
            return "MXFP4" if len(shape) > 2 and shape[-3] > 1 else "Q8_0"
        if role == EMBEDDING:
            return EMBEDDING_FORMATS.get(recipe, "")
        at = self.locate(name, role)
        if role == VALUE:
            return choose_value_format(recipe, at)
        if role == KEY:
            return choose_key_format(recipe, at)
        if role == ATTENTION_OUTPUT:
            return choose_attention_output_format(recipe, at)
        down = FALCON_DOWN_RULES if self.model.arch == "falcon" else DOWN_RULES
        table: dict[str, Rule] = {QUERY: QUERY_RULES, UP: UP_RULES, GATE: UP_RULES, DOWN: down}.get(role, {})
        return table.get(recipe, lambda at: "")(at)

    def locate(self, name: str, role: str) -> MatrixPosition:
        """Return the position of a matrix among those of its role.

        Matrices are counted; in models with experts, the name has the layer.
        """
        index, count = self.seen.get(role, 0), self.counts.get(role, self.model.layers)
        self.seen[role] = index + 1
        by_name = (
            self.model.experts > 1
            and role in (UP, GATE, DOWN)
            and self.recipe.name not in (*TINY_RECIPES, *SMALL_RECIPES)
        )
        if by_name:
            match = re.match(r"blk\.([0-9]+)\.", name)
            if not match or int(match[1]) >= count:
                raise ValueError(f"tensor {name}: expected a name that begins with blk.N., N below {count}")
            index = int(match[1])
        return MatrixPosition(self.model, index, count)


def sort_like_llama(names: Iterable[str]) -> list[str]:
    """Sort names in llama.cpp's order: names without a layer first, then by layer, then by name."""

    def key(name: str) -> tuple[int, bytes]:
        match = re.match(r"blk\.([0-9]+)\.", name)
        return (int(match[1]) if match else -1), name.encode()

    return sorted(names, key=key)


def needs_importance(recipe: Recipe, name: str, format: str) -> bool:
    """Return whether a tensor in this format has poor quality without an importance matrix."""
    if get_role(name) in (OUTPUT, EMBEDDING):
        return False
    return BY_NAME[format].poor or (format == "Q2_K" and recipe.name == "Q2_K_S")
