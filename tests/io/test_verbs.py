"""Each verb that writes takes the lock of its output before it looks at anything else."""

import json
import os
import threading
from pathlib import Path

import pytest

from moe_finetune import cli
from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import OutputBusyError
from moe_finetune.io import output_lock
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.run.begin_run import check_run_folder
from moe_finetune.upcycle.merge_into_moe import merge_experts

NOWHERE = "nowhere-at-all"
COMMANDS = {
    "train": ["train", "{recipe}"],
    "train --resume": ["train", "{recipe}", "--resume"],
    "analyze": ["analyze", NOWHERE, "--data", NOWHERE],
    "eval": ["eval", NOWHERE, "--suite", "demo", "--backend", "hf"],
    "select": ["select", NOWHERE],
    "demo": ["demo"],
    "study": ["study", "{root}/recipes/studies/miniature_strength.yaml", "--resume"],
    "upcycle": ["upcycle", "{root}/recipes/upcycle/paper.yaml", f"dense.path={NOWHERE}",
                f"texts.categories.one={NOWHERE}", "--resume"],
}  # fmt: skip
FUNCTIONS = {
    "merge": lambda output: merge_adapter(NOWHERE, NOWHERE, output),
    "convert": lambda output: convert_checkpoint(NOWHERE, output),
    "upcycle's merge": lambda output: merge_experts([NOWHERE], output),
}


@pytest.fixture
def held(tmp_path):
    """An output whose lock another thread holds."""
    taken, done = threading.Event(), threading.Event()
    output = tmp_path / "outputs" / "one"

    def hold():
        with output_lock(output):
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    yield output
    done.set()
    thread.join()


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_is_refused_beside_a_live_one(held, tmp_path, verb, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"path": NOWHERE}, "data": {"train": NOWHERE}}))
    root = Path(__file__).parents[2]
    command = [part.format(recipe=recipe, root=root) for part in COMMANDS[verb]]
    assert cli.main([*command, "--output", str(held)]) == 2
    assert f"{held} is being written by process {os.getpid()}, since" in capsys.readouterr().err
    assert not held.exists()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_refused_beside_a_live_one(held, name):
    with pytest.raises(OutputBusyError, match=f"process {os.getpid()}"):
        FUNCTIONS[name](held)


def _recipe():
    return recipe_from_tree(
        Tree({"model": {"path": NOWHERE}, "data": {"train": NOWHERE}, "method": {"preset": "none"}})
    )


def test_an_empty_folder_is_resumed_from_the_beginning(tmp_path, caplog):
    """A run that was killed before its recipe was written."""
    check_run_folder(_recipe(), RunFolder(tmp_path), resume=True)
    assert "is empty" in caplog.text
    (tmp_path / ".recipe.yaml.partial-0123abcd").write_text("half")
    check_run_folder(_recipe(), RunFolder(tmp_path), resume=True)
    check_run_folder(_recipe(), RunFolder(tmp_path), resume=False)
