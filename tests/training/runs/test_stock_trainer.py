"""Loss of each step and final adapter beside TRL's trainer, which knows nothing of this package.

Without added losses the toolkit adds nothing: whole, accumulated, resumed, and on two ranks.
"""

import signal

import pytest

from tests.support.ranks import furthest, run_ranks
from tests.training.resume import harness
from tests.training.runs.stock_trainer import (
    ADAPTERS,
    ATTENTION,
    EXPERTS,
    STEPS,
    Interrupt,
    Interrupted,
    ours,
    read_run,
    read_stock,
    stock_trainer,
    train_stock,
    write_inputs,
    write_recipe,
)

LIMIT = 1e-3
"""Adam makes 1e-4 of the rounding of a sum in another order; a row too few makes 0.1 and more."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def same(found, wanted):
    (losses, adapter), (stock_losses, stock_adapter) = found, wanted
    assert len(losses) == STEPS and losses == pytest.approx(stock_losses, rel=1e-5)
    assert furthest(adapter, stock_adapter) < LIMIT


@pytest.mark.parametrize(
    ("adapter", "accumulation"), [(EXPERTS, 1), (EXPERTS, 2), (EXPERTS, 3), (ATTENTION, 2)]
)
def test_a_whole_run(inputs, tmp_path, adapter, accumulation):
    """Of 8 micro-batches in an epoch, 3 a step leave 2 for the last one, one of them a row."""
    options = {"gradient_accumulation_steps": accumulation}
    recipe = write_recipe(inputs, tmp_path / "recipe.json", adapter, **options)
    train_stock(inputs, tmp_path / "stock", adapter, **options)
    same(ours(recipe, tmp_path / "ours"), read_stock(tmp_path / "stock"))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_resumed_run(warm, inputs, tmp_path, adapter):
    """Both end after step 5 and go on from their own checkpoint of step 4."""
    options = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2}
    recipe = write_recipe(inputs, tmp_path / "recipe.json", adapter, **options)
    killed = harness.train(recipe, tmp_path / "ours", signal_at_step=5, number=signal.SIGKILL)
    assert killed.code == -signal.SIGKILL, killed.text
    found = ours(recipe, tmp_path / "ours", "--resume")

    interrupted = stock_trainer(inputs, tmp_path / "stock", adapter, **options)
    interrupted.add_callback(Interrupt(5))
    with pytest.raises(Interrupted):
        interrupted.train()
    assert (tmp_path / "stock" / "checkpoint-4").is_dir()
    train_stock(inputs, tmp_path / "stock", adapter, resume=True, **options)
    same(found, read_stock(tmp_path / "stock"))


@pytest.mark.slow
def test_two_ranks(inputs, tmp_path):
    """Of 15 rows, 4 a step: the last step of an epoch has 3."""
    recipe = write_recipe(inputs, tmp_path / "recipe.json", EXPERTS)
    write_inputs(tmp_path)
    run_ranks("tests.training.runs.stock_trainer", 2, tmp_path, recipe)
    found = read_run(tmp_path / "ours")
    same(found, read_stock(tmp_path / "stock"))
    train_stock(inputs, tmp_path / "alone", EXPERTS)
    assert furthest(found[1], read_stock(tmp_path / "alone")[1]) > 50 * LIMIT  # half of the rows
