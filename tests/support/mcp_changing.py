"""An MCP server whose list of tools grows after the first call, and which writes much to stderr.

Its argument is a file, to which it writes the requested methods.
"""

import json
import sys

TOOLS = ["alpha"]


def send(**fields: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)


for line in sys.stdin:
    message = json.loads(line)
    method = message.get("method")
    with open(sys.argv[1], "a") as log:
        print(method, file=log)
    if method == "initialize":
        sys.stderr.write("x" * 300_000)
        version = message["params"]["protocolVersion"]
        about = {"protocolVersion": version, "serverInfo": {"name": "s", "version": "1"}}
        send(id=message["id"], result={**about, "capabilities": {"tools": {"listChanged": True}}})
    elif method == "tools/list":
        schema = {"type": "object", "properties": {}}
        send(id=message["id"], result={"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]})
    elif method == "tools/call":
        TOOLS[1:] = ["beta"]
        send(method="notifications/tools/list_changed")
        send(id=message["id"], result={"content": [{"type": "text", "text": "done"}]})
