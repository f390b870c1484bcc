"""Steps of fake work: kept, redone, refused, failed, adopted, waited for."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moe_finetune.errors import OutputExistsError, RecipeError, is_machine_failure
from moe_finetune.io import output_lock
from moe_finetune.io.children import Failure, run_child, run_children
from moe_finetune.io.hashes import KnownDigests, sha256_file
from moe_finetune.io.ledger import Ledger, Step, step_error


class Work:
    """Writes its product and counts how often it was asked to."""

    def __init__(self):
        self.made: list[str] = []

    def step(self, name, inputs=None, after=(), **options):
        def make(attempt):
            self.made.append(name)
            (attempt.work / "made").mkdir()
            attempt.target.parent.mkdir(parents=True, exist_ok=True)
            (attempt.work / "made").rename(attempt.target)

        return Step(name, make, inputs or {}, after, stage=name, **options)

    def ledger(self, folder, rate=1, **options):
        steps = [
            self.step("texts"),
            self.step("one/model", {"rate": rate}, ("texts",), costly=True),
            self.step("measured", {}, ("one/model",)),
        ]
        return Ledger(folder, steps, **options)


def run_all(ledger):
    for name in ledger.steps:
        ledger.run(name)


def test_what_is_done_is_kept(tmp_path):
    work = Work()
    run_all(work.ledger(tmp_path))
    assert work.made == ["texts", "one/model", "measured"]
    run_all(work.ledger(tmp_path))
    assert len(work.made) == 3
    assert not list((tmp_path / "work").rglob("made"))


def test_a_step_without_its_predecessor_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"texts is missing; run --stage texts first"):
        Work().ledger(tmp_path).run("one/model")


def test_costly_products_of_other_inputs_are_kept_unless_told(tmp_path):
    work = Work()
    run_all(work.ledger(tmp_path))
    changed = work.ledger(tmp_path, rate=2)
    with pytest.raises(OutputExistsError, match=r"one/model: made with other values of rate"):
        changed.check_nothing_lost(changed.steps)
    with pytest.raises(OutputExistsError, match="--replace"):
        changed.run("one/model")
    assert (tmp_path / "one/model").is_dir() and len(work.made) == 3
    run_all(work.ledger(tmp_path, rate=2, replace=True))
    assert work.made[3:] == ["one/model", "measured"]


def test_checkpoints_of_an_interrupted_step_with_other_inputs_are_kept(tmp_path):
    work = Work()
    ledger = work.ledger(tmp_path)
    ledger.run("texts")
    held = tmp_path / "work/one/model"
    (held / "checkpoints").mkdir(parents=True)
    (held / "inputs.json").write_text("other")
    with pytest.raises(OutputExistsError, match="checkpoints of an interrupted training run with"):
        ledger.run("one/model")
    assert (held / "checkpoints").is_dir()


def test_a_product_that_appeared_before_the_kill_is_adopted(tmp_path):
    work = Work()
    ledger = work.ledger(tmp_path)
    run_all(ledger)
    mark = tmp_path / "steps/one.model.json"
    mark.unlink()
    held = tmp_path / "work/one/model"
    held.mkdir(parents=True)
    (held / "inputs.json").write_text(ledger.key("one/model"))
    run_all(work.ledger(tmp_path))
    assert len(work.made) == 3 and mark.is_file()


def test_a_failed_step_leaves_its_reason_and_is_tried_again(tmp_path):
    wrong = [True]

    def make(attempt):
        if wrong[0]:
            raise ZeroDivisionError("no rows")
        attempt.target.mkdir(parents=True)

    ledger = Ledger(tmp_path, [Step("a/b", make)])
    assert "ZeroDivisionError: no rows" in ledger.attempt("a/b")
    assert "no rows" in json.loads(ledger.failed_file("a/b").read_text())["reason"]
    assert "Traceback" in ledger.log_file("a/b").read_text()
    wrong[0] = False
    assert ledger.attempt("a/b") is None and ledger.done("a/b")
    assert not ledger.failed_file("a/b").exists()


def test_a_step_that_another_is_at_is_waited_for_and_not_done_twice(tmp_path):
    work = Work()
    ledger = work.ledger(tmp_path)
    with output_lock(tmp_path / "locks" / "texts"):
        thread = threading.Thread(target=ledger.run, args=("texts",))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and not work.made
        work.ledger(tmp_path).run("texts")  # as the process that holds the lock would
    thread.join()
    assert work.made == ["texts"]


def test_digests_follow_content_and_not_time(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"one")
    known = KnownDigests(tmp_path / "memo.json")
    assert known(file) == sha256_file(file)
    known.save()
    os.utime(file, ns=(5, 5))
    assert KnownDigests(tmp_path / "memo.json")(file) == sha256_file(file)
    file.write_bytes(b"three")
    assert KnownDigests(tmp_path / "memo.json")(file) == sha256_file(file)


def test_why_a_process_failed(tmp_path):
    code = "import sys; print('error: it is broken'); sys.exit(2)"
    log = tmp_path / "x" / "a.log"
    assert run_child([sys.executable, "-c", code], log) == Failure("it is broken")
    ok = [sys.executable, "-c", "pass"]
    bad = [sys.executable, "-c", code]
    assert run_children({"a": ok, "b": bad}, tmp_path, 2) == Failure("b: it is broken")
    assert run_children({"a": ok, "b": ok, "c": ok}, tmp_path, 2) is None
    full = [sys.executable, "-c", code.replace("exit(2)", "exit(1)")]
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    for command in (full, killed):
        failure = run_child(command, tmp_path / "m.log")
        assert failure.machine and is_machine_failure(step_error(failure))
    assert not is_machine_failure(step_error(Failure("it is broken")))


PARENT = """
import sys
from pathlib import Path
from moe_finetune.io.children import run_children
child = "import signal,sys,time,pathlib\\n" \\
    "signal.signal(signal.SIGTERM, lambda *a: (pathlib.Path(sys.argv[1]).write_text('saved')," \\
    "sys.exit(130)))\\npathlib.Path(sys.argv[1]).write_text('ready')\\ntime.sleep(60)"
folder = Path(sys.argv[1])
names = {n: [sys.executable, "-c", child, str(folder / n)] for n in ("a", "b")}
try:
    run_children(names, folder / "logs", 2)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_sigterm_reaches_every_child_and_all_are_waited_for(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    files: list[Path] = [tmp_path / "a", tmp_path / "b"]
    while not all(file.exists() and file.read_text() == "ready" for file in files):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait() == 130
    assert [file.read_text() for file in files] == ["saved", "saved"]
