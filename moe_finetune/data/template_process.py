"""The process that renders chat templates, each rendering within a limit of time and of memory.

A template is a program of somebody else, and can run for ever. The kernel ends the process when a
rendering has used its time, whatever it is doing; the next rendering starts another one. What goes
to and fro is JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError


class TemplateLimitError(DataError):
    """A chat template takes more time or memory than a rendering gets."""


SECONDS = 10.0
"""Processor time of one rendering; usual templates take less than a millisecond."""
BYTES = 2 << 30
"""Memory beyond that of the process when it starts."""
CHARACTERS = 64 << 20
"""Of a rendered conversation."""
_RUN = "from moe_finetune.data.template_process import serve; serve()"


class TemplateProcess:
    """Starts at once; :meth:`ask` sends requests and yields their answers in order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "USE_TORCH": "0"},
            start_new_session=True,  # Ctrl-C is for the one who asks
        )

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> Generator[dict[str, Any]]:
        """Yield the answer to each request; it is worked on while the caller does something else.

        Raises:
            TemplateLimitError: a rendering ran into its limit; no more are answered then.
            DataError: a conversation cannot be rendered.
        """
        assert self._process.stdout is not None
        writer = threading.Thread(target=self._send, args=(requests,), daemon=True)
        writer.start()
        answered = 0
        try:
            for _ in requests:
                line = self._process.stdout.readline()
                if not line:
                    raise TemplateLimitError(self._end())
                answered += 1
                answer = json.loads(line)
                if "error" in answer:
                    raise (TemplateLimitError if answer["limit"] else DataError)(answer["error"])
                yield answer
        finally:
            if answered < len(requests):
                self.stop()  # what it still answers would be taken for the next answers

    def _send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended; the reader says why
            for request in requests:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _end(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return (
                f"the chat template takes more than {SECONDS:.0f} seconds for this conversation; "
                "take the template of the base model, or name one with data.chat_template"
            )
        return (
            f"the process that renders the chat template ended ({code}); take the template of the "
            "base model, or name one with data.chat_template"
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


_processes: dict[int, TemplateProcess] = {}


def template_process() -> TemplateProcess:
    """This process's own; started when it is first needed, and again when it was ended."""
    process = _processes.get(os.getpid())
    if process is None or not process.running:
        process = TemplateProcess()
        _processes[os.getpid()] = process
        atexit.register(process.stop)
    return process


# -- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests, one JSON object a line, until there are no more."""
    import resource

    from moe_finetune.data.rendering import Template

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # its default ends the process
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    templates: dict[str, Template] = {}
    for line in requests:
        request = json.loads(line)
        definition = json.dumps(request["template"])
        if definition not in templates:
            templates[definition] = Template(**request["template"], limited=_limited)
        try:
            answer = _answer(templates[definition], request)
        except MemoryError:
            problem = f"the chat template needs more than {BYTES >> 30} GiB of memory"
            answer = {"error": problem, "limit": True}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__, "limit": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answer(template: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    turns, extra = request["turns"], request["extra"]
    if request["wanted"] == "learned":
        return template.learned(turns, extra)
    return template.shown(turns, extra, request["wanted"] == "prompt", request["checked"])


def _limited(call: Callable[[], Any]) -> Any:
    # The timer goes on until the answer, so that work on the text is limited as well.
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    rendered = call()
    if len(rendered[0][0]) > CHARACTERS:
        raise MemoryError
    return rendered
