"""``moe-finetune demo``: two ordinary runs on the shipped checkpoint, three evaluations, one page.

Checkpoint and rows are files next to the recipes; ``recipes/demo/README.md`` says what made them.
"""

import os
import shutil
import sys
from pathlib import Path

from moe_finetune.errors import MachineError, OutputExistsError, RecipeError
from moe_finetune.io import one_writer, write_atomic
from moe_finetune.io.child_progress import RunProgress, Watch
from moe_finetune.io.children import run_children
from moe_finetune.io.folder import is_taken
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.recipe.yaml_tree import recipes_folder
from moe_finetune.report import write_report
from moe_finetune.report.end_of_run import end_run, next_commands
from moe_finetune.vllm.engine import engines_environment
from moe_finetune.vllm.install import vllm_status

METHODS = ("aux_loss", "orthogonal_variance")
AT_ONCE = 2
"""Processes: a step of so small a model gains little from a second core."""


@one_writer
def run_demo(output: str | Path, backend: str | None = None, steps: int | None = None) -> Path:
    """Run the demo in the folder ``output`` and return the report's page.

    The runs and the base's evaluation are processes of their own, whose output is in ``logs/``. In
    the folder of an earlier demo, what is finished stays and what was interrupted continues.

    Args:
        output: new or empty folder, or that of an earlier demo.
        backend: "vllm" or "hf"; None selects vLLM if usable, and otherwise reports why not.
        steps: optimizer steps of each run; default: the recipe's.
    """
    output = Path(output)
    data = _copy_rows(output)
    backend = backend or _usable_backend()
    commands = {m: ["train", *recipe_items(m, data, backend, steps)] for m in METHODS}
    commands["base"] = ["eval", str(checkpoint()), "--suite", "demo", "--backend", backend]
    commands["base"] += ["--data-dir", str(data)]
    for name, command in commands.items():
        command += ["--output", str(output / name)]
        if RunFolder(output / name).recipe.exists():
            command.append("--resume")
    with terminal().phase(f"fine-tune {' and '.join(METHODS)}, evaluate all three"):
        _run(commands, output)
    base = output / "base"
    for method in METHODS:  # with the answers, so that the page can compare item by item
        copy = RunFolder(output / method).base_evaluation
        shutil.copytree(base / "tasks", copy / "tasks", dirs_exist_ok=True)
        write_atomic(copy / RESULTS_FILE, (base / RESULTS_FILE).read_bytes())
    with terminal().phase("report"):
        return write_report([output / method for method in METHODS], RunFolder(output).page)


def checkpoint() -> Path:
    """The folder of the small Qwen3-MoE that comes with the package."""
    return recipes_folder() / "demo" / "checkpoint"


def recipe_items(method: str, data: Path, backend: str, steps: int | None = None) -> list[str]:
    """The recipe of one run and the keys that depend on the machine, for ``train``."""
    items = [
        f"recipes/demo/{method}.yaml",
        f"model.path={checkpoint()}",
        f"data.train={data / 'train.jsonl'}",
        f"data.validation={data / 'validation.jsonl'}",
        f"evaluation.data_dir={data}",
        f"evaluation.backend={backend}",
    ]
    return items if steps is None else [*items, f"trainer.max_steps={steps}"]


def say_outcome(output: Path, page: Path) -> None:
    """Print the demo's scores, what its methods changed, and next commands."""
    init_command = ["init", "./my-moe", "--data", "my.jsonl", "--output", "my.yaml"]
    following = next_commands(page, output / METHODS[-1], init_command)
    end_run({method: output / method for method in METHODS}, output / "base", following)


def _copy_rows(output: Path) -> Path:
    data = output / "data"
    if is_taken(output) and not (data / "train.jsonl").is_file():
        raise OutputExistsError(f"{output} contains other files; choose another --output")
    data.mkdir(parents=True, exist_ok=True)
    for file in sorted((recipes_folder() / "demo").glob("*.jsonl"), reverse=True):
        write_atomic(data / file.name, file.read_bytes())
    return data


def _usable_backend() -> str:
    status = vllm_status(try_import=False)  # the evaluations import it
    if status.usable:
        return "vllm"
    problems = "; ".join(status.problems)
    terminal().say(
        f"vLLM cannot be used here ({problems}); evaluating with transformers instead", "warning"
    )
    return "hf"


def _run(commands: dict[str, list[str]], output: Path) -> None:
    """Run this program's verbs, two at a time with half of the cores each."""
    logs = output / "logs"
    threads = max(1, len(os.sched_getaffinity(0)) // AT_ONCE)
    os.environ |= {"OMP_NUM_THREADS": str(threads), **engines_environment()}
    program = [sys.executable, "-m", "moe_finetune.cli"]
    programs = {name: [*program, *command] for name, command in commands.items()}
    watch = Watch([RunProgress(RunFolder(output / n), logs / f"{n}.log") for n in commands])
    failure = run_children(programs, logs, AT_ONCE, watch)
    if failure is not None:
        kind = MachineError if failure.machine else RecipeError
        raise kind(f"{failure}; correct it and repeat the command, which continues")
