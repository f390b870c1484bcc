"""``moe-finetune demo``: the whole workflow, on a checkpoint and data that it creates.

Pretrain (cached) -> fine-tune twice -> merge -> evaluate all three checkpoints -> one report.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_finetune.demo.data import write_demo_data
from moe_finetune.demo.parts import Parts, code_identity
from moe_finetune.demo.pretrain import PretrainConfig, ensure_demo_checkpoint, fingerprint
from moe_finetune.demo.stage_data import write_stage_data
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.io import one_writer, write_atomic
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.io.worker import Pending, Worker
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.recipe.shipped import recipes_folder
from moe_finetune.report import write_report
from moe_finetune.report.outcome import end_run, next_commands
from moe_finetune.run import run_recipe
from moe_finetune.vllm.engine import engines_environment
from moe_finetune.vllm.install import VllmStatus, vllm_status

METHODS = ("aux_loss", "orthogonal_variance")


@one_writer
def run_demo(output: str | Path, backend: str | None = None, steps: int | None = None) -> Path:
    """Run the demo in the folder ``output`` and return the report's page.

    Finished parts of an earlier demo in the folder are kept if their inputs have not changed. The
    fine-tunes run in parallel, each in a process with its share of the cores; a third process
    evaluates the three checkpoints, the base during training.

    Args:
        output: new or empty folder, or that of an earlier demo.
        backend: "vllm" or "hf"; None selects vLLM if usable, and otherwise reports why not.
        steps: optimizer steps of each fine-tune; default: the recipe's.
    """
    output = Path(output)
    parts, code = Parts(output), code_identity()
    identity = sha256_json([code, backend, steps, fingerprint(PretrainConfig(), 0), recipe_texts()])
    page = RunFolder(output).page
    runs = [output / method for method in METHODS]
    if all(run.is_dir() for run in runs) and parts.kept("report", identity):
        return page
    parts.begin("report", identity)  # first, because the note marks the folder as a demo's
    threads = _threads_each()
    log = RunFolder(output).log
    with (
        Worker(log, {**engines_environment(), **threads}) as worker,
        Worker(log, threads) as second,
    ):
        _make(output, parts, worker, second, backend, steps, code)
    with terminal().phase("report"):
        write_report(runs, page)
        parts.finish("report")
    return page


def _make(
    output: Path,
    parts: Parts,
    worker: Worker,
    second: Worker,
    backend: str | None,
    steps: int | None,
    code: str,
) -> None:
    """The checkpoint, its data, the fine-tunes and all evaluations.

    ``worker`` evaluates, ``second`` trains at the same time as this process.
    """
    status = worker.begin(_vllm_imported) if backend is None else None
    with terminal().log_to(RunFolder(output).log):
        with terminal().phase("pretrain"):
            checkpoint = ensure_demo_checkpoint(progress=_bar("step"))
        second.begin(_import_trainer)
        with terminal().phase("data"):
            data = write_stage_data(write_demo_data(output / "data"))
    if status is not None:
        backend = _usable_backend(status.result())
    assert backend is not None
    recipes = {m: demo_recipe(m, checkpoint, data, backend, steps) for m in METHODS}
    base = _begin_base(output, parts, worker, checkpoint, recipes[METHODS[0]], code)
    _fine_tune(output, parts, worker, second, recipes, code)
    if base is not None:
        with terminal().phase("evaluate the base"):
            base.result()
        parts.finish("base")
    for method in METHODS:  # with the answers, so that the page can compare item by item
        base_eval, copy = output / "base", RunFolder(output / method).base_evaluation
        shutil.copytree(base_eval / "tasks", copy / "tasks", dirs_exist_ok=True)
        write_atomic(copy / RESULTS_FILE, (base_eval / RESULTS_FILE).read_bytes())


def _fine_tune(
    output: Path,
    parts: Parts,
    worker: Worker,
    second: Worker,
    recipes: dict[str, Recipe],
    code: str,
) -> None:
    """Make the runs that are missing.

    Steps of so small a model gain little from a second core, so each run gets a share of the
    threads. The share is the same if the other run was kept, so that results are byte-identical.
    """
    identities = {method: sha256_json([code, recipe.hash]) for method, recipe in recipes.items()}
    missing = [method for method in recipes if not parts.kept(method, identities[method])]
    for method in missing:
        parts.begin(method, identities[method])
    if not missing:
        return
    first, *others = missing
    with _own_threads(_threads_each()):
        trained = {
            method: second.begin(
                run_recipe, recipes[method], output / method, _begun(output / method), scored=False
            )
            for method in others
        }
        terminal().say(" ".join([first, *(f"({method} trains too)" for method in others)]))
        run_recipe(recipes[first], output / first, _begun(output / first), worker=worker)
        parts.finish(first)
        for method, pending in trained.items():
            terminal().say(f"{method}, trained at the same time")
            with terminal().phase("wait"):
                pending.result()
            run_recipe(recipes[method], output / method, resume=True, worker=worker)
            parts.finish(method)


def _vllm_imported() -> VllmStatus:
    """Return whether vLLM can be used; if so, also import what an evaluation needs.

    This finishes while another process reads the corpus on one core.
    """
    status = vllm_status()
    if status.usable:
        with suppress(ImportError):  # raised by lm-eval; the evaluation reports it
            import lm_eval.models.vllm_causallms  # noqa: F401
    return status


def _import_trainer() -> None:
    """Import what a fine-tune needs; this takes as long as writing the data."""
    import trl.trainer.sft_trainer  # noqa: F401


def _begun(run: Path) -> bool:
    return RunFolder(run).recipe.exists()


def _threads_each() -> dict[str, str]:
    """Environment of a process that shares the cores with one other.

    Otherwise threads of several processes spin on the same core and waste most of its time.
    """
    import torch

    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // 2))}


@contextmanager
def _own_threads(environment: dict[str, str]) -> Iterator[None]:
    """Limit the threads of this running process to those of one started with ``environment``."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _begin_base(
    output: Path, parts: Parts, worker: Worker, checkpoint: Path, recipe: Recipe, code: str
) -> Pending[Any] | None:
    """Submit the evaluation of the checkpoint before training; None if it is already done."""
    section = recipe.evaluation
    assert section is not None
    options: dict[str, Any] = {
        "backend": section.backend,
        "data_dir": section.data_dir,
        "vllm": section.vllm,
    }
    identity = sha256_json([code, checkpoint.name, section.suite, options])
    if parts.kept("base", identity):
        return None
    parts.begin("base", identity)
    return worker.begin(evaluate, checkpoint, section.suite, output=output / "base", **options)


