"""An MCP server on stdin and stdout with one tool, which searches the passages of files."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError

if TYPE_CHECKING:
    from localllm.services.search.ranking import PassageSearch

MAX_PASSAGES = 50  # maximum passages of a result


def serve_search(search: "PassageSearch", places: list[str], top: int) -> None:
    """Answer an MCP client's calls until it closes stdin; index changed files before each call.

    places: the searched files and folders, for the tool's description.  top: default count of passages. Raises
    LocalllmError without the package `mcp`.
    """
    if find_spec("mcp") is None:
        raise LocalllmError("--mcp needs the package mcp: pip install 'localllm[mcp]'")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("localllm")

    async def find(question: str, passages: int = top) -> str:
        search.update()
        hits = search.find(question, max(1, min(passages, MAX_PASSAGES)))
        return "\n\n".join(f"{hit.passage.place}\n{hit.passage.text}" for hit in hits) or "nothing was found"

    about = (
        f"Find the passages of {', '.join(places)} that answer a question, by words and by meaning: each with its file "
        "and line, the best first."
    )
    server.add_tool(find, name="search", description=about)
    server.run("stdio")
