"""The sandbox: what a program may do, how it ends, and what remains."""

import ctypes
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox import RUNNER, Limits, Program, Sandbox, seccomp
from tests.evaluation.conftest import QUICK
from tests.evaluation.forgers import FORGERS
from tests.evaluation.hostile import PROGRAMS

# Passes only for a program that answers 'right', which none of the hostile ones may.
TESTS = "assert f('question') == 'right'\nassert f('other') == 'right'\n"


@pytest.fixture(scope="module")
def patient(sandbox):
    """For programs that must pass, however busy the machine is."""
    return Sandbox(Limits(seconds=60))


def _descendants() -> set[int]:
    found, parents = set(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    frontier = {os.getpid()}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def test_a_right_program_passes_and_a_wrong_one_says_why(sandbox):
    tests = "assert f(3) == [3, (4.5, None), {'k': {1, 2}}, 1 + 2j, b'z']"
    right = "def f(x):\n    return [x, (4.5, None), {'k': {1, 2}}, 1 + 2j, b'z']"
    assert sandbox.run(Program(right, tests, entry=("f",))).passed
    verdict = sandbox.run(Program("def g(x):\n    return 1", tests, entry=("f",)))
    assert not verdict.passed and "does not define f" in verdict.reason
    verdict = sandbox.run(Program("def f(x):\n    return 1/0", tests, entry=("f",)))
    assert "ZeroDivisionError" in verdict.reason
    assert "SyntaxError" in sandbox.run(Program("def f(:", tests, entry=("f",))).reason


def test_tests_can_use_objects_of_the_program(sandbox):
    code = """
class Node:
    def __init__(self, value): self.value, self.left = value, None
def depth(node): return 0 if node is None else 1 + depth(node.left)
def count():
    yield from (1, 2, 3)
def adder(n): return lambda x: x + n
"""
    tests = """
root = Node(1)
root.left = Node(2)
assert depth(root) == 2 and root.left.value == 2
assert list(count()) == [1, 2, 3]
assert adder(2)(5) == 7
assert [depth(x) for x in (root, None)] == [2, 0]
"""
    verdict = sandbox.run(Program(code, tests))
    assert verdict.passed, verdict.reason
    # The control: the same tests against a program that counts wrongly.
    assert not sandbox.run(Program(code.replace("1 + depth", "2 + depth"), tests)).passed


def test_attributes_of_the_program_are_its_own(sandbox):
    """Also under names that a proxy might use for itself."""
    code = (
        "class Node:\n    def __init__(self): self._id, self._ask = 3, 4\ndef node(): return Node()"
    )
    assert sandbox.run(Program(code, "n = node()\nassert (n._id, n._ask) == (3, 4)")).passed


def test_exceptions_of_the_program_reach_the_tests(sandbox):
    tests = (
        "try:\n    f()\n    raise AssertionError\nexcept ValueError as error:\n"
        "    assert 'odd' in str(error)\n"
    )
    assert sandbox.run(Program("def f():\n    raise ValueError('odd')", tests)).passed
    assert not sandbox.run(Program("def f():\n    raise KeyError('odd')", tests)).passed


@pytest.mark.faults
def test_hostile_programs_never_pass_and_leave_nothing(sandbox, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    os.chmod(tmp_path, 0o777)
    listener = socket.create_server(("127.0.0.1", 0))
    before = _descendants()
    outside = {p: set(os.listdir(p)) for p in ("/", "/usr", str(Path(sys.base_prefix)))}
    passed = []
    for name, code in PROGRAMS.items():
        code = code.replace("{host}", str(tmp_path))
        code = code.replace("{port}", str(listener.getsockname()[1]))
        if sandbox.run(Program(code, TESTS, entry=("f",))).passed:
            passed.append(name)
    assert passed == []
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    assert sorted(os.listdir(tmp_path)) == ["secret.txt"]
    assert (tmp_path / "secret.txt").read_text() == "secret"
    assert {p: set(os.listdir(p)) for p in outside} == outside
    assert not Path("/tmp/left.txt").exists()
    deadline = time.monotonic() + 5
    while (left := _descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()
    # The control: the tests can be passed.
    assert sandbox.run(Program("def f(x): return 'right'", TESTS, entry=("f",))).passed


def test_memory_threads_and_processes_are_limited(patient):
    code = """
def grab(n):
    try:
        return len(bytearray(n))
    except MemoryError:
        return -1
def all_together(n):
    import threading
    blocks = []
    def one():
        try:
            blocks.append(bytearray(n))
        except MemoryError:
            pass
    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(blocks)
def threads():
    import threading
    stay = threading.Event()
    started = 0
    try:
        while started < 40:
            threading.Thread(target=stay.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        pass
    stay.set()
    return started
def processes():
    import os, subprocess
    started = []
    for way in (os.fork, lambda: subprocess.Popen(['x']), lambda: os.posix_spawn('/x', ['x'], {})):
        try:
            started.append(way())
        except PermissionError:
            pass
    return started
def home():
    import os
    return os.listdir(os.environ['HOME']), os.getuid() != 0
"""
    tests = """
assert grab(100 << 20) == 100 << 20
assert grab(2 << 30) == -1
assert all_together(300 << 20) <= 3
assert 0 < threads() < 8
assert processes() == []
assert home() == ([], True)
"""
    verdict = patient.run(Program(code, tests))
    assert verdict.passed, verdict.reason


# libc functions and arguments that must fail in the sandbox; each works outside of it or needs
# rights that a new user namespace would give.
CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def refused():
    calls = {
        'System V shared memory': lambda: libc.shmget(0, 4096, 0o1600),
        'System V messages': lambda: libc.msgget(0, 0o1600),
        'POSIX queues': lambda: libc.syscall(MQ_OPEN, b'q', 0o100 | 2, 0o600, 0),
        'memfd': lambda: libc.memfd_create(b'x', 0),
        'user namespace': lambda: libc.unshare(0x10000000),
        'user namespace by clone': lambda: libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0),
        'process by clone': lambda: libc.syscall(CLONE, 17, 0, 0, 0, 0),
        'process by clone3': lambda: libc.syscall(435, bytes(88), 88),
        'key ring': lambda: libc.syscall(KEYCTL, 0, -3, 1),
        'io_uring': lambda: libc.syscall(425, 1, bytes(120)),
        'bpf': lambda: libc.syscall(BPF, 0, bytes(64), 64),
        'mount': lambda: libc.mount(b'x', b'/home', b'tmpfs', 0, None),
        'ptrace': lambda: libc.ptrace(0, 0, 0, 0),
        'userfaultfd': lambda: libc.syscall(USERFAULTFD, 1),
        'inotify': lambda: libc.inotify_init(),
        **{f'socket family {f}': (lambda f=f: libc.socket(f, 3, 0))
           for f in (2, 10, 16, 17, 38, 40)},
        'socket of type 2': lambda: libc.socket(40, 1, 0),
    }
    return [name for name, call in calls.items() if call() != -1
            or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)]
def unix_sockets():
    import socket
    left, right = socket.socketpair()
    left.send(b'x')
    return right.recv(1)
def writable():
    import os
    made = []
    for folder, folders, _ in os.walk('/'):
        for make in (os.mkdir, lambda path: os.symlink('/', path), lambda path: os.mkfifo(path),
                     lambda path: open(path, 'w').close()):
            try:
                make(os.path.join(folder, 'made'))
                made.append(folder)
            except OSError:
                pass
        folders[:] = folders[:200]
    return made
def new_rights():
    return libc.prctl(39, 0, 0, 0, 0)
"""
_NUMBERS = {
    "x86_64": {"MQ_OPEN": 240, "CLONE": 56, "KEYCTL": 250, "BPF": 321, "USERFAULTFD": 323},
    "aarch64": {"MQ_OPEN": 180, "CLONE": 220, "KEYCTL": 219, "BPF": 280, "USERFAULTFD": 282},
}


def test_the_kernel_refuses_what_a_program_does_not_need(patient, no_bubblewrap):
    numbers = _NUMBERS[platform.machine()]
    code = CALLS + "".join(f"{name} = {number}\n" for name, number in numbers.items())
    tests = """
assert refused() == [], refused()
assert unix_sockets() == b'x'
assert writable() == [], writable()
assert new_rights() == 1
"""
    verdict = patient.run(Program(code, tests))
    assert verdict.passed, verdict.reason
    local = Sandbox(QUICK, allow_unsafe_local=True)  # the control: it can fail
    assert local.kind == "unsafe-local"
    assert not local.run(Program(code, "assert refused() == []")).passed


@pytest.mark.parametrize(
    "complaint", ["Unknown option --seccomp", "No permissions to create new namespace"]
)
def test_a_bubblewrap_that_does_not_work_says_why(tmp_path, monkeypatch, complaint):
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\necho 'bwrap: {complaint}' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError, match=f"the probe failed .bwrap: {complaint}") as refusal:
        Sandbox(QUICK)
    assert "--allow-unsafe-local" in str(refusal.value)


def test_without_libseccomp_nothing_runs(sandbox, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("libseccomp.so.2: no such file")))
    seccomp._program.cache_clear()
    with pytest.raises(DependencyError, match=r"no filter of system calls .libseccomp.so.2"):
        Sandbox(QUICK)


def test_no_sandbox_is_a_refusal_that_names_the_remedies(no_bubblewrap):
    with pytest.raises(DependencyError, match=r"bubblewrap.*--allow-unsafe-local"):
        Sandbox()


def test_unsafe_local_runs_only_when_asked_for(no_bubblewrap, capsys):
    local = Sandbox(QUICK, allow_unsafe_local=True)
    assert "WITHOUT a sandbox" in capsys.readouterr().err
    assert local.kind == "unsafe-local"
    assert local.run(Program("def f(x): return 'right'", TESTS, entry=("f",))).passed
    assert not local.run(Program("import os\nos._exit(0)", TESTS, entry=("f",))).passed


def test_a_trickled_answer_ends_at_the_deadline(problems):
    code = FORGERS["trickle"].replace("ENTRY", "f")
    verdict = Sandbox(Limits(seconds=1)).run(Program(code, TESTS, entry=("f",)))
    assert verdict.reason == "out of time" and verdict.seconds < 10


def test_answers_are_of_exact_types(sandbox):
    code = """
import collections
class S(str): pass
class F(float):
    def __float__(self): return 2.5
def kinds():
    counted, lists = collections.Counter('aab'), collections.defaultdict(list, {1: [2]})
    return counted, lists, collections.OrderedDict(x=None), True, bytearray(b'z')
def text(): return S('right')
def number(): return F(1.0)
"""
    right = "assert kinds() == ({'a': 2, 'b': 1}, {1: [2]}, {'x': None}, True, b'z')"
    assert sandbox.run(Program(code, right)).passed
    for lie in ("assert text() == 'right'", "assert number() == 2.5", "assert number() == 1.0"):
        assert sandbox.run(Program(code, lie)).reason == "AssertionError"


def test_an_end_of_iteration_does_not_end_the_tests(sandbox):
    code = "def f(x):\n    raise StopIteration"
    tests = "for x, y in zip(map(f, [1, 2]), [3, 4]):\n    assert x == y"
    assert "RuntimeError: StopIteration" in sandbox.run(Program(code, tests, entry=("f",))).reason


def test_runner_needs_only_the_standard_library():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import runner; print(runner.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(RUNNER)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
