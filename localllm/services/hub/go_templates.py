"""Recognize Ollama's chat templates, which are in Go's syntax, by their control tokens and literal text.

Templates of that syntax are not rendered: one that writes conversations as the model's own template does, or as a
built-in one, is replaced by that.
"""

import re

from localllm.errors import ModelError, UsageError
from localllm.text.builtin_templates import BUILTIN_TEMPLATES
from localllm.text.templates import ChatTemplate

# Markers that a template writes around messages: tokens in brackets, "### Instruction:", "USER:" and the like.
MARKERS = re.compile(
    r"<</?SYS>>|<[|｜]?/?[\w:▁.]+[|｜]?>|\[/?[A-Z_]{3,}\]|#{2,} ?[A-Z][\w ]*:|\b[A-Z][A-Za-z]+:(?=\s|$)"
)
ACTION = re.compile(r"{{-?\s*(.*?)\s*-?}}", re.DOTALL)
TRIMMED = re.compile(r"(?:\s*{{-|{{)\s*(.*?)\s*(?:-}}\s*|}})", re.DOTALL)
ABOUT_TOOLS = re.compile(r"\.Tools|\.ToolCalls|\"tool\"|\.Think|\.Suffix")
# The values of variables with which templates are rendered to compare them.
PROBES = {".System": "SYSTEM", ".Prompt": "PROMPT", ".First": ""}
ROLES = {"system", "user", "assistant", "model", "tool", "developer"}
EDGES = {"<s>", "</s>", "<bos>", "<eos>", "<|begin_of_text|>", "<|endoftext|>", "<|begin▁of▁sentence|>",
         "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"}  # fmt: skip