def say_outcome(output: Path, page: Path) -> None:
    """Print the demo's scores, what its methods changed, and next commands."""
    init_command = ["init", "./my-moe", "--data", "my.jsonl", "--output", "my.yaml"]
    following = next_commands(page, output / METHODS[-1], init_command)
    end_run({method: output / method for method in METHODS}, output / "base", following)


def demo_recipe(
    method: str, checkpoint: Path, data: Path, backend: str, steps: int | None = None
) -> Recipe:
    """The recipe of one fine-tune of the demo, on the demo's files."""
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


def recipe_texts() -> list[str]:
    """The texts of the files that :func:`demo_recipe` merges."""
    folder = recipes_folder()
    files = [folder / "demo" / "demo.yaml"]
    files += [folder / kind / f"{m}.yaml" for m in METHODS for kind in ("demo", "methods")]
    return [file.read_text(encoding="utf-8") for file in files]


def _usable_backend(status: VllmStatus) -> str:
    if status.usable:
        return "vllm"
    problems = "; ".join(status.problems)
    terminal().say(
        f"vLLM cannot be used here ({problems}); evaluating with transformers instead", "warning"
    )
    return "hf"


def _bar(unit: str) -> Any:
    def update(done: int, total: int, values: dict[str, float]) -> None:
        numbers = "  ".join(f"{key} {value:.3f}" for key, value in values.items())
        terminal().progress(done, total, f"{unit} {done}/{total}  {numbers}")

    return update
