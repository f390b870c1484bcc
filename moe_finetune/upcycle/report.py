"""An upcycle's ``results.json``, ``tables.md`` and page."""

import json
from pathlib import Path

from moe_finetune.errors import RecipeError
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import describe_environment
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import RESULTS_FILE, RunFolder
from moe_finetune.io.text_tables import markdown
from moe_finetune.study.render import to_markdown
from moe_finetune.study.table import make_table
from moe_finetune.upcycle import page, results
from moe_finetune.upcycle.schema import UpcycleRecipe


def write_report(recipe: UpcycleRecipe, output: Path) -> Path:
    """Write the measurements of all arms and seeds, and return the page."""
    measured, seeds = results.read_measured(recipe, output), recipe.seeds
    clusters = read_object(output / "clusters" / results.CLUSTERS, RecipeError, results.REMEDY)
    cluster, tokens = clusters["cluster"], clusters["tokens"]
    of_splits = results.split_results(measured, seeds, output)
    splits = make_table(of_splits)
    categories = make_table(results.category_results(measured, seeds, output, list(cluster)))
    cluster_rows = results.cluster_rows(cluster, tokens)
    summary = {
        **results.summarize(measured, splits),
        "categories": categories.to_mapping(),
        "seeds": seeds,
        "environment": describe_environment(),
    }
    write_atomic(output / RESULTS_FILE, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    tables = [
        to_markdown(splits),
        f"## Clusters (Tables 3 and 5)\n{markdown(cluster_rows)}",
        to_markdown(categories),
        "\n".join(results.NOTES) + "\n",
    ]
    write_atomic(output / "tables.md", "\n".join(tables))
    arms, others = page.read_arms(recipe, output), page.read_other_trainings(recipe, output)
    file = RunFolder(output).page
    write_atomic(file, page.render(arms, others, of_splits, splits, categories, cluster_rows))
    return file
