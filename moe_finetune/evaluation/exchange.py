"""One request to a model server, and its errors.

A redirect is an error: the user did not choose the other address, and it must not get the key.
"""

import email.utils
import math
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from moe_finetune.errors import EvaluationError
from moe_finetune.io.json_file import JsonError, parse_json

_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


class ServerError(EvaluationError):
    """A server cannot be reached, refuses the request, or sends an invalid reply.

    Attributes:
        transient: the same request may succeed later.
        wait: seconds that the server asks to wait, or None.
    """

    def __init__(self, message: str, transient: bool = False, wait: float | None = None):
        super().__init__(message)
        self.transient, self.wait = transient, wait


def check_address(url: str, name: str) -> str:
    """``url`` without slashes at its end.

    Raises:
        EvaluationError: not a web address, or one that contains a password, which would be stored
            and printed; ``name`` begins the message.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise EvaluationError(f"{name}: '{url}' is not an http address") from None
    if parts.username is not None or parts.password is not None:
        raise EvaluationError(
            f"{name}: the address contains a user name or password; give the address of "
            f"{parts.hostname} without it, and the key in OPENAI_API_KEY"
        )
    if not usable:
        raise EvaluationError(f"{name}: '{url}' is not an http address")
    return url.rstrip("/")


def ask(url: str, body: Mapping[str, Any] | None = None, key: str = "", seconds: float = 60) -> Any:
    """Send one request (GET without ``body``, else POST) and return the JSON of its reply.

    Args:
        url: the address.
        body: JSON to post.
        key: bearer token; none is sent when empty.
        seconds: for the connection, and for each part of the reply.

    Raises:
        ServerError: no reply in time, a status other than 200, a redirect, or a reply that is not
            strict JSON.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    try:
        response = httpx.request(method, url, json=body, headers=headers, timeout=seconds)
    except httpx.TimeoutException:
        raise ServerError(f"no reply within {seconds:.0f} s", transient=True) from None
    except (httpx.InvalidURL, httpx.LocalProtocolError, ValueError) as error:
        # LocalProtocolError: a key that no header may have.
        raise ServerError(f"the request cannot be sent: {error}") from None
    except httpx.HTTPError as error:
        raise ServerError(str(error) or type(error).__name__, transient=True) from None
    if response.status_code != 200:
        raise failure(response.status_code, response.text, response.headers)
    try:
        return parse_json(response.content)
    except JsonError as error:
        raise ServerError(f"the reply cannot be used: {error}") from None


def failure(status: int, text: str, headers: Mapping[str, str]) -> ServerError:
    """Return the error for a reply with a status other than 200."""
    if 300 <= status < 400 and "Location" in headers:
        return ServerError(
            f"HTTP {status}: it redirects to {headers['Location']}, and redirects are not "
            "followed; give the final address"
        )
    wait = retry_after(headers.get("Retry-After"))
    return ServerError(f"HTTP {status}: {text[:500].strip()}", status in _TRANSIENT, wait)


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, at least 0; None if it gives none."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
