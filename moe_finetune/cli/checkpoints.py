"""Commands that take a checkpoint and write or serve one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_finetune.cli.app import Output, app, split_items
from moe_finetune.io.folder import check_output
from moe_finetune.io.run_folder import RunFolder, checkpoint_in, checkpoint_name
from moe_finetune.io.terminal import terminal
from moe_finetune.io.versions import untested

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.checkpoint.verify import VerifyReport
    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.training.before.inspect_adapter import AdapterInspection
    from moe_finetune.training.self_test.family_check import FamilyCheck


class Tokenizer(StrEnum):
    """Whose tokenizer a merged checkpoint has."""

    base = "base"
    adapter = "adapter"


def _refuse_format(value: str | None) -> str | None:
    if value is not None:
        raise typer.BadParameter(
            "a merge of a quantized base is written in bfloat16 (or --dtype): rounding it onto the "
            "base's grid loses most of what was trained; quantize the merged checkpoint with "
            "llm-compressor, or serve the adapter over the quantized base"
        )
    return value


@app.command()
def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT|ADAPTER", help="Checkpoint folder or hub id; adapter."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key.path=value ...]",
            help="Values that override the recipe's.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Recipe file; may be repeated.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="An adapter's base; default: the one it names.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Compare the family with transformers' class on a small model; with --recipe also "
            "its gradients and a short training with plain transformers. 1 if they differ.",
        ),
    ] = False,
    gpu: Annotated[
        float | None,
        typer.Option(
            "--gpu",
            metavar="GIB",
            help="Report whether the recipe fits a GPU with this many GiB, and what to change; "
            "exit code 1 if it does not. Loads no weights.",
        ),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus", min=1, max=4096, help="Plan the memory of each of this many GPUs under FSDP2."
        ),
    ] = 1,
) -> None:
    """Show a checkpoint's family, sizes, routing; what a recipe or an adapter trains.

    Example: moe-finetune inspect ./Qwen3-30B-A3B lora.rank=8 --recipe my.yaml --gpu 24
    """
    from json import dumps

    from moe_finetune.errors import RecipeError

    files, changes = split_items(overrides or [])
    if files:
        raise RecipeError(f"{files[0]}: expected key.path=value; a recipe follows --recipe")
    if changes and not recipe:
        raise RecipeError(f"{changes[0]}: changes a recipe's value; give the recipe with --recipe")
    from moe_finetune.recipe.schema import load_recipe
    from moe_finetune.training.before.inspect_checkpoint import inspect_checkpoint, inspect_dense

    if is_adapter(Path(checkpoint)):
        given = {"--recipe": recipe, "--prove": prove, "--gpu": gpu is not None, "--gpus": gpus > 1}
        if unread := [option for option, value in given.items() if value]:
            raise RecipeError(
                f"{unread[0]}: of a checkpoint, and {checkpoint} is an adapter; give its base, or "
                "leave the option out"
            )
        facts = _inspect_adapter(Path(checkpoint), base)
        print(dumps(facts.to_mapping(), indent=2) if json else facts.text())
        return
    checkpoint = str(checkpoint_in(checkpoint))
    if base is not None:
        raise RecipeError(f"--base: an adapter's, and {checkpoint} is none; leave it out")
    if prove:
        read = load_recipe(recipe, changes) if recipe else None  # may declare the family
        proof = _prove(checkpoint, read)
        print(dumps(proof.to_mapping(), indent=2) if json else proof.text())
        if not proof.ok:
            raise typer.Exit(1)
        return
    if gpu is not None and not recipe:
        raise RecipeError("--gpu: checks whether a recipe fits; give one with --recipe")
    if gpus > 1 and not recipe:
        raise RecipeError("--gpus: plans a recipe's memory; give one with --recipe")
    if gpu is not None and not 0 < gpu < 1e6:
        raise RecipeError(f"--gpu: must be the GiB of one GPU, such as 24, not {gpu:g}")
    with terminal().announced("inspect"):
        read = load_recipe(recipe, changes) if recipe else None
        dense = inspect_dense(checkpoint) if read is None else None
        inspection = dense or inspect_checkpoint(checkpoint, read, gpu, gpus)
    print(dumps(inspection.to_mapping(), indent=2) if json else inspection.text())
    if inspection.fits is False:
        raise typer.Exit(1)


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` has an adapter and no checkpoint."""
    from moe_finetune.checkpoint.adapters.files import CONFIG

    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def _inspect_adapter(source: Path, base: str | None) -> AdapterInspection:
    from moe_finetune.models.family_lookup import warn_of_plugins
    from moe_finetune.training.before.inspect_adapter import inspect_adapter

    warn_of_plugins(source)
    return inspect_adapter(*adapter_and_base(source, base))


