"""Recognize chat templates in Go's syntax, as Ollama's, by their marks and their own words.

Templates of that syntax are not rendered: one that writes conversations as the model's own template does, or as a
built-in one, is replaced by that.
"""

import re

from localllm.errors import UsageError
from localllm.text.builtin_templates import BUILTIN_TEMPLATES

# Markers that a template writes around messages: tokens in brackets, "### Instruction:", "USER:" and the like.
MARKERS = re.compile(
    r"<</?SYS>>|<[|｜]?/?[\w:▁.]+[|｜]?>|\[/?[A-Z_]{3,}\]|#{2,} ?[A-Z][\w ]*:|\b[A-Z][A-Za-z]+:(?=\s|$)"
)
ACTION = re.compile(r"{{-?\s*(.*?)\s*-?}}", re.DOTALL)
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
    """Return the marks that a template in Go's syntax writes around messages."""
    return set(MARKERS.findall(ACTION.sub(" ", template)))


def recognize_template(template: str, own: str | None, where: str) -> str | None:
    """Return the name of the built-in template that writes conversations as this one does; None for the model's own.

    own: the model's template, in Jinja.  where: begins the error message. Raises UsageError for other templates.
    """
    if template in BUILTIN_TEMPLATES:
        return template
    plain = remove_tool_blocks(template)
    marks = find_marks(plain) - EDGES
    if not marks:
        raise UsageError(f"{where}: TEMPLATE has no marks of a known chat format{ADVICE}")
    if own and all(mark in own for mark in marks):
        require_known_words(plain, own, where)
        return None
    matches = [name for name, known in BUILTIN_MARKS.items() if marks == known or marks | {"<|system|>"} == known]
    if not matches:
        raise UsageError(f"{where}: TEMPLATE is of an unknown chat format, with {', '.join(sorted(marks)[:6])}{ADVICE}")
    require_known_words(plain, BUILTIN_TEMPLATES[matches[0]], where)
    return matches[0]


ADVICE = (
    "; leave it out to use the model's own, or write it in Jinja and name its file as chat-template-file in config.toml"
)


def require_known_words(template: str, jinja: str, where: str) -> None:
    """Raise UsageError if a template writes words that another one does not write."""
    for piece in MARKERS.sub("\n", ACTION.sub("\n", template)).splitlines():
        words = piece.strip()
        if re.search(r"\w{2}", words) and words.lower() not in ROLES and words not in jinja:
            raise UsageError(f"{where}: TEMPLATE has a text of its own, {words[:60]!r}: put it into SYSTEM{ADVICE}")


def remove_tool_blocks(template: str) -> str:
    """Return a template without what it writes about tools, which differs between programs."""
    kept, depth, inside = "", 0, 0  # inside: the depth of the outermost block about tools, 0 for none
    end = 0
    for action in ACTION.finditer(template):
        kept += "" if inside else template[end : action.start()]
        word, end = action[1].partition(" ")[0], action.end()
        if word in ("if", "range", "with", "block", "define"):
            depth += 1
            if not inside and re.search(r"\.Tools|\.ToolCalls|\"tool\"|\.Think|\.Suffix", action[1]):
                inside = depth
        elif word == "else" and inside == depth and "if" in action[1]:
            inside = inside if re.search(r"\.Tools|\.ToolCalls|\"tool\"|\.Think|\.Suffix", action[1]) else 0
        elif word in ("else", "end") and inside == depth:
            inside = 0
        depth -= word == "end"
        kept += "" if inside else action[0]
    return kept + ("" if inside else template[end:])
