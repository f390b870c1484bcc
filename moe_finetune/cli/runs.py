"""Verbs that train: the demo, a recipe, a study, an upcycling; and reports."""

import enum
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_finetune.cli.app import Output, RecipeItems, app, split_items
from moe_finetune.errors import is_machine_failure
from moe_finetune.io.lock import output_lock
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal

if TYPE_CHECKING:
    from moe_finetune.recipe.yaml_tree import Tree


class Backend(enum.StrEnum):
    """Backends that evaluate in this process."""

    vllm = "vllm"
    hf = "hf"


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Folder of the demo; new, or an earlier one's.")
    ] = Path("runs/demo"),
    backend: Annotated[
        Backend | None, typer.Option("--backend", help="Default: vllm where it works.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps of each fine-tune; default: the recipe's."),
    ] = None,
) -> None:
    """Fine-tune a small MoE with two methods, evaluate, report.

    In the folder of an earlier demo it continues.

    Example: moe-finetune demo --output runs/demo
    """
    from moe_finetune.demo.demo import run_demo, say_outcome

    page = run_demo(output, backend.value if backend else None, steps)
    print(f"report: {page}")
    say_outcome(output, page)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Repair vLLM's CPU build.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, vLLM, sandbox, GPU and disk; 1 if one fails.

    Example: moe-finetune doctor --fix
    """
    from moe_finetune.cli.doctor import as_json, examine, healthy, text

    checks = []
    for check in examine(fix):  # each takes seconds
        checks.append(check)
        if not json:
            print(text(check), flush=True)
    if json:
        print(as_json(checks))
    if not healthy(checks):
        raise typer.Exit(1)


@app.command()
def train(
    items: RecipeItems,
    output: Output,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUTPUT.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, write nothing.")
    ] = False,
    ignore_memory: Annotated[
        bool,
        typer.Option("--ignore-memory", help="Start even if the memory plan exceeds this machine."),
    ] = False,
) -> None:
    """Run a recipe: train, merge, verify, evaluate, report.

    Several recipes and key.path=value overrides are merged; later ones win.

    Example: moe-finetune train recipes/models/qwen3_30b_a3b.yaml recipes/methods/erc.yaml
    data.train=my.jsonl trainer.max_steps=50 --output runs/erc
    """
    from moe_finetune.recipe.yaml_tree import load_tree

    tree = load_tree(*split_items(items))
    try:
        if is_first_rank():
            terminal().say(headline(tree.values, output))  # the imports below take some seconds
        run = _train(tree, output, resume, dry_run, ignore_memory)
    except KeyboardInterrupt as interrupt:
        # During the steps of training, a signal has said how to continue.
        if type(interrupt) is KeyboardInterrupt and not dry_run:
            how = f"interrupted; {_how_to_continue(output)}"
            terminal().say(how, "warning")
            raise KeyboardInterrupt(how) from None
        raise
    except Exception as error:
        if is_machine_failure(error) and not dry_run:
            terminal().say(_how_to_continue(output), "warning")
        raise
    if run is None:
        return
    from moe_finetune.report.end_of_run import end_run, next_commands, second_run

    if is_first_rank():
        print(f"run: {run}")
        # A resumed run may be started from its own recipe, whose values are all written out.
        more = [] if resume else second_run(run, items)
        end_run({"after": run}, None, next_commands(RunFolder(run).page, run, more=more))


def is_first_rank() -> bool:
    """Whether this process speaks for all that a launcher started."""
    return int(os.environ.get("RANK", "0")) == 0


def _train(
    tree: "Tree", output: Path, resume: bool, dry_run: bool, ignore_memory: bool
) -> Path | None:
    from moe_finetune.cli.missing import refuse_missing
    from moe_finetune.errors import DataError, RecipeError
    from moe_finetune.recipe.explain_errors import placed

    # Before what is missing, so that a folder which another run writes is said first; the run takes
    # its thread's lock again.
    with output_lock(output) if is_first_rank() else nullcontext():
        refuse_missing(tree, RunFolder(output), resume)
        # The headline has been said, so nothing else tells that the imports go on.
        with terminal().starting("train") if is_first_rank() else nullcontext():
            from moe_finetune.recipe.schema import recipe_from_tree

            recipe = recipe_from_tree(tree)
            from moe_finetune.run import plan_run, run_recipe
            from moe_finetune.training.before import prepare  # noqa: F401

        try:
            if dry_run:
                print(plan_run(recipe, output, resume, ignore_memory).text())
                return None
            return run_recipe(recipe, output, resume=resume, ignore_memory=ignore_memory)
        except (RecipeError, DataError) as error:  # of a check that has the recipe, not its files
            raise type(error)(placed(tree, str(error))) from error


def _how_to_continue(output: Path) -> str:
    recipe = RunFolder(output).recipe
    if not recipe.exists():
        return "nothing was written; repeat the command"
    return f"to continue: moe-finetune train {recipe} --output {output} --resume"


def headline(values: Mapping[str, Any], output: Path) -> str:
    """A line about a run, from a recipe that has not been validated yet."""

    def of(section: str, key: str, default: str) -> str:
        value = values.get(section)
        return str(value.get(key, default) if isinstance(value, Mapping) else value or default)

    preset, rows = of("method", "preset", "none"), of("data", "train", "no data")
    method = values.get("method")
    terms = method.get("terms") if isinstance(method, Mapping) else None
    added = preset if preset != "none" else "its own terms" if terms else "no added losses"
    stage = values.get("stage") or "sft"
    model = of("model", "path", "no model")
    return f"train: {stage} of {model} on {rows} with {added} -> {output}"


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN|DIR...", help="First: the baseline.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder, or a .html file; default: that of one run, or report."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's heading.")] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="A,B,...", help="A label for each run.")
    ] = None,
) -> None:
    """Draw runs on one offline HTML page.

    Example: moe-finetune report runs/aux_loss runs/erc --labels aux,ERC --output report
    """
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import DataError

    for run in runs:
        refuse_no_path(run, DataError, "no such folder; give the --output folder of a run")
    from moe_finetune.report import write_report

    names = [name.strip() for name in labels.split(",")] if labels is not None else None
    one_run = len(runs) == 1 and (RunFolder(runs[0]).recipe.is_file())
    default = RunFolder(runs[0]).page.parent if one_run else Path("report")
    print(f"report: {write_report(runs, output or default, title, names)}")


@app.command()
def study(
    recipe: Annotated[str, typer.Argument(help="Study file, or the name of one that is shipped.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key.path=value ...]",
            help="Recipe keys apply to every run; seeds=, baseline= and launch.*= to the study.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The study's folder; new or empty.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="List the runs; start nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue; finished runs are skipped.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Only every N-th run, from the I-th."),
    ] = None,
) -> None:
    """Run a recipe over methods, models, data and seeds; a table.

    Exit code 1 if a run failed; the other runs finish, and --resume retries the failed one.

    Example: moe-finetune study recipes/studies/paper0_ablation.yaml seeds=[1,2,3] --output figure2
    """
    from moe_finetune.study.commands import carry_out_study, show_plan

    if plan:
        show_plan(recipe, overrides or [], output)
        return
    if output is None:
        raise typer.BadParameter("--output: give the folder of the study")
    if carry_out_study(recipe, overrides or [], output, resume, shard):
        raise typer.Exit(1)


@app.command()
def upcycle(
    items: RecipeItems,
    output: Output,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in OUTPUT; finished steps are kept.")
    ] = False,
) -> None:
    """Make a MoE from a dense model: experts, merge, routers.

    Example: moe-finetune upcycle recipes/upcycle/paper.yaml my.yaml --output runs/svmoe
    """
    from moe_finetune.upcycle.schema import load_upcycle_recipe
    from moe_finetune.upcycle.svmoe import run_upcycle

    recipe = load_upcycle_recipe(*split_items(items))
    print(f"upcycle: {run_upcycle(recipe, output, resume)}")
