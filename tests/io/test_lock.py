"""One writer for an output: two at once, killed holders, forks, folders made for it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_finetune.errors import OutputBusyError, OutputError, OutputExistsError
from moe_finetune.io import lock as lock_module
from moe_finetune.io import one_writer, output_folder, output_lock, write_new

# Takes the lock, says so, and writes until its input ends.
HOLDER = """
import sys
from pathlib import Path
from moe_finetune.io import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Start a process that holds the lock of a target."""
    started = []

    def start(target, *options):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(target), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_second_is_refused_by_pid_and_a_killed_holder_holds_nothing(tmp_path, hold):
    target = tmp_path / "new" / "run"
    holder = hold(target)
    with pytest.raises(OutputBusyError, match=rf"run is being written by process {holder.pid}, "):
        output_lock(target).__enter__()
    with output_lock(tmp_path / "new" / "other"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert names(tmp_path / "new") == [".run.lock"]
    with output_lock(target), pytest.raises(OutputBusyError, match=f"process {os.getpid()}, "):
        _in_thread(lambda: output_lock(target).__enter__())
    assert names(tmp_path / "new") == []


def _in_thread(function):
    raised = []

    def run():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def test_folders_that_were_made_for_the_lock_go_unless_something_lies_in_them(tmp_path):
    with pytest.raises(ZeroDivisionError), output_lock(tmp_path / "a" / "b" / "run"):
        raise ZeroDivisionError
    assert names(tmp_path) == []
    with output_lock(tmp_path / "a" / "b" / "run"):
        (tmp_path / "a" / "mine").write_text("mine")
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["mine"]


def test_one_thread_takes_it_again_and_a_fork_does_not_keep_it(tmp_path, hold):
    target = tmp_path / "run"
    ready, go = os.pipe(), os.pipe()
    with output_lock(target), output_lock(tmp_path / "." / "run"):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        hold(target)  # the child lives
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)


def test_waiting(tmp_path, hold):
    target = tmp_path / "page.html"
    holder = hold(target)
    threading.Timer(0.2, holder.stdin.close).start()
    with output_lock(target, wait=True):
        assert holder.poll() is not None or holder.wait(10) == 0


def test_where_nothing_can_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file: is not a folder"):
        output_lock(tmp_path / "file" / "run").__enter__()
    with pytest.raises(OutputError, match="file: is not a folder"):
        output_lock(tmp_path / "file" / "deep" / "run").__enter__()
    # A file system without locks: said, not silent.
    monkeypatch.setattr(lock_module.fcntl, "flock", _no_locks)
    with output_lock(tmp_path / "run"):
        assert "has no locks" in caplog.text


def _no_locks(descriptor, kind):
    raise OSError(lock_module.errno.ENOLCK, "No locks available")


def test_an_empty_folder_below_one_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    real = os.open

    def denied(path, flags, *rest):
        if flags & os.O_CREAT:
            raise PermissionError(lock_module.errno.EACCES, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(lock_module.os, "open", denied)
    with output_lock(tmp_path / "run"), pytest.raises(OutputBusyError):
        _in_thread(lambda: output_lock(tmp_path / "run").__enter__())
    assert names(tmp_path) == ["run"]
    with pytest.raises(OutputError, match="cannot be written"):
        output_lock(tmp_path / "new").__enter__()


def test_the_decorator_reads_output_and_dry_run(tmp_path):
    seen = []

    @one_writer
    def write(source, output="here", *, dry_run=False):
        seen.append((tmp_path / ".run.lock").exists())

    write("x", tmp_path / "run")
    write("x", output=str(tmp_path / "run"), dry_run=True)
    assert seen == [True, False]


def test_a_new_file_never_replaces_one(tmp_path):
    file = tmp_path / "plan.json"
    write_new(file, "one")
    with pytest.raises(OutputExistsError, match=r"plan.json exists; choose another"):
        write_new(file, "two")
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere.json")
    with pytest.raises(OutputExistsError):
        write_new(tmp_path / "link.json", "two")
    assert file.read_text() == "one" and names(tmp_path) == ["link.json", "plan.json"]


def test_an_output_that_is_killed_between_its_two_renames_is_restored(tmp_path, monkeypatch):
    """Replacing a folder takes two renames; the old one has its name back at the next start."""
    target = tmp_path / "merged"
    target.mkdir()
    (target / "old").write_text("old")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from moe_finetune.io import output_folder\n"
        "rename = Path.rename\n"
        "def dying(self, to):\n"
        "    rename(self, to)\n"
        "    os.kill(os.getpid(), 9)\n"
        "Path.rename = dying\n"
        "with output_folder(Path(sys.argv[1]), 1, overwrite=True) as folder:\n"
        "    (folder / 'new').write_text('new')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)])
    assert done.returncode == -signal.SIGKILL and not target.exists()
    with output_lock(target):
        assert names(target) == ["old"]
    assert names(tmp_path) == ["merged"]
    with output_folder(target, 1, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert names(target) == ["new"] and names(tmp_path) == ["merged"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/", "cannot be the root of the file system; choose"),
        ("/proc/none", "/proc: files cannot be created there; choose"),
    ],
)
def test_where_no_lock_can_lie_is_said_at_once(target, message):
    refused = pytest.raises(OutputError, match=message)
    with refused, output_lock(Path(target)):
        pass
