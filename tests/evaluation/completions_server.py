"""A stdlib server that speaks the completions protocol over a transformers model."""

import json
from http.server import BaseHTTPRequestHandler

import torch


class Handler(BaseHTTPRequestHandler):
    """/v1/models and /v1/completions over a transformers model, as vLLM answers."""

    def do_GET(self):
        models = [{"id": "tiny", "root": str(self.server.folder)}]
        self._send(200, {"object": "list", "data": models} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refusal is not None:
            self.server.refused += 1
            status, text, headers = self.server.refusal
            return self._send(status, {"message": text}, headers)
        self.server.left -= 1
        if self.server.left < 0:
            return self._send(503, {"error": "gone"})
        with self.server.lock, torch.no_grad():
            prompts = body["prompt"]
            choices = [self._choice(body, ids, i) for i, ids in enumerate(prompts)]
        for choice in choices:
            self.server.change(choice)
        self._send(200, {"choices": choices})

    def _choice(self, body, ids, index):
        model, tokenizer = self.server.model, self.server.tokenizer
        if body.get("logprobs"):
            table = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            own = [table[i - 1, t].item() for i, t in enumerate(ids) if i]
            best = [{f"t{table[i - 1].argmax()}": table[i - 1].max().item()}
                    | {f"t{t}": own[i - 1]} for i, t in enumerate(ids) if i]  # fmt: skip
            return {
                "index": index,
                "text": "",
                "logprobs": {
                    "token_logprobs": [None, *own, 0.0],
                    "tokens": [f"t{t}" for t in ids] + ["t0"],
                    "top_logprobs": [None, *best, {"t0": 0.0}],
                },
            }
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=3
        )
        text = tokenizer.decode(out[0, len(ids) :])
        for stop in body.get("stop") or []:
            text = text.split(stop)[0]
        return {"index": index, "text": text}

    def _send(self, status, value, headers=()):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers:
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
