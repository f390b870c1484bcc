"""``moe-finetune demo``: the whole path on a checkpoint and data made on the spot.

Pretrain (cached) -> fine-tune twice -> merge -> evaluate all three checkpoints -> one report.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_finetune.errors import OutputExistsError
from moe_finetune.io import one_writer, write_atomic
from moe_finetune.io.folder import is_taken
from moe_finetune.io.terminal import terminal
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.recipe.shipped import recipes_folder

METHODS = ("aux_loss", "orthogonal_variance")


@one_writer
def run_demo(
    output: str | Path, backend: str | None = None, steps: int | None = None, resume: bool = False
) -> Path:
    """Run the demo in the folder ``output`` and return the report's page.

    Args:
        output: new or empty folder, or that of an interrupted demo with ``resume``.
        backend: "vllm" or "hf"; None takes vLLM where it is usable and says so where it is not.
        steps: optimizer steps of each fine-tune; default: the recipe's.
        resume: go on with the demo in ``output``; what is finished is kept.
    """
    from moe_finetune.demo.data import write_demo_data
    from moe_finetune.demo.pretrain import ensure_demo_checkpoint
    from moe_finetune.demo.stage_data import write_stage_data
    from moe_finetune.evaluation.engine import evaluate
    from moe_finetune.report import write_report
    from moe_finetune.run import run_recipe

    output = Path(output)
    if is_taken(output) and not resume:
        raise OutputExistsError(
            f"{output} is not empty; choose another --output, or add --resume to go on with it"
        )
    seconds: dict[str, float] = {}
    with _timed("pretrain", seconds):
        checkpoint = ensure_demo_checkpoint(progress=_bar("step"))
    with _timed("data", seconds):
        data = write_stage_data(write_demo_data(output / "data"))
    backend = backend or _usable_backend()
    runs = []
    for method in METHODS:
        recipe = demo_recipe(method, checkpoint, data, backend, steps)
        run = output / method
        terminal().say(method)
        start = time.perf_counter()
        run_recipe(recipe, run, resume=(run / "recipe.yaml").exists())
        seconds[method] = round(time.perf_counter() - start, 1)
        runs.append(run)
    assert recipe.evaluation is not None
    with terminal().log_to(output / "run.log"), _timed("evaluate the base", seconds):
        evaluate(
            checkpoint,
            recipe.evaluation.suite,
            backend=backend,
            output=output / "base",
            data_dir=data,
            vllm=recipe.evaluation.vllm,
        )
    for run in runs:  # with the answers, so that the page compares item by item
        base, copy = output / "base", run / "eval_base"
        shutil.copytree(base / "tasks", copy / "tasks", dirs_exist_ok=True)
        write_atomic(copy / "results.json", (base / "results.json").read_bytes())
    page = write_report(runs, output / "report" / "index.html")
    write_atomic(output / "seconds.json", json.dumps(seconds, indent=2) + "\n")
    return page


def say_outcome(output: Path, page: Path) -> None:
    """Print the demo's scores, what its methods changed, and what to do next."""
    from moe_finetune.report.outcome import end_run, next_commands

    recipes = [
        str(recipes_folder() / name)
        for name in ("methods/orthogonal_variance.yaml", "training/p0_lora.yaml")
    ]
    own = [*recipes, "model.path=./my-moe", "data.train=my.jsonl", "--output", "runs/first"]
    following = next_commands(page, output / METHODS[-1] / "merged", own)
    end_run({method: output / method for method in METHODS}, output / "base", following)


def demo_recipe(
    method: str, checkpoint: Path, data: Path, backend: str, steps: int | None = None
) -> Recipe:
    """The recipe of one fine-tune of the demo, on files that were made here."""
    overrides = [
        f"model.path={checkpoint}",
        f"data.train={data / 'train.jsonl'}",
        f"data.validation={data / 'validation.jsonl'}",
        f"evaluation.data_dir={data}",
        f"evaluation.backend={backend}",
    ]
    if steps is not None:
        overrides.append(f"trainer.max_steps={steps}")
    return load_recipe(recipes_folder() / "demo" / f"{method}.yaml", overrides)


def _usable_backend() -> str:
    from moe_finetune.vllm.install import vllm_status

    status = vllm_status()
    if not status.problems:
        return "vllm"
    problems = "; ".join(status.problems)
    terminal().say(
        f"vLLM cannot be used here ({problems}); transformers evaluates instead", "warning"
    )
    return "hf"


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    with terminal().phase(name):
        yield
    seconds[name] = round(time.perf_counter() - start, 1)


def _bar(unit: str) -> Any:
    def update(done: int, total: int, values: dict[str, float]) -> None:
        told = "  ".join(f"{key} {value:.3f}" for key, value in values.items())
        terminal().progress(done, total, f"{unit} {done}/{total}  {told}")

    return update
