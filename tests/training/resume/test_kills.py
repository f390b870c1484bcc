"""Runs that are killed anywhere end, when resumed, as the run that nothing disturbed.

More of them: ``pytest -m faults --repeat 20 tests/training/resume/test_kills.py``.
"""

import random
import shutil
import signal

import pytest

from moe_finetune.training.save_and_resume.training_state import checkpoints, newest_checkpoint
from tests.training.resume.harness import SAVE, SAVE_STEPS, adapter_hash, logged, train

pytestmark = pytest.mark.faults


def test_a_save_killed_before_each_of_its_writes(straight, tmp_path):
    recipe, wanted, log = straight("qwen3_moe")
    run = tmp_path / "run"
    # The kills follow each other in one run: each resume meets what the one before left.
    for place in SAVE:
        before, _ = newest_checkpoint(run / "checkpoints")
        child = train(recipe, run, die_at=place)
        assert child.code == -signal.SIGKILL
        after, _ = newest_checkpoint(run / "checkpoints")
        assert (after != before) == (place == SAVE[-1]), "only the manifest makes a checkpoint"
    child = train(recipe, run)
    assert child.code == 0, child.text[-2000:]
    assert adapter_hash(run) == wanted
    assert logged(run) == log


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_killed_at_random_moments(straight, tmp_path, family):
    recipe, wanted, log = straight(family)
    run = tmp_path / "run"
    kills = 0
    for _ in range(2):
        child = train(recipe, run, signal_after=random.uniform(0.5, 4.0))
        kills += child.code == -signal.SIGKILL
        assert child.code in (0, -signal.SIGKILL), child.text[-2000:]
    child = train(recipe, run)
    assert child.code == 0, child.text[-2000:]
    assert adapter_hash(run) == wanted
    assert logged(run) == log


def test_sigterm_saves_the_step_and_names_the_way_on(straight, tmp_path):
    recipe, wanted, log = straight("deepseek_v3")
    run = tmp_path / "run"
    step = SAVE_STEPS + 1
    child = train(recipe, run, signal_at_step=step, number=signal.SIGTERM)
    assert child.code == 130
    assert f"checkpoint-{step}" in child.text and "--resume" in child.text
    child = train(recipe, run)
    assert f"continuing from {run / 'checkpoints' / f'checkpoint-{step}'}" in child.text
    assert child.code == 0 and adapter_hash(run) == wanted and logged(run) == log


def test_damaged_checkpoints_are_passed_over(straight, tmp_path):
    recipe, wanted, log = straight("deepseek_v2")
    run = tmp_path / "run"
    child = train(recipe, run, signal_at_step=2 * SAVE_STEPS + 1)
    assert child.code == -signal.SIGKILL
    newest, older = checkpoints(run / "checkpoints")
    file = newest / "trainer" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    child = train(recipe, run)
    assert f"--resume: skipped: {file}: is damaged" in child.text
    assert f"continuing from {older}" in child.text
    assert child.code == 0 and adapter_hash(run) == wanted and logged(run) == log


def test_without_any_whole_checkpoint_the_run_begins_again(straight, tmp_path):
    recipe, wanted, log = straight("deepseek_v2")
    run = tmp_path / "run"
    train(recipe, run, signal_at_step=SAVE_STEPS + 1)
    for folder in checkpoints(run / "checkpoints"):
        shutil.rmtree(folder)
        folder.mkdir()
    child = train(recipe, run)
    assert "has no manifest.json" in child.text and "starting from the beginning" in child.text
    assert child.code == 0 and adapter_hash(run) == wanted and logged(run) == log
