"""Options for tools that a model may call."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from localllm.cli.options.offers import one_of
from localllm.cli.parameters import group, option
from localllm.cli.terminal.output import say
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.terminal.tool_calls import ToolCalls

BUILT_IN = ("read_file", "list", "search", "run")


@group
class ToolGroup:
    """Tools that the model may call, each time with your consent."""

    tools: str | None = option(
        "--tools",
        "Built-in tools to offer, separated by commas: read_file,list,search,run.",
        "NAMES",
        autocompletion=one_of(BUILT_IN),
    )
    allow: list[str] | None = option(
        "--allow", "Folder that the built-in tools may access; nothing outside is visible.  [repeatable]", "DIR"
    )
    mcp: str | None = option(
        "--mcp", 'JSON file of MCP servers: {"mcpServers": {NAME: {"command": ..., "args": []}}}.', "FILE"
    )
    yes: str | None = option("--yes", "Tools to run without asking, separated by commas.", "NAMES", typed_only=True)
    max_steps: int = option(
        "--max-steps", "Maximum number of tool calls for one answer.  [default: 20]", "N", default=20
    )
    no_json_calls: bool = option(
        "--no-json-calls", "Recognize only tool calls in the chat template's own format; treat other JSON as text."
    )
    transcript: str | None = option("--transcript", "Log tool calls and their results to FILE, as JSON lines.", "FILE")

    @property
    def are_enabled(self) -> bool:
        return self.tools is not None or self.mcp is not None

    def open_tools(self, stack: ExitStack) -> "ToolCalls | None":
        """Open the tools, with MCP servers that run until `stack` closes; return None without tools.

        Raises UsageError and the errors of McpServers.
        """
        if not self.are_enabled:
            for name in ("allow", "yes", "transcript"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} needs tools: add --tools or --mcp")
            return None
        if self.max_steps < 1:
            raise UsageError(f"max_steps must be 1 or greater, not {self.max_steps}")
        from localllm.cli.terminal.tool_calls import ToolCalls
        from localllm.services.tools.built_in import toolbox
        from localllm.services.tools.transcript import require_transcript

        if self.transcript is not None:
            require_transcript(self.transcript)
        if "run" in names_in(self.tools):
            tell_of_commands()
        box = toolbox(names_in(self.tools), self.allow or (), self.mcp, stack, not self.no_json_calls)
        return ToolCalls.of(box, names_in(self.yes), self.max_steps, self.transcript, stack)


def tell_of_commands() -> None:
    """Warn if this system cannot confine commands to folders."""
    from localllm.services.tools.confined import version

    if not version():
        say("localllm: this system cannot confine commands to folders; check each command before you allow it")


def names_in(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
