"""A server of a transformers model that answers in the forms of several programs, or wrongly.

``form``: "vllm", "echo" (as SGLang), "llama.cpp", or "texts" (generated tokens without ids).
``fault`` changes an answer, or what comes instead of it.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch

NAME = "tuned"
SLOW = 0.6


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # a client that does not wait


@contextmanager
def stub(
    models,
    tokenizer,
    form="vllm",
    fault=None,
    times=10**6,
    template=None,
    closed=None,
    tokenize=404,
):
    """Serve ``models`` by name; ``fault`` for the first ``times`` completions; yields the server.

    ``template``: another than the tokenizer's. ``closed`` answers instead of the list of models.
    ``tokenize``: the status at ``/tokenize`` of a form other than vLLM's.
    """
    state = SimpleNamespace(bodies=[], headers=[], left=times, lock=threading.Lock())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, body, status=200, **headers):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            state.headers.append(dict(self.headers))
            if closed is None or not closed(self):
                self.reply({"data": [{"id": name} for name in models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append((self.path, body))
            state.headers.append(dict(self.headers))
            if self.path == "/v1/completions":
                with state.lock:
                    state.left -= 1
                    wrong = state.left >= 0
                self.prompt = body["prompt"]
                if wrong and fault is not None and fault(self):
                    return
                with state.lock, torch.no_grad():
                    answer = complete(models[body["model"]], tokenizer, form, body)
                self.reply(answer)
            elif self.path == "/tokenize" and form == "vllm":
                self.reply({"tokens": ids_of(tokenizer, body, template)})
            elif self.path == "/v1/chat/completions":
                count = len(ids_of(tokenizer, body, template))
                self.reply({"choices": [{"index": 0}], "usage": {"prompt_tokens": count}})
            else:
                self.reply({"error": "not found, or other fields"}, tokenize)

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def ids_of(tokenizer, body, template):
    if "messages" not in body:
        return tokenizer(body["prompt"])["input_ids"]
    chat = tokenizer.apply_chat_template(
        body["messages"], chat_template=template, add_generation_prompt=True, return_dict=True
    )
    return chat["input_ids"]


def complete(model, tokenizer, form, body):
    """The completion of one prompt of ids, as each program words it."""
    ids = list(body["prompt"])
    prompt = len(ids)
    for _ in range(body["max_tokens"]):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [None, *(float(logprobs[at - 1, token]) for at, token in enumerate(ids) if at)]
    words = [tokenizer.decode([token]) for token in ids]
    choice = {"index": 0, "text": "".join(words[prompt:]), "finish_reason": "length"}
    if form == "vllm" and "prompt_logprobs" in body:
        likeliest = [int(row.argmax()) for row in logprobs]
        rows = [
            {
                str(likeliest[at - 1]): {"logprob": float(logprobs[at - 1].max()), "rank": 1},
                str(ids[at]): {"logprob": own[at], "rank": 9},
            }
            for at in range(1, prompt)
        ]
        choice |= {"prompt_logprobs": [None, *rows], "token_ids": ids[prompt:]}
    elif form in ("vllm", "echo") and body.get("echo"):
        choice["logprobs"] = {"token_logprobs": own, "tokens": words}
    elif form == "llama.cpp" and "logprobs" in body and not body.get("echo"):
        rows = zip(ids[prompt:], own[prompt:], words[prompt:], strict=True)
        content = [{"id": token, "logprob": value, "token": word} for token, value, word in rows]
        choice["logprobs"] = {"content": content}
    elif "logprobs" in body:  # it ignores what it does not know
        choice["logprobs"] = {"token_logprobs": own[prompt:], "tokens": words[prompt:]}
    return {"choices": [choice]}


def answers(choice):
    """A valid reply with ``choice`` in it, whatever was asked."""

    def fault(handler):
        handler.reply({"choices": [{"index": 0, "text": "", **choice}]})
        return True

    return fault


def repeats_the_key(handler):
    handler.reply({"error": f"wrong key: {handler.headers['Authorization']}"}, 401)
    return True


def asks_to_wait(handler):
    handler.reply({"error": "too many requests"}, 429, Retry_After="7")
    return True


# -- faults: each answers instead, and returns whether it did ------------------------------------


def late(handler):
    time.sleep(SLOW)
    return False


def closes(handler):
    handler.connection.close()
    return True


def busy(handler):
    handler.reply({"error": "starting"}, 503)
    return True


def forbidden(handler):
    handler.reply({"error": "wrong key"}, 401)
    return True


def redirects(handler):
    handler.reply({}, 307, Location="http://127.0.0.1:9/v1/completions")
    return True


def no_json(handler):
    handler.reply(b"<html>", 200)
    return True


def twice(handler):
    handler.reply({"choices": [{"index": 0, "text": ""}, {"index": 1, "text": ""}]})
    return True


def with_logprob(value, token=None, drop=0):
    """An answer in vLLM's form whose entry for the prompt's third token is ``value``."""

    def fault(handler):
        ids = handler.prompt
        rows = [None, *({str(i): {"logprob": -1.5}} for i in ids[1:])]
        rows[2] = {str(ids[2] if token is None else token): {"logprob": value}}
        choice = {"index": 0, "prompt_logprobs": rows[: len(rows) - drop], "token_ids": [3]}
        handler.reply(json.dumps({"choices": [choice]}).encode())
        return True

    return fault