def _prove(checkpoint: str, recipe: Recipe | None) -> FamilyCheck:
    from moe_finetune.models.config_and_tokenizer import open_config

    if recipe is not None:
        from moe_finetune.training.self_test.prove_recipe import prove

        return prove(*open_config(checkpoint), recipe)
    from moe_finetune.training.self_test.family_check import check_family

    return check_family(*open_config(checkpoint))


@app.command()
def convert(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|ADAPTER|RUN", help="Checkpoint folder or hub id; an adapter or run."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; new or empty.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORM",
            help="Write an adapter, of any program, as others read it: peft, per-expert, vllm, "
            "stacked or shared-outer. `list` shows what this one loses in each.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Base checkpoint; default: the adapter's own.")
    ] = None,
) -> None:
    """Write an adapter for another program, or a copy of a checkpoint.

    Example: moe-finetune convert moonshotai/Moonlight-16B-A3B --output ./moonlight
    """
    if to is not None:
        from moe_finetune.cli.missing import refuse_no_path
        from moe_finetune.errors import AdapterError as NoAdapter

        refuse_no_path(
            Path(checkpoint), NoAdapter, "no such folder; give that of a run or an adapter"
        )
    if to == "list":
        _print_forms(Path(checkpoint), base)
        return
    if output is None:
        raise typer.BadParameter("--output is missing: give the folder to write")
    check_output(output)
    if to is not None:
        folder = _convert_adapter(Path(checkpoint), to, base, output)
        print(f"adapter: {folder} (as {to})")
        if to == "vllm":
            _print_serve_line(checkpoint, base, folder)
        return
    from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
    from moe_finetune.errors import AdapterError
    from moe_finetune.models.config_and_tokenizer import local_folder

    if base is not None or is_adapter(Path(checkpoint)):
        raise AdapterError(
            f"{checkpoint}: an adapter is converted with --to peft, --to per-expert or --to vllm; "
            "--to list shows every form, and what this adapter loses in it"
        )
    folder = local_folder(checkpoint_in(checkpoint))
    print(f"checkpoint: {convert_checkpoint(folder, output)}")


def _print_serve_line(source: str, base: str | None, folder: Path) -> None:
    from moe_finetune.checkpoint.adapters.files import read_adapter
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.vllm.adapters import serve_line

    _, opened = adapter_and_base(Path(source), base)
    name = checkpoint_name(source)
    print("serve, on a GPU: " + serve_line(open_checkpoint(opened), read_adapter(folder), name))
    words = ["moe-finetune", "verify", source, *(["--base", base] if base is not None else [])]
    words += ["--served", "http://127.0.0.1:8000", "--model", name, "--base-model", str(opened)]
    print(f"then check that it is applied (vllm-project/vllm#49354): {shlex.join(words)}")


def adapter_and_base(source: Path, base: str | None) -> tuple[Path, Path]:
    """The adapter's folder, of a run's too, and the base's: ``base``, or what the adapter names."""
    from moe_finetune.models.config_and_tokenizer import local_folder

    run = RunFolder(source)
    adapter = run.adapter if run.adapter.is_dir() else source
    return adapter, local_folder(base) if base is not None else base_of(adapter)


def _print_forms(source: Path, base: str | None) -> None:
    from moe_finetune.checkpoint.adapters.forms import losses_by_form
    from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.io.text_tables import aligned
    from moe_finetune.models.family_lookup import warn_of_plugins

    warn_of_plugins(source)
    adapter, folder = adapter_and_base(source, base)
    opened = check_adapter(adapter, open_checkpoint(folder, stored=True))
    rows = [["form", "read by", "lost"], *map(list, losses_by_form(opened))]
    print(aligned(rows, "left"))


def _convert_adapter(source: Path, to: str, base: str | None, output: Path) -> Path:
    from moe_finetune.checkpoint.adapters.convert import convert_adapter
    from moe_finetune.checkpoint.adapters.forms import FORMS
    from moe_finetune.models.family_lookup import warn_of_plugins

    warn_of_plugins(source)
    form = FORMS[to]
    adapter, folder = adapter_and_base(source, base)
    return convert_adapter(adapter, folder, output, form)


