"""An endpoint that scores the steps of the arithmetic task, as `--config.reward.process.url` asks one.

python examples/step_scores.py 8900
asyncrl-local --config.reward.process.url=http://127.0.0.1:8900/

A real one would run a process reward model; this one knows how sums are done step by step.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def scores(steps: list[dict[str, str]]) -> list[float]:
    """How likely each step is right: 0.9 for the call that is next, or for the answer after the last one, else 0.1."""
    expression = steps[0]["before"]  # "^18+99-37="
    value, *rest = [int(term) for term in re.findall(r"[+-]?\d+", expression)]
    found = []
    for step in steps:
        right = step["text"] == (f"<{value}{rest[0]:+d}>" if rest else f"#{value}$")
        if right and rest:
            value += rest.pop(0)
        found.append(0.9 if right else 0.1)
    return found


class Endpoint(BaseHTTPRequestHandler):
    """POST {"steps": [{"before": …, "text": …}, …]} → {"scores": […]}."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Scores the steps of one episode."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": scores(body["steps"])}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Endpoint).serve_forever()
