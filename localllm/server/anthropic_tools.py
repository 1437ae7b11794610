"""Tools that Anthropic's clients run without describing them, because Anthropic's models know them.

Source: https://docs.anthropic.com/en/docs/agents-and-tools/tool-use
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.generation.tools.tool_grammar import Tool

TEXT, LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
EDITING = {"path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": LINE, "insert_text": TEXT,
           "view_range": RANGE}  # fmt: skip
EDITS = ("view", "create", "str_replace", "insert")
# By the prefix of the type, which a date follows.
DESCRIPTIONS = {
    "bash_": "Run a command in a shell that keeps its state; restart begins a new one.",
    "text_editor_": "View and edit files: view (view_range), create (file_text), str_replace (old_str, new_str), "
    "insert (insert_line, insert_text).",
    "memory_": "Keep notes in files below /memories: view, create, str_replace, insert, delete, rename "
    "(old_path, new_path).",
}
SCHEMAS: dict[str, dict[str, object]] = {
    "bash_": {"properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    "text_editor_": {"properties": {"command": {"enum": [*EDITS]}, **EDITING}, "required": ["command", "path"]},
    "memory_": {
        "properties": {
            "command": {"enum": [*EDITS, "delete", "rename"]}, **EDITING, "old_path": TEXT, "new_path": TEXT,
        },
        "required": ["command"],
    },
}  # fmt: skip


def find_client_tool(kind: str, name: str) -> "Tool | None":
    """Return the tool of a type such as bash_20250124; None for other types, such as tools of Anthropic's servers."""
    from localllm.generation.tools.tool_grammar import Tool

    begin = next((begin for begin in SCHEMAS if kind.startswith(begin)), None)
    return None if begin is None else Tool(name, DESCRIPTIONS[begin], {"type": "object", **SCHEMAS[begin]})
