"""Studies: a recipe varied along axes and seeds, run, resumed and tabulated.

.. code-block:: python

    from moe_finetune.study import expand, load_results, load_study, run_study

    study = load_study("recipes/studies/paper0_ablation.yaml", ["trainer.max_steps=9"])
    runs = expand(study)             # [Run(arm, seed, values, recipe), ...]; starts nothing
    results = run_study(study, "studies/table1", resume=False, shard=(1, 4))
    results = load_results("studies/table1")        # at any time, finished or not
    for run in results.finished:                    # RunResult
        run.arm, run.seed, run.values               # "moonlight-erc", 42, {"model": ...}
        run.folder, run.metrics_file, run.merged    # paths
        run.evaluation                              # eval/results.json, or None
        run.value("loss")                           # last of metrics.jsonl, or routing/after.json

A study need not come from a file: ``study_from_tree(Tree(values), name)`` accepts a mapping.
``launch.kind: inline`` runs everything in this process and saves the seconds that a child's imports
take.
"""

from moe_finetune.study.expand import Run, expand
from moe_finetune.study.read_study import RunResult, StudyResults, load_results
from moe_finetune.study.recipe import StudyRecipe, load_study, study_from_tree
from moe_finetune.study.runner import run_study

__all__ = [
    "Run",
    "RunResult",
    "StudyRecipe",
    "StudyResults",
    "expand",
    "load_results",
    "load_study",
    "run_study",
    "study_from_tree",
]
