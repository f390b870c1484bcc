"""An OpenAI-compatible server over HTTP: its address, its models, and what a valid reply is.

A redirect is an error: the user did not choose the other address, and it must not get the key.
"""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from moe_finetune.errors import EvaluationError
from moe_finetune.io.json_file import JsonError, parse_json

KEY = "OPENAI_API_KEY"
"""The environment variable with the server's key, if it needs one."""
# Rounding in float32 may give a token of probability 1 a log-probability slightly above 0.
ROUNDING = 1e-3
_LOWEST = 1e30
_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


class ServerError(EvaluationError):
    """A server refuses a request; ``transient`` if the same request may succeed later.

    ``wait``: the seconds after which the server asks to be asked again; 0 if it does not say.
    """

    def __init__(self, message: str, transient: bool = False, status: int = 0, wait: float = 0):
        super().__init__(message)
        self.transient, self.status, self.wait = transient, status, wait


class BadReply(EvaluationError):
    """A reply that cannot be scored; ``request`` is lm-eval's, None for a rolled window."""

    def __init__(self, message: str, request: tuple[Any, ...] | None = None):
        super().__init__(message)
        self.request = request


def failure(status: int, text: str, headers: Mapping[str, str]) -> ServerError:
    """Return the error for a reply with a status other than 200."""
    if 300 <= status < 400 and "Location" in headers:
        return ServerError(
            f"HTTP {status}: it redirects to {without_key(headers['Location'])}, and redirects are "
            "not followed; give the final address",
            status=status,
        )
    said = without_key(text)[:500].strip()
    after = headers.get("Retry-After", "")  # seconds, or a date, which is not read
    wait = float(after) if after.isdecimal() else 0.0
    return ServerError(f"HTTP {status}: {said}", status in _TRANSIENT, status, wait)


def check_address(url: str, name: str = "base_url") -> str:
    """``url`` without slashes at its end; ``name`` is the option that gave it."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise EvaluationError(f"{name}: '{url}' is not an http address") from None
    if parts.username is not None or parts.password is not None:
        raise EvaluationError(
            f"{name}: the address contains a user name or password; give the address of "
            f"{parts.hostname} without it, and the key in {KEY}"
        )
    if not usable:
        raise EvaluationError(f"{name}: '{url}' is not an http address")
    return url.rstrip("/")


def key_header() -> dict[str, str]:
    """The header with the key of :data:`KEY`; empty if it is not set.

    A key that no header can contain is refused here: HTTP clients would print it in their error.
    """
    key = os.environ.get(KEY, "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise EvaluationError(
            f"{KEY}: the key has a space, a line break or a character outside ASCII; set it to the "
            "key alone"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def without_key(text: str) -> str:
    """``text`` of a server, with stars where it repeats the key that it got."""
    key = os.environ.get(KEY, "").strip()
    return text.replace(key, "***") if key else text


def server_models(
    base_url: str, remedy: str = "start one with 'moe-finetune serve'"
) -> dict[str, str]:
    """Return the models that an OpenAI-compatible server offers: name -> folder, if reported."""
    url = check_address(base_url) + "/models"
    try:
        response = httpx.get(url, timeout=10, headers=key_header())
        if response.status_code != 200:
            raise failure(response.status_code, response.text, response.headers)
        reply = parse_json(response.content)
    except ServerError as error:
        if error.status in (401, 403):
            remedy = f"it wants a key: set {KEY} to a valid one"
        raise EvaluationError(f"no server answers at {url} ({error}); {remedy}") from None
    except (httpx.HTTPError, httpx.InvalidURL, JsonError) as error:
        raise EvaluationError(f"no server answers at {url} ({error}); {remedy}") from None
    entries = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
    ):
        raise EvaluationError(
            f"{url} does not answer like an OpenAI-compatible server "
            f"({without_key(repr(reply))[:200]})"
        )
    return {entry["id"]: str(entry.get("root") or "") for entry in entries}


def only_choice(reply: Any) -> dict[str, Any]:
    """Return the choice of a reply to one prompt."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise BadReply("the reply has no list of choices")
    indices = [choice.get("index") for choice in choices]
    if indices != [0] or isinstance(indices[0], bool):
        raise BadReply(f"the reply to one prompt has choices of index {indices}, not [0]")
    return choices[0]


def log_probability(value: Any, position: int) -> float:
    """``value`` as the log-probability (nats) of the token at ``position``; refuses others."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadReply(f"log-probability {position} is {value!r:.40}")
    if not -_LOWEST <= value <= ROUNDING:  # also false for NaN
        raise BadReply(f"log-probability {position} is {value}, not the logarithm of a probability")
    return float(value)
