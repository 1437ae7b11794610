"""Test that given-up names do not come back, and no function is named by a participle."""

import ast
import re
from functools import cache

from project import ROOT

from tests.test_layers import SOURCES

# Classes and functions that have the field's name now.
GIVEN_UP = re.compile(
    "SaidPart|PairReader|SeenRows|CardTexts|OnCard|Nowhere|Placed|Within|GuessHead|GuessSource|PictureReader|SaidCall"
    "|TurnEnds|SoFar|WrittenBefore|CostsBeside|KeyTurner|SquareSums|HollowFile|NotThereError|PiecedProduct|PassedPiece"
    "|EngineWithoutText|TimeUpError|MadeOf|ByNeed|Need|Surveyed|Forgetful|SeenImage|FillingModel|TextReader|Hearer"
    "|Patient|Elsewhere|Leaving|Meeting|Answering|Making|Rolling|Leaps|Eye|Sight|Stretches|Originals"
    "|read_whole|now_holds|no_listener|shown_to|forget_behind|with_storage|said_parts|is_worth_keeping|texts_only"
    "|told_generically|have_heads|filling_model|filling_options|chosen_before|silenced|by_need|as_done|held_back|deepen|require_harmless|leave_out_descriptions|collect_seldom"
)
PARTICIPLE = re.compile(
    "_*(abandoned|begun|called|chosen|drawn|filled|given|heard|kept|known|met|said|seen|settled|told)(_.*)?"
)
# Kernels keep their names: vector operations are named for what they return.
WITH_PARTICIPLES = ("localllm.kernels.",)
# A function is a verb: no preposition at its beginning or end, and "max" where a limit was called "most". Conversions
# (as_, from_, to_), callbacks (on_) and copies with one change (with_) keep theirs.
PREPOSITION = re.compile(
    "_*(of|by|in|at|for|before|behind|after|under|over|per|until|between|without|most)_.*"
    "|.*_(of|by|in|at|for|with|as|from|to)"
)
KEPT = re.compile(
    "_*(after_in_child|behind_padding|by_name|bytes_of|continue_at|continue_with"
    "|format_modified_at|get_values_for|in_first_eighth|in_last_eighth|in_one_stack|in_parts|in_rows|limit_to"
    "|most_bytes|occur_in|of_all|of_file|of_layer|of_tokens|parse_as|read_at"
    "|stopped_by|switch_to|without_scaling|write_at|acquire_from|after_step|adapters_of)"
)


@cache  # to parse all sources takes a second
def definitions(source: str) -> list[tuple[type, str]]:
    """Return what a module defines anywhere: ast.FunctionDef or ast.ClassDef, and its name."""
    nodes = ast.walk(ast.parse(source))
    return [(type(node), node.name) for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def given_up(source: str) -> list[str]:
    return [name for _, name in definitions(source) if GIVEN_UP.fullmatch(name)]


def participles(source: str) -> list[str]:
    return [name for kind, name in definitions(source) if kind is ast.FunctionDef and PARTICIPLE.fullmatch(name)]


def test_given_up_names_do_not_come_back():
    assert {module: names for module, source in SOURCES.items() if (names := given_up(source))} == {}


def test_no_function_is_named_by_a_participle():
    sources = {module: source for module, source in SOURCES.items() if not module.startswith(WITH_PARTICIPLES)}
    assert {module: names for module, source in sources.items() if (names := participles(source))} == {}


def prepositions(source: str) -> list[str]:
    names = [name for kind, name in definitions(source) if kind is ast.FunctionDef and PREPOSITION.fullmatch(name)]
    return [name for name in names if not KEPT.fullmatch(name)]


def test_no_function_is_named_by_a_preposition():
    assert {module: names for module, source in SOURCES.items() if (names := prepositions(source))} == {}


def test_prepositions_in_names_are_found():
    source = "def of_heads(): ...\ndef split_by(): ...\ndef most_bytes_read(): ...\ndef split_rows_by_head(): ...\n"
    assert prepositions(source) == ["of_heads", "split_by", "most_bytes_read"]


def test_given_up_names_and_participles_are_found():
    source = "class Nowhere:\n    def _told(self): ...\n    def told_by(self): ...\n    def gives(self): ...\n"
    assert given_up(source) == ["Nowhere"] and participles(source) == ["_told", "told_by"]


def test_a_grep_for_a_common_term_finds_its_module():
    wanted = {
        "def min_p(": "localllm.generation.sampling.steps",
        "copy on write among forks": "localllm.engine.memory.page_table",
        "class Scheduler": "localllm.generation.scheduler",
        "class ToolCallParser": "localllm.generation.tools.tool_call_parser",
        "class Hessian": "localllm.quant.hessian",
    }
    modules = {word: [module for module, source in SOURCES.items() if word in source] for word in wanted}
    assert modules == {word: [module] for word, module in wanted.items()}


# ---- names that tests and scripts use: a renamed function shows at once, not only when a sampled case has its turn


@cache
def defined_names(module: str) -> set[str]:
    """Return what a module defines or imports at its top level; "*" if it has a __getattr__."""
    names, nodes = set[str](), list[ast.AST](ast.parse(SOURCES[module]).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        else:
            names |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
            nodes += ast.iter_child_nodes(node)
    return names


def missing_names(source: str) -> list[str]:
    """Return the names of this package that a source uses and that do not exist."""
    modules, asked = dict[str, str](), list[tuple[str, str]]()
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                asked.append((node.module, alias.name))
    again = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    again |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in again:
            asked.append((modules.get(node.value.id, ""), node.attr))
    return [
        f"{module}.{name}"
        for module, name in asked
        if module in SOURCES and f"{module}.{name}" not in SOURCES and not defined_names(module) & {name, "*"}
        if not name.startswith("__")
    ]


def test_names_used_by_tests_and_scripts_exist():
    files = [path for folder in ("tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = {path.name: missing_names(path.read_text("utf-8")) for path in files}
    assert {name: names for name, names in missing.items() if names} == {}


def test_missing_names_are_found():
    source = "from localllm import errors\nfrom localllm.errors import Gone, UsageError\nerrors.ModelError, errors.Lost"
    assert missing_names(source) == ["localllm.errors.Gone", "localllm.errors.Lost"]


QUESTION = re.compile("(Whether|What|How|Which) ")


def list_questions(source: str) -> list[str]:
    """Return the names of functions and classes whose docstrings begin with a word of a question."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [node.name for node in nodes if QUESTION.match(ast.get_docstring(node) or "")]


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = {module: names for module, source in SOURCES.items() if (names := list_questions(source))}
    assert not wrong, 'write "Return whether ...", or name what a class holds'


def test_a_question_for_a_docstring_is_noticed():
    assert list_questions('def f():\n    """Whether it is."""\nclass C:\n    """How."""\n') == ["f"]
    assert list_questions('class C:\n    """What it holds."""\n') == ["C"]
