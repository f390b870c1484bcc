"""The process that renders chat templates, with a limit on the time and memory of a conversation.

A template is somebody else's program and may never end. The kernel ends the process when a
conversation has used its time, whatever the template is doing; the next one starts another process.
Requests and answers are JSON, one line for a batch of requests and one for each answer.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError


class TemplateLimitError(DataError):
    """A chat template takes more time or memory than a conversation gets."""


SECONDS = 10.0
"""Processor time for one conversation; usual templates take a few milliseconds."""
BYTES = 2 << 30
"""Memory beyond what the process has when it starts."""
_RUN = "from moe_finetune.data.template_process import serve; serve()"
_REMEDY = "use the template of the base model, or name one with data.chat_template"
_processes: dict[int, subprocess.Popen[bytes]] = {}


def answers_to(requests: Sequence[Mapping[str, Any]]) -> Generator[dict[str, Any]]:
    """Yield the answer to each request while the process works on those that follow.

    Raises:
        TemplateLimitError: a template reached its limit.
        DataError: a conversation cannot be rendered.
    """
    if not requests:
        return
    process = _running_process()
    assert process.stdin is not None and process.stdout is not None
    answered = 0
    try:
        with suppress(BrokenPipeError):  # it has ended; that no answer comes tells why
            process.stdin.write(json.dumps(list(requests)).encode() + b"\n")
            process.stdin.flush()
        for _ in requests:
            line = process.stdout.readline()
            if not line:
                raise TemplateLimitError(_why_it_ended(process.wait()))
            answered += 1
            answer = json.loads(line)
            if "error" in answer:
                raise (TemplateLimitError if answer["limit"] else DataError)(answer["error"])
            yield answer
    finally:
        if answered < len(requests):
            stop_process()  # its remaining answers would be read as those to the next requests


def _running_process() -> subprocess.Popen[bytes]:
    """This process's own renderer; forked children start one each."""
    process = _processes.get(os.getpid())
    if process is None or process.poll() is not None:
        process = _processes[os.getpid()] = subprocess.Popen(
            [sys.executable, "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "USE_TORCH": "0"},
            start_new_session=True,  # Ctrl-C is meant for the parent
        )
        atexit.register(stop_process)
    return process


def stop_process() -> None:
    """End this process's renderer, if there is one."""
    process = _processes.pop(os.getpid(), None)
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def _why_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return (
            f"the chat template takes more than {SECONDS:.0f} seconds for this conversation; "
            f"{_REMEDY}"
        )
    return f"the process that renders the chat template ended ({code}); {_REMEDY}"


# -- in the process -------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until the parent closes the pipe."""
    import resource

    from moe_finetune.data.learned import Learner
    from moe_finetune.data.rendering import CHARACTERS, OutOfMemory, Template

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print; only answers go to the parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also within one C call
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    learners: dict[str, Learner] = {}
    for request in (request for line in sys.stdin.buffer for request in json.loads(line)):
        definition = json.dumps(request["template"])
        if definition not in learners:
            learners[definition] = Learner(Template(**request["template"]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            answer = learners[definition].answer(request)
        except (MemoryError, OutOfMemory):
            problem = (
                f"the chat template needs more than {BYTES >> 30} GiB of memory, or writes more "
                f"than {CHARACTERS >> 20} million characters; {_REMEDY}"
            )
            answer = {"error": problem, "limit": True}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__, "limit": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
