"""A server of the Model Context Protocol with one tool: search the passages of files. It speaks on stdin and stdout."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError

if TYPE_CHECKING:
    from localllm.services.search.ranking import Search

MOST = 50  # passages of an answer


def serve(search: "Search", places: list[str], top: int) -> None:
    """Answer the calls of an MCP client until it closes stdin; files that have changed are read again at each call.

    top: passages, unless a call says how many. Raises LocalllmError without the package `mcp`.
    """
    if find_spec("mcp") is None:
        raise LocalllmError("--mcp needs the package mcp: pip install 'localllm[mcp]'")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("localllm")

    async def find(question: str, passages: int = top) -> str:
        search.update()
        hits = search.find(question, max(1, min(passages, MOST)))
        return "\n\n".join(f"{hit.passage.place}\n{hit.passage.text}" for hit in hits) or "nothing was found"

    about = (
        f"Find the passages of {', '.join(places)} that answer a question, by words and by meaning: each with its file "
        "and line, the best first."
    )
    server.add_tool(find, name="search", description=about)
    server.run("stdio")
