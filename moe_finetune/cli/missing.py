"""What a command names and is not there, refused before the libraries are imported."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from moe_finetune.data.row_forms import STAGE_FIELDS, check_fields, check_template, filled, renamed
from moe_finetune.errors import CheckpointError, DataError, MoeFinetuneError, did_you_mean
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.row_files import placed_rows
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.split_files import local_files
from moe_finetune.models.config_and_tokenizer import existing_folder
from moe_finetune.recipe.data import DataSection, DataSource
from moe_finetune.recipe.early_check import early_sections
from moe_finetune.recipe.explain_errors import placed
from moe_finetune.recipe.method import refuse_unknown_preset
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import Tree


def refuse_no_path(path: Path, kind: type[MoeFinetuneError], problem: str) -> None:
    """Refuse a path that does not exist with an error of ``kind``, and name a folder like it."""
    if path.exists():
        return
    parent = path.parent
    siblings = sorted(str(p) for p in parent.iterdir() if p.is_dir()) if parent.is_dir() else []
    raise kind(f"{path}: {problem}{did_you_mean(str(path), siblings)}")


def refuse_missing(tree: Tree, run: RunFolder | None = None, resume: bool = False) -> None:
    """Refuse a recipe with wrong keys, or whose checkpoint, rows or suite do not exist.

    Args:
        run: the folder to write, which may have a run only with ``resume``.
    """
    sections = early_sections(tree, Recipe)
    if run is not None:
        run.has_run(resume)
    refuse_unknown_preset(tree)
    try:
        existing_folder(sections.model.path, sections.model.revision)
    except CheckpointError as error:
        raise CheckpointError(placed(tree, f"model.path: {error}")) from error
    data = sections.data
    form = STAGES[sections.stage].form
    for paths in (data.train, data.validation_sources):
        for source in paths if isinstance(paths, list) else [paths] if paths else ():
            rows = DataSource(path=source) if isinstance(source, str) else source
            files = local_files(rows.path, rows.split or data.split)
            try:
                _check_first_row(files or [], rows, data, form)
            except DataError as error:
                raise DataError(placed(tree, str(error))) from error
    if sections.evaluation is not None:
        load_suite(sections.evaluation.suite)


def _check_first_row(
    files: Sequence[Path], source: DataSource, data: DataSection, form: str
) -> None:
    """Refuse a first row without the names in ``data.columns``, or without a field of dpo and grpo.

    With ``data.template`` it needs the fields that the template names. A row that may be left out
    is not looked at.
    """
    settings = source if source.columns or source.template else data
    if source.where or data.malformed == "drop":
        return
    columns, template = settings.columns or {}, settings.template
    if not columns and not template and form not in STAGE_FIELDS:
        return
    if columns and template:  # refused with the whole recipe
        return
    if template:
        check_template(template)
    for location, row in itertools.islice(placed_rows(files[0], finite=False), 1) if files else ():
        if template:
            filled(location, row, template)
            return
        mapped_row = renamed(location, row, columns)
        # TRL takes the prompt from two conversations that begin alike.
        alike = all(
            isinstance(mapped_row.get(name), list | dict) for name in ("chosen", "rejected")
        )
        if form in STAGE_FIELDS and not (alike and "prompt" not in mapped_row):
            check_fields(location, list(row), mapped_row, form, columns)
