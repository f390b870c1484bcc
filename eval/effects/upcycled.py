"""Effect 11 from the results of the upcycling miniature, a separate study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.effects.table import Row
from eval.effects.verdicts import verdict_of_sign
from moe_finetune.errors import RecipeError
from moe_finetune.io.json_file import parse_json
from moe_finetune.metrics.statistics import t_interval

RESULTS_FILE = "results.json"
OURS = "SvMoE"
BASELINES = ("BTX", "BTX + balance")
METRICS: Mapping[str, str] = {"cmr_1": "CMR_1 on test", "s_rl": "S_RL on test, nats"}


def upcycle_rows(folder: str | None) -> list[Row]:
    """Rows of effect 11 from ``moe-finetune upcycle``'s output, or none without a folder.

    Raises:
        RecipeError: the folder has no readable results, or no results of SvMoE and BTX.
    """
    if folder is None:
        return []
    path = Path(folder) / RESULTS_FILE
    try:
        results = parse_json(path.read_bytes())
        return [
            _row(results["arms"], metric, baseline)
            for baseline in BASELINES
            for metric in METRICS
            if baseline == BASELINES[0] or baseline in results["arms"]
        ]
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"upcycle: {path} cannot be read ({error}); make it with `moe-finetune upcycle "
            f"recipes/upcycle/miniature.yaml --output {folder}`"
        ) from None
    except (KeyError, TypeError) as error:
        raise RecipeError(
            f"upcycle: {path} has no {error}; give the output of an upcycle "
            f"run that compares {OURS} and {BASELINES[0]}"
        ) from None


def _row(arms: Mapping[str, Any], metric: str, baseline: str) -> Row:
    ours, base = (arms[arm]["splits"]["test"][metric] for arm in (OURS, baseline))
    pairs = zip(ours["seeds"], base["seeds"], strict=True)
    difference = t_interval([a - b for a, b in pairs])
    verdict = verdict_of_sign(difference, -1)
    what = METRICS[metric]
    return Row(what, OURS, baseline, ours["mean"], base["mean"], difference, verdict)
