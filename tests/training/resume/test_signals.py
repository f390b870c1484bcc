"""What a signal does before, during and after the steps."""

import os
import signal
from types import SimpleNamespace

import pytest

from moe_finetune.io.run_folder import RunFolder
from moe_finetune.training.callback.early_ends import Interrupted, StopOnSignal
from moe_finetune.training.save_and_resume.training_state import write_manifest


def events(stop):
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    return control, lambda name: getattr(stop, name)(None, SimpleNamespace(), control)


def test_in_a_step_it_asks_for_a_save_and_leaves_after_it(tmp_path, capsys):
    with StopOnSignal(tmp_path) as stop:
        control, send = events(stop)
        send("on_step_begin")
        os.kill(os.getpid(), signal.SIGTERM)
        assert "SIGTERM: finishing this step" in capsys.readouterr().err
        send("on_step_end")
        assert control.should_save and control.should_training_stop
        with pytest.raises(Interrupted, match=r"SIGTERM; no checkpoint.*--resume"):
            send("on_save")


def test_inside_a_generation_batch_it_ends_with_the_last_checkpoint(tmp_path):
    folder = RunFolder(tmp_path).checkpoints / "checkpoint-4"
    folder.mkdir(parents=True)
    (folder / "adapter").touch()
    write_manifest(folder)
    with StopOnSignal(tmp_path, can_save=lambda: False) as stop:
        stop.on_step_begin(None, None, None)
        os.kill(os.getpid(), signal.SIGTERM)
        message = r"checkpoint-4, because step 7 is inside .*; 3 steps are done again.*--resume"
        with pytest.raises(Interrupted, match=message):
            stop.on_step_end(None, SimpleNamespace(global_step=7), SimpleNamespace())


def test_before_the_first_step_it_ends_at_once(tmp_path):
    with StopOnSignal(tmp_path), pytest.raises(Interrupted, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_one_ends_the_process(tmp_path):
    child = os.fork()
    if child == 0:
        with StopOnSignal(tmp_path) as stop:
            _, send = events(stop)
            send("on_step_begin")
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


def test_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopOnSignal(tmp_path) as stop:
        assert signal.getsignal(signal.SIGTERM) == stop._note
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_without_a_signal_nothing_changes(tmp_path):
    with StopOnSignal(tmp_path) as stop:
        control, send = events(stop)
        for name in ("on_step_begin", "on_step_end", "on_save", "on_train_end"):
            send(name)
        assert not control.should_save and not control.should_training_stop