@app.command()
def merge(
    source: Annotated[Path, typer.Argument(metavar="RUN|ADAPTER", help="Run or adapter folder.")],
    output: Output,
    base: Annotated[
        str | None, typer.Option("--base", help="Base checkpoint; default: the adapter's own.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, float16, bfloat16; default: the base's."),
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Refused.", hidden=True, callback=_refuse_format)
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare with base + adapter; an output that exists too."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    drop_bias: Annotated[
        bool, typer.Option("--drop-bias", help="Leave a learned routing bias out.")
    ] = False,
    tokenizer: Annotated[
        Tokenizer | None,
        typer.Option(
            "--tokenizer",
            help="Whose tokenizer and template; default: the adapter's if it differs.",
        ),
    ] = None,
) -> None:
    """Write base + adapter as an ordinary checkpoint, shard by shard.

    Example: moe-finetune merge runs/erc --verify --output merged/erc
    """
    from moe_finetune.cli.missing import refuse_no_path
    from moe_finetune.errors import AdapterError

    refuse_no_path(source, AdapterError, "no such folder; give that of a run or an adapter")
    verify = verify or bool(untested())
    if not verify and not dry_run:  # a verification reads an output that exists
        check_output(output)
    from moe_finetune.checkpoint.adapters.files import read_bias
    from moe_finetune.checkpoint.merge import merge_adapter
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.checkpoint.tokenizer_files import has_tokenizer
    from moe_finetune.models.family_lookup import warn_of_plugins

    warn_of_plugins(source)  # the base is elsewhere
    adapter, folder = adapter_and_base(source, base)
    bias = None if drop_bias else read_bias(adapter)
    opened = open_checkpoint(folder, stored=True)
    if verify and not dry_run and (output / "config.json").is_file():
        print(f"{output} exists: it is verified, and not written again")
    else:
        report = merge_adapter(
            opened,
            adapter,
            output,
            dtype=dtype,
            dry_run=dry_run,
            bias=bias,
            # What a run trained with is known to fit its base.
            tokenizer=tokenizer
            or ("adapter" if adapter != source and has_tokenizer(adapter) else None),
        )
        if dry_run:
            print(report.text())
            return
        print(f"merged: {output} ({report.counts()})")
        print("\n".join([*report.kinds(), *report.notes]))
    if verify:
        print(f"verified: {verified(opened, adapter, output, bias).text()}")
    print(f"upload: hf upload OWNER/NAME {shlex.quote(str(output))}")


def verified(
    base: Path | Checkpoint,
    adapter: Path,
    merged: Path,
    bias: Mapping[int, Sequence[float]] | None,
) -> VerifyReport:
    """Compare a written merge with base + adapter; an interrupt says how to go on."""
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.checkpoint.verify import verify_merge

    try:
        return verify_merge(base, adapter, open_checkpoint(merged), bias=bias)
    except KeyboardInterrupt:
        how = f"interrupted; {merged} is written but not verified: repeat the command"
        print(how, file=sys.stderr)
        raise KeyboardInterrupt(how) from None


def base_of(adapter: Path) -> Path:
    """The folder of the base checkpoint and revision that an adapter names."""
    from moe_finetune.checkpoint.adapters.files import read_adapter
    from moe_finetune.errors import AdapterError, CheckpointError
    from moe_finetune.models.config_and_tokenizer import local_folder

    config = read_adapter(adapter).config
    named = config.get("base_model_name_or_path")
    if not named:
        raise AdapterError(f"{adapter}: does not record its base checkpoint; give it with --base")
    try:
        return local_folder(str(named), revision=config.get("revision"))
    except CheckpointError as error:
        raise AdapterError(
            f"{adapter}: its base was not found ({error}); give the base's folder with --base"
        ) from error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="Run, checkpoint folder or hub id.")
    ],
) -> None:
    """Serve a merged checkpoint with vLLM. Ctrl-C stops it.

    All other options are those of `vllm serve`, such as --tensor-parallel-size 4.

    Example: moe-finetune serve runs/erc
    """
    from moe_finetune.vllm.serve import serve as run_server

    if source.startswith("-"):
        raise typer.BadParameter(f"{source}: give the run or checkpoint before vLLM's options")
    if code := run_server(source, context.args):
        raise typer.Exit(code)