# The marks of built-in templates, without those of EDGES.
BUILTIN_MARKS = {
    "chatml": {"<|im_start|>", "<|im_end|>"},
    "phi4": {"<|im_start|>", "<|im_sep|>", "<|im_end|>"},
    "llama3": {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
    "gemma": {"<start_of_turn>", "<end_of_turn>"},
    "phi3": {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
    "zephyr": {"<|system|>", "<|user|>", "<|assistant|>"},
    "llama2-sys": {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"},
    "mistral-v3": {"[INST]", "[/INST]"},
    "mistral-v7": {"[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
    "vicuna": {"USER:", "ASSISTANT:"},
    "deepseek": {"### Instruction:", "### Response:"},
    "command-r": {"<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
                  "<|CHATBOT_TOKEN|>"},
    "granite": {"<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"},
    "deepseek3": {"<｜User｜>", "<｜Assistant｜>"},
}  # fmt: skip


def find_marks(template: str) -> set[str]:
    """Return the control tokens, such as <|im_start|>, that a template in Go's syntax writes around messages."""
    return set(MARKERS.findall(ACTION.sub(" ", template)))


def recognize_template(template: str, own: str | None, where: str) -> tuple[str | None, str]:
    """Return the built-in template with the same control tokens, None for the model's own, and what differs.

    own: the model's template, in Jinja.  where: begins the error message. Raises UsageError for other templates, and if
    the built-in one writes other than white space differently.
    """
    if template in BUILTIN_TEMPLATES:
        return template, ""
    plain = remove_tool_blocks(template)
    marks = find_marks(plain) - EDGES
    if not marks:
        raise UsageError(f"{where}: TEMPLATE does not use the control tokens of a known chat format{ADVICE}")
    if own and all(mark in own for mark in marks):
        require_known_words(plain, own, where)
        return None, describe_difference(template, own)[1]
    matches = [name for name, known in BUILTIN_MARKS.items() if marks == known or marks | {"<|system|>"} == known]
    if not matches:
        raise UsageError(
            f"{where}: TEMPLATE has control tokens of an unknown chat format: {', '.join(sorted(marks)[:6])}{ADVICE}"
        )
    require_known_words(plain, BUILTIN_TEMPLATES[matches[0]], where)
    is_like, difference = describe_difference(template, BUILTIN_TEMPLATES[matches[0]])
    if not is_like:
        raise UsageError(f"{where}: TEMPLATE resembles the built-in {matches[0]!r}, {difference}{ADVICE}")
    return matches[0], difference


def describe_difference(template: str, jinja: str) -> tuple[bool, str]:
    """Compare a prompt in both templates: return whether only white space differs, and a clause that tells."""
    theirs, messages = render_prompt(template), [{"role": "system", "content": PROBES[".System"]}]
    try:
        ours = ChatTemplate(jinja).render([*messages, {"role": "user", "content": PROBES[".Prompt"]}])
    except ModelError:
        theirs = None
    if theirs is None or PROBES[".Prompt"] not in theirs:
        return True, "which has the same marks"
    if "eos_token" in jinja:  # which only the file's vocabulary tells
        ours, theirs = ("".join(re.split("|".join(map(re.escape, EDGES)), text)) for text in (ours, theirs))
    ours, theirs = remove_edge(ours), remove_edge(theirs)
    if ours == theirs:
        return True, "which writes the same"
    is_like = "".join(ours.split()) == "".join(theirs.split())
    return is_like, f"which writes {'other white space: ' if is_like else ''}{ours!r} instead of {theirs!r}"


def remove_edge(text: str) -> str:
    """Remove what begins a text, which the tokenizer adds, and white space around it."""
    text = text.strip()
    for edge in EDGES:
        text = text.removeprefix(edge).lstrip()
    return text


def render_prompt(template: str) -> str | None:
    """Render a system text and a prompt as Ollama does without .Messages; None for other actions than conditions."""
    text, end, blocks = "", 0, list[tuple[bool, bool]]()  # blocks: whether a branch was taken, whether this one is
    for action in TRIMMED.finditer(template):
        is_active = all(active for _, active in blocks)
        text += template[end : action.start()] if is_active else ""
        word, _, rest = action[1].partition(" ")
        end = action.end()
        if word == "if":
            holds = is_active and is_true(rest)
            blocks.append((holds, holds))
        elif word in ("range", "with", "block", "define"):
            blocks.append((True, False))
        elif word in ("else", "end") and not blocks:
            return None
        elif word == "else":
            taken = blocks.pop()[0]
            holds = not taken and (not rest or is_true(rest.removeprefix("if ")))
            blocks.append((taken or holds, holds))
        elif word == "end":
            blocks.pop()
        elif is_active and word == ".Response":
            return text
        elif is_active and word.lstrip("$") in PROBES:
            text += PROBES[word.lstrip("$")]
        elif is_active and ":=" not in action[1]:
            return None
    return text + template[end:]


def is_true(condition: str) -> bool:
    """Return whether a condition about .System, .Prompt and the like holds for a prompt without messages and tools."""
    while group := re.search(r"\(([^()]*)\)", condition):
        value = "true" if is_true(group[1]) else "false"
        condition = f"{condition[: group.start()]} {value} {condition[group.end() :]}"
    word, *names = condition.replace("$", "").split() or [""]
    known = {"true", *PROBES}
    truths = [name in known for name in names]
    return {"and": all(truths), "or": any(truths), "not": not any(truths)}.get(word, word in known)


ADVICE = (
    "; leave it out to use the model's own, or write it in Jinja and name its file as chat-template-file in config.toml"
)


def require_known_words(template: str, jinja: str, where: str) -> None:
    """Raise UsageError if a template in Go's syntax writes literal text that the Jinja template does not contain."""
    for piece in MARKERS.sub("\n", ACTION.sub("\n", template)).splitlines():
        words = piece.strip()
        if re.search(r"\w{2}", words) and words.lower() not in ROLES and words not in jinja:
            raise UsageError(f"{where}: TEMPLATE contains the text {words[:60]!r}: move it into SYSTEM{ADVICE}")


def remove_tool_blocks(template: str) -> str:
    """Remove a template's {{ if .Tools }} blocks, whose text differs between programs."""
    kept, depth, inside = "", 0, 0  # inside: the depth of the outermost block about tools, 0 for none
    end = 0
    for action in ACTION.finditer(template):
        kept += "" if inside else template[end : action.start()]
        word, end = action[1].partition(" ")[0], action.end()
        if word in ("if", "range", "with", "block", "define"):
            depth += 1
            if not inside and ABOUT_TOOLS.search(action[1]):
                inside = depth
        elif word == "else" and inside in (0, depth):
            inside = depth if ABOUT_TOOLS.search(action[1]) else 0
        elif word == "end" and inside == depth:
            inside = 0
        depth -= word == "end"
        kept += "" if inside else action[0]
    return kept + ("" if inside else template[end:])
