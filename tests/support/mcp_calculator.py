"""An MCP server made with the official package."""

import anyio
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    raise ValueError("no luck")


@server.tool()
async def wait() -> str:
    await anyio.sleep(60)
    return "waited"


if __name__ == "__main__":
    server.run("stdio")
