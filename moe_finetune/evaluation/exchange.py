"""One request to a model server: a deadline for the whole of it, a bounded reply, no redirects.

A redirect is an error: the other address was not asked for, and must not get the key.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from moe_finetune.errors import EvaluationError
from moe_finetune.io.json_file import JsonError, parse_json

MAX_REPLY_BYTES = 64 << 20
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)


class ServerError(EvaluationError):
    """A server that cannot be reached, refuses, or answers what it should not.

    Attributes:
        passing: the same request may succeed later.
        wait: seconds that the server asks to wait, or None.
    """

    def __init__(self, message: str, passing: bool = False, wait: float | None = None):
        super().__init__(message)
        self.passing, self.wait = passing, wait


class Tries:
    """The tries of one request, and when they and the waits between them must have ended.

    Args:
        deadline: by ``time.monotonic()``.
    """

    def __init__(self, most: int, deadline: float):
        self.left, self.deadline = most, deadline
        self._backoff = 0.5

    def seconds(self, most: float) -> float:
        """Return the seconds that the next try may take, at most ``most``."""
        return min(most, max(self.deadline - time.monotonic(), 0.1))

    def pause(self, error: ServerError) -> float:
        """Return the seconds to wait after a try that failed with ``error``.

        Raises:
            ServerError: another try has no use, or there are no tries or no time left.
        """
        self.left -= 1
        if not error.passing or not self.left:
            raise error
        seconds = random.uniform(0.5, 1) * self._backoff if error.wait is None else error.wait
        self._backoff *= 2
        if seconds >= self.deadline - time.monotonic():
            raise ServerError(f"{error}; no time is left for another try") from None
        return seconds


def check_address(url: str, name: str) -> str:
    """``url`` without slashes at its end.

    Raises:
        EvaluationError: no address of a web server, or one that contains a password, which would
            be stored and printed with it; ``name`` begins the message.
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


def session() -> aiohttp.ClientSession:
    """Return a session that hands replies over as they came, for use with :func:`exchange`."""
    return aiohttp.ClientSession(trust_env=True, auto_decompress=False)


async def exchange(
    client: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any] | None,
    key: str,
    seconds: float,
) -> Any:
    """Send one request (GET without ``body``, else POST) and return the JSON of its reply.

    Args:
        client: see :func:`session`.
        url: the address.
        body: JSON to post.
        key: bearer token; none is sent when empty.
        seconds: for everything, from the connection to the last byte.

    Raises:
        ServerError: no reply in time, another status than 200, a redirect, a reply that is too
            large, compressed or not strict JSON.
    """
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        async with client.request(
            "GET" if body is None else "POST",
            url,
            json=body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as response:
            received = bytearray()
            async for piece in response.content.iter_any():
                received += piece
                if len(received) > MAX_REPLY_BYTES:
                    raise ServerError(f"the reply has more than {MAX_REPLY_BYTES >> 20} MiB")
            status, fields = response.status, response.headers
    except TimeoutError:
        raise ServerError(f"no complete reply within {seconds:.0f} s", passing=True) from None
    except aiohttp.InvalidURL:
        raise ServerError(f"'{url}' is not an address") from None
    except ValueError as error:  # a key that no header may have
        raise ServerError(f"the request cannot be sent: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(str(error) or type(error).__name__, passing=True) from None
    if 300 <= status < 400:
        raise ServerError(
            f"HTTP {status}: it redirects to {fields.get('Location', 'nowhere')}, which is not "
            "followed; give the final address"
        )
    if status != 200:
        detail = bytes(received[:500]).decode("utf-8", "replace").strip()
        raise ServerError(
            f"HTTP {status}: {detail}", status in _PASSING, retry_after(fields.get("Retry-After"))
        )
    if fields.get("Content-Encoding", "identity") != "identity":
        raise ServerError("the reply is compressed, which was not asked for")
    try:
        return parse_json(bytes(received))
    except JsonError as error:
        raise ServerError(f"the reply cannot be used: {error}") from None


def ask(url: str, body: Mapping[str, Any] | None = None, key: str = "", seconds: float = 60) -> Any:
    """Send one request from ordinary code; see :func:`exchange`."""

    async def once() -> Any:
        async with session() as client:
            return await exchange(client, url, body, key, seconds)

    # A thread of its own, because the caller's may have a running loop (a notebook).
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, once()).result()


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, at least 0; None when it says none."""
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
