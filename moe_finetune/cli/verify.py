"""The verb that checks a merge, and what a server answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_finetune.cli.app import app
from moe_finetune.cli.checkpoints import adapter_and_base, base_of, verified
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.served.check import Sources


@app.command()
def verify(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MERGED|ADAPTER", help="Run, merged checkpoint, or adapter folder."
        ),
    ],
    served: Annotated[
        str | None,
        typer.Option(
            "--served",
            metavar="URL",
            help="Compare what this server answers, instead of the merged files. Exit code 1 "
            "unless it is the trained model.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name there; default: its only one.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            help="The base's name there: it measures what two programs differ by.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Adapter that MERGED was made from.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base checkpoint; default: the adapter's own.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Rows with text or input_ids, or lines of a .txt; default: the run's own rows.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="URL",
            help="Server of the trained model, where it does not fit on this machine.",
        ),
    ] = None,
    reference_base: Annotated[
        str | None,
        typer.Option("--reference-base", metavar="URL", help="Server of its base."),
    ] = None,
    rounded: Annotated[
        bool,
        typer.Option("--rounded", help="Also accept the trained model, rounded (quantized)."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a merged checkpoint, or whether a server answers with it.

    Example: moe-finetune verify runs/erc --served http://127.0.0.1:8000
    """
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import AdapterError, RecipeError
    from moe_finetune.models.family_lookup import warn_of_plugins

    problem = "no such folder; give a run, a merged checkpoint or an adapter"
    refuse_no_path(source, AdapterError, problem)
    warn_of_plugins(source)
    if served is None:
        served_options = (model, base_model, prompts, reference, reference_base)
        if any(value is not None for value in served_options) or rounded:
            raise RecipeError("--served: give the server's address, or none of its options")
        _verify_files(source, adapter, base, json)
        return
    _verify_served(
        source,
        adapter,
        base,
        served=served,
        model=model,
        base_model=base_model,
        prompts=prompts,
        reference=reference,
        reference_base=reference_base,
        rounded=rounded,
        as_json=json,
    )


def _verify_files(source: Path, adapter: Path | None, base: str | None, as_json: bool) -> None:
    """Repeat the checks after a merge: of a run, or of MERGED with its adapter."""
    from dataclasses import asdict
    from json import dumps

    from moe_finetune.checkpoint.adapters.files import read_bias
    from moe_finetune.errors import AdapterError

    run = RunFolder(source)
    bias: Mapping[int, Sequence[float]] | None
    if adapter is not None:
        merged, bias = source, read_bias(adapter)
    elif run.adapter.is_dir():
        merged, adapter = run.merged, run.adapter
        bias = _run_bias(run)
    else:
        raise AdapterError(
            f"{source}: a merge is compared with its adapter: give a run that has one, or a merged "
            "checkpoint with --adapter"
        )
    adapter, folder = adapter_and_base(adapter, base)
    with terminal().announced("verify"):
        report = verified(folder, adapter, merged, bias)
    print(dumps(asdict(report), indent=2) if as_json else f"verified: {report.text()}")


def _run_bias(run: RunFolder) -> Mapping[int, Sequence[float]] | None:
    """The routing bias that the run's merge wrote, as its recipe says."""
    from moe_finetune.checkpoint.adapters.files import read_bias

    recipe = _recipe(run)
    if recipe is not None and recipe.method.export_bias != "write":
        return None
    return read_bias(run.adapter)


def _recipe(run: RunFolder) -> Recipe | None:
    from moe_finetune.recipe.schema import load_recipe

    return load_recipe(run.recipe) if run.recipe.is_file() else None


def _verify_served(
    source: Path,
    adapter: Path | None,
    base: str | None,
    *,
    served: str,
    model: str | None,
    base_model: str | None,
    prompts: Path | None,
    reference: str | None,
    reference_base: str | None,
    rounded: bool,
    as_json: bool,
) -> None:
    from json import dumps

    from moe_finetune.errors import RecipeError
    from moe_finetune.models.config_and_tokenizer import load_tokenizer
    from moe_finetune.served.check import check_served
    from moe_finetune.served.client import Served
    from moe_finetune.served.prompts import file_prompts, fixed_prompts, run_prompts

    if reference_base is not None and reference is None:
        raise RecipeError("--reference-base: is the base of --reference; give that, too")
    if base_model is not None and reference is not None and reference_base is None:
        raise RecipeError(
            "--base-model: is compared with the base's own server here; give --reference-base URL"
        )
    run = RunFolder(source)
    with terminal().announced("verify"):
        served_model = Served(served, model)
        served_base = None
        if base_model is not None:
            served_base = Served(served, base_model, name_option="--base-model")
        sources, folder = _sources(run, adapter, base, reference, reference_base)
        recipe = _recipe(run)
        if prompts is not None:
            rows = file_prompts(prompts, load_tokenizer(folder))
        elif recipe is not None and recipe.model.path:
            rows = run_prompts(recipe, load_tokenizer(folder))
        else:
            rows = fixed_prompts(load_tokenizer(folder))
    report = check_served(served_model, sources, rows, load_tokenizer(folder), served_base)
    if run.recipe.is_file() and adapter in (None, run.adapter):  # another adapter is not the run's
        report.write(run)
    print(dumps(report.to_mapping(), indent=2) if as_json else report.text())
    if not report.right(rounded):
        raise typer.Exit(1)


def _sources(
    run: RunFolder,
    adapter: Path | None,
    base: str | None,
    reference: str | None,
    reference_base: str | None,
) -> tuple[Sources, Path]:
    """What the server should answer with, and the folder of its tokenizer."""
    from moe_finetune.checkpoint.adapters.files import CONFIG
    from moe_finetune.checkpoint.tokenizer_files import has_tokenizer
    from moe_finetune.models.config_and_tokenizer import local_folder
    from moe_finetune.served.check import Sources
    from moe_finetune.served.client import Served

    merged = next(
        (path for path in (run.merged, run.path) if (path / "config.json").is_file()), None
    )
    unmerged = next((p for p in (run.adapter, run.path) if (p / CONFIG).is_file()), None)
    adapter = adapter or unmerged
    base_folder = None
    if base is not None:
        base_folder = local_folder(base)
    elif adapter is not None and reference is None:
        base_folder = base_of(adapter)
    elif (recipe := _recipe(run)) is not None and reference is None:
        base_folder = local_folder(recipe.model.path, revision=recipe.model.revision)
    folder = merged or (adapter if adapter and has_tokenizer(adapter) else base_folder)
    if folder is None:
        folder = local_folder(run.path)  # refuses what is no checkpoint
    if reference is not None:
        server = Served(reference, option="--reference", name_option=None)
        base_server = None
        if reference_base is not None:
            base_server = Served(reference_base, option="--reference-base", name_option=None)
        return Sources(None, server=server, base_server=base_server), folder
    if merged is not None:
        return Sources(merged, base=base_folder), folder
    return Sources(base_folder, adapter, base_folder), folder
