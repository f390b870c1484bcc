"""Products are made once: kept, refused for other inputs, resumed, waited for."""

import shutil
import threading

import pytest

from moe_finetune.errors import OutputBusyError, OutputExistsError
from moe_finetune.io import output_lock
from moe_finetune.upcycle.made_once import once


class Work:
    """Makes folders and counts how often; fails while ``broken``."""

    def __init__(self, folder):
        self.folder, self.made, self.broken = folder, [], False

    def __call__(self, name, inputs, **options):
        def make(target, work):
            self.made.append(name)
            (work / "half").touch()
            if self.broken:
                raise RuntimeError("killed")
            target.mkdir()

        return once(self.folder, name, inputs, make, **options)


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


def test_what_was_made_of_equal_inputs_is_kept(work, tmp_path):
    key = work("seed/one", {"rate": 1, "names": ("a", "b")})
    assert work("seed/one", {"names": ["a", "b"], "rate": 1}) == key and work.made == ["seed/one"]
    assert work("two", {"rate": 1}) != work("three", {"rate": 2})
    assert not list(tmp_path.rglob("half"))


def test_other_inputs_are_refused_and_named(work, tmp_path):
    work("one", {"rate": 1, "length": 5})
    with pytest.raises(OutputExistsError, match=r"one: made with other values of rate, seed\."):
        work("one", {"rate": 2, "length": 5, "seed": 0})
    assert (tmp_path / "one").is_dir() and work("one", {"rate": 1, "length": 5})
    (tmp_path / "made" / "one.json").unlink()  # nothing says what it was made from
    with pytest.raises(OutputExistsError, match="other values of length, rate"):
        work("one", {"rate": 1, "length": 5})
    shutil.rmtree(tmp_path / "one")
    work("one", {"rate": 2, "length": 5})
    assert work.made == ["one", "one"]


def test_an_interrupted_attempt_keeps_its_work_for_the_same_inputs(work, tmp_path):
    work.broken = True
    for rate in (1, 2):
        with pytest.raises(RuntimeError):
            work("one", {"rate": rate})
    assert len(list(tmp_path.glob("work/one-*/half"))) == 2
    work.broken = False
    work("one", {"rate": 2})
    assert len(list(tmp_path.glob("work/one-*/half"))) == 1  # that of the other inputs
    (left,) = tmp_path.glob("work/one-*")
    left.rename(left.with_name("two-" + left.name[-8:]))


def test_work_of_a_process_that_was_killed_after_the_product_is_removed(work, tmp_path):
    work.broken = True
    with pytest.raises(RuntimeError):
        work("one", {"rate": 1})
    (tmp_path / "one").mkdir()
    assert work("one", {"rate": 1}) and work.made == ["one"]
    assert not list(tmp_path.glob("work/one-*"))


def test_a_product_that_another_is_making_is_waited_for_or_left(work, tmp_path, caplog):
    with output_lock(tmp_path / "one"):
        thread = threading.Thread(target=work, args=("one", {"rate": 1}))
        thread.start()
        while "another process is making it" not in caplog.text:
            thread.join(0.01)
        failures = []

        def look():
            with pytest.raises(OutputBusyError):
                work("one", {"rate": 1}, wait=False)
            failures.append("busy")

        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert failures == ["busy"] and not work.made
        work("one", {"rate": 1})  # as the process that has the lock
    thread.join()
    assert work.made == ["one"]
