"""A stdlib server that speaks the chat-completions protocol of a judge."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Speaks the chat-completions protocol; judges by comparing the texts it is sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.failures: list[int] = []
        self.fixed: object = None
        self.usage: object = {"prompt_tokens": 1000, "completion_tokens": 10}
        self.retry_after, self.elsewhere = "0", ""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append({**body, "auth": self.headers.get("Authorization")})
        if self.path != "/v1/chat/completions":
            return self._send(404, {"error": "no such path"})
        if self.server.failures:
            return self._send(self.server.failures.pop(0), {"error": "not now"})
        content = self.server.fixed
        if content is None:
            text = body["messages"][1]["content"]
            reference = text.split("Reference:\n")[1].split("\n\nAnswer:\n")[0]
            same = text.split("Answer:\n")[1].strip() == reference
            content = json.dumps({"verdict": "correct" if same else "incorrect", "reason": "r"})
        self._send(
            200,
            {
                "choices": [{"message": {"role": "assistant", "content": content}}],
                "usage": self.server.usage,
            },
        )

    def _send(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", self.server.retry_after)
        if 300 <= status < 400:
            self.send_header("Location", self.server.elsewhere)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
