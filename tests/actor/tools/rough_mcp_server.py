"""An MCP server that does not keep to the protocol; its argument is the time that it takes to start."""

import json
import sys
import time

SCHEMA = {"type": "object", "properties": {"anything": True}}
PROMISED = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"name": name, "inputSchema": SCHEMA} for name in ("no_content", "other_than_it_said", "noisy")]
TOOLS[1]["outputSchema"] = PROMISED


def send(message):
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def result_of(method, params):
    if method == "initialize":
        server = {"name": "rough", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method != "tools/call":
        return None
    if params["name"] == "no_content":
        return {"content": 5}
    if params["name"] == "noisy":
        for line in ("no JSON", "[1, 2", '{"jsonrpc": "2.0", "id": "none", "result": 7}'):
            send(line)
    found = {"content": [{"type": "text", "text": "fine"}]}
    return found | ({"structuredContent": {"y": 1}} if params["name"] == "other_than_it_said" else {})


time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = result_of(request["method"], request.get("params", {}))
    outcome = {"error": {"code": -32601, "message": "no such method"}} if answer is None else {"result": answer}
    send(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | outcome))
