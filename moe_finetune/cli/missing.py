"""What a command names and is not there, refused before the libraries are imported."""

from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.split_files import local_files
from moe_finetune.models.loading import existing_folder
from moe_finetune.recipe.data import DataSource
from moe_finetune.recipe.early_check import early_sections
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.yaml_tree import Tree


def refuse_missing(tree: Tree, run: RunFolder | None = None, resume: bool = False) -> None:
    """Refuse a recipe with wrong keys, or whose checkpoint, rows or suite do not exist.

    Args:
        run: the folder to write, which may have a run only with ``resume``.
    """
    sections = early_sections(tree, Recipe)
    if run is not None:
        run.has_run(resume)
    existing_folder(sections.model.path, sections.model.revision)
    data = sections.data
    for paths in (data.train, data.validation_sources):
        for source in paths if isinstance(paths, list) else [paths] if paths else ():
            rows = DataSource(path=source) if isinstance(source, str) else source
            local_files(rows.path, rows.split or data.split)
    if sections.evaluation is not None:
        load_suite(sections.evaluation.suite)
