"""Makes a toolbox of built-in tools and those of MCP servers."""

from collections.abc import Sequence
from contextlib import ExitStack

from localllm.errors import UsageError
from localllm.services.tools.box import OfferedTool, Toolbox
from localllm.services.tools.commands import run
from localllm.services.tools.files import list_folder, read_file, search
from localllm.services.tools.folders import Folders

BUILT_IN = {"read_file": read_file, "list": list_folder, "search": search, "run": run}


def toolbox(
    names: Sequence[str], allowed: Sequence[str], mcp: str | None, stack: ExitStack, json_calls: bool = True
) -> Toolbox:
    """Make a toolbox of the named built-in tools and of those of MCP servers, which run until `stack` is closed.

    allowed: folders that built-in tools may access.  mcp: path of a file of MCP servers. Raises UsageError, and as
    McpServers.
    """
    if unknown := [name for name in names if name not in BUILT_IN]:
        raise UsageError(f"unknown tool {unknown[0]!r}; available tools: {', '.join(BUILT_IN)}")
    if names and not allowed:
        raise UsageError("allow is missing: give the folders that the tools may access, as --allow .")
    if allowed and not names:
        raise UsageError("allow applies to built-in tools only: give --tools")
    offered = [BUILT_IN[name](Folders(allowed)) for name in dict.fromkeys(names)]
    if mcp is None:
        box = Toolbox(offered, json_calls=json_calls)
    else:
        from localllm.services.tools.mcp import McpServers

        servers = stack.enter_context(McpServers(mcp))

        def current() -> list[OfferedTool]:
            return [*offered, *servers.offered]

        box = Toolbox(current(), json_calls=json_calls, current=current, may_offer=servers.may_offer)
    if not box.names:
        raise UsageError("no tools: --tools is empty, and the servers of --mcp offer none")
    return box
