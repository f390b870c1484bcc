"""The scores of a run in the model card of its merged checkpoint, as the hub reads them."""

import math
from collections.abc import Mapping
from pathlib import Path

from moe_finetune.checkpoint.small_files import CARD_FILE
from moe_finetune.evaluation.score import Score
from moe_finetune.io import write_atomic
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.report.read_runs import read_results
from moe_finetune.report.score_differences import differences, score_text

TITLE = "## Scores"


def add_scores(run: RunFolder) -> None:
    """Write the run's scores, and those of its base next to them, into ``merged/README.md``.

    The front matter gets a ``model-index``, the text a table with the differences and their 95 %
    intervals. A card without scores, or a merged folder without a card, stays as it is.
    """
    card = run.merged / CARD_FILE
    tuned, base = read_results(run.results)[1], read_results(run.base_results)[1]
    if tuned and card.is_file():
        write_atomic(card, with_scores(card.read_text(encoding="utf-8"), run.path, tuned, base))


def with_scores(
    text: str, path: Path, tuned: Mapping[str, Score], base: Mapping[str, Score]
) -> str:
    """``text`` of a card with scores; a card that has some already gets these instead."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    card = ModelCard(text.partition(f"\n{TITLE}\n")[0] + "\n", ignore_metadata_errors=True)
    front = card.data.to_dict()
    front.pop("model-index", None)
    results = []
    for name, score in tuned.items():
        for label, of in (("", score), (" of the base", base.get(name))):
            if of is not None and not math.isnan(of.value):
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=name,
                        dataset_name=name,
                        metric_type=score.metric,
                        metric_name=f"{score.metric}{label}",
                        metric_value=of.value,
                    )
                )
    card.data = ModelCardData(model_name=path.resolve().name, eval_results=results, **front)
    return f"{str(card).rstrip()}\n\n{TITLE}\n{_table(tuned, base)}\n"


def _table(tuned: Mapping[str, Score], base: Mapping[str, Score]) -> str:
    rows = ["| benchmark | n | base | this model | difference, 95 % interval |"]
    rows.append("| --- | --- | --- | --- | --- |")
    paired = {name: (base[name], score) for name, score in tuned.items() if name in base}
    by_name = dict(zip(paired, differences(list(paired.values())), strict=True))
    for name, score in tuned.items():
        before, change = "not scored", ""
        if name in by_name:
            before = score_text(base[name])
            change = f"{by_name[name].text()} {by_name[name].interval_text()}"
        count = score.n if score.n is not None else ""
        cells = (f"{name} ({score.metric})", count, before, score_text(score), change)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
