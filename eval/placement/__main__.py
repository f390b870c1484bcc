"""Plan a placement from a routing trace, and write the checkpoint in that order.

python -m eval.placement plan TRACE --ranks 8 --output plan.json
python -m eval.placement permute CHECKPOINT plan.json --output PLACED
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from eval.placement.permute import permute_experts
from eval.placement.search import plan_placement
from moe_finetune.io import write_new
from moe_finetune.metrics import placement_metrics
from moe_finetune.report.analysis import open_trace

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
Output = Annotated[Path, typer.Option(help="File or folder to write; must not exist.")]


@app.command()
def plan(
    trace: Annotated[Path, typer.Argument(help="A trace, or the folder of `analyze`.")],
    ranks: Annotated[int, typer.Option(help="Expert-parallel ranks.")],
    output: Output,
    max_imbalance: Annotated[float, typer.Option(help="Load of a rank over the mean.")] = 1.3,
) -> None:
    """Plan on the first half of each domain's sequences, and measure on the others."""
    opened = open_trace(trace)
    info, ids_TLK = opened.info, opened.load("ids")
    seen_T = first_half(opened.load("seq"), opened.load("domain"))
    if seen_T.all():
        raise SystemExit(f"{trace}: the plan is measured on other sequences; record more than one")
    planned_LE = plan_placement(ids_TLK[seen_T], info.num_experts, ranks, max_imbalance)
    order_E = np.arange(info.num_experts)
    placements = {
        "index order": np.tile(order_E // (info.num_experts // ranks), (len(info.layers), 1)),
        "round robin": np.tile(order_E % ranks, (len(info.layers), 1)),
        "planned": planned_LE,
    }
    for name, ranks_LE in placements.items():
        measured = placement_metrics(ids_TLK[~seen_T], ranks_LE)
        print(f"{name:<12}", ", ".join(f"{key} {value:.3f}" for key, value in measured.items()))
    rows = zip(info.layers, planned_LE.tolist(), strict=True)
    write_new(output, json.dumps({"ranks": {str(layer): row for layer, row in rows}}) + "\n")


@app.command()
def permute(checkpoint: str, plan: Path, output: Output) -> None:
    """Write CHECKPOINT with the experts of each rank side by side, as linear placement takes them.

    The model computes the same; only the experts' numbers change.
    """
    ranks = json.loads(plan.read_text(encoding="utf-8"))["ranks"]
    orders = {int(layer): np.argsort(row, kind="stable").tolist() for layer, row in ranks.items()}
    permute_experts(checkpoint, orders, output)


def first_half(sequence_T: np.ndarray, domain_T: np.ndarray) -> np.ndarray:
    """Tokens of the first half of each domain, so that both halves have the same mixture."""
    seen_T = np.zeros(len(sequence_T), bool)
    for domain in np.unique(domain_T):
        of_domain_T = domain_T == domain
        seen_T |= of_domain_T & (sequence_T <= np.median(sequence_T[of_domain_T]))
    return seen_T


if __name__ == "__main__":
    app()
