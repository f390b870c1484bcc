"""What each paper's losses change at the demo's length, on its held-out rows and on fresh ones.

Every arm trains the demo's checkpoint as ``recipes/demo/demo.yaml`` says (120 steps, 16 rows), and
is compared with a run that has a balance loss and nothing else: that of the arm's own share, or the
one named in ``BASELINES``. The demo's shares were chosen on its own held-out rows, so all is
measured on rows of another seed, too, none of which the demo trains or tests on.

    python eval/bench/demo_strength.py --save
    python eval/bench/demo_strength.py --arms orthogonal_variance --set variance.share=0.5
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from saved import add_save, finish

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from eval.effects.finetune import Workbench, run_finetune  # noqa: E402
from eval.effects.probe import measure  # noqa: E402
from eval.effects.score import HeldOutTasks  # noqa: E402
from eval.effects.settings import FinetuneSection  # noqa: E402
from moe_finetune.data.examples import prepare  # noqa: E402
from moe_finetune.demo.data import TRAIN_FILE, VALIDATION_FILE, write_demo_data  # noqa: E402

FRESH_SEED = 1
BALANCE = {"share": 0.1, "variant": "deepseek", "scope": "micro_batch"}
ARMS: dict[str, dict[str, Any]] = {
    "specialization_coupling": {
        "terms": {
            "load_balance": {**BALANCE, "share": 0.15},
            "specialization": {"share": 0.7},
            "coupling": {"share": 0.25},
        }
    },
    "erc": {"terms": {"load_balance": BALANCE, "erc": {"weight": 1.0, "alpha": 1.0}}},
    # As balanced as the balance loss alone at a share of 0.1.
    "orthogonal_variance_balanced": {
        "preset": "orthogonal_variance",
        "terms": {
            "load_balance": {"share": 0.8, "scope": "micro_batch"},
            "orthogonality": {"share": 0.02},
            "variance": {"share": 1.0},
        },
    },
}
BASELINES = {"orthogonal_variance_balanced": 0.1}
"""Share of balance that an arm is compared with, where it is not the arm's own."""
ASKED = {  # metric: at most this many times the baseline's; "least:" at least
    "orthogonal_variance": {"expert_overlap": 0.62, "least:score_variance": 1.8},
    "specialization_coupling": {"activation_cosine": 0.3, "least:coupling_mass": 1.1},
    "erc": {"erc_loss": 0.01},
    "orthogonal_variance_balanced": {"expert_overlap": 0.75, "least:score_variance": 1.6},
}
ALWAYS = {"validation_loss": 1.01, "max_violation": 1.2}


class TwoHeldOuts(Workbench):
    """Measures and asks on fresh rows as well; their names begin with ``fresh/``."""

    def __init__(self, section: FinetuneSection, folder: Path):
        self.fresh: list[dict[str, Any]] = []
        super().__init__(section, folder)
        place = write_demo_data(folder / "fresh", FRESH_SEED)
        seen = {
            row["prompt"]
            for name in (TRAIN_FILE, VALIDATION_FILE)
            for row in rows_of(self.data / name)
        }
        unseen = [row for row in rows_of(place / VALIDATION_FILE) if row["prompt"] not in seen]
        held_out = folder / "fresh.jsonl"
        held_out.write_text("".join(json.dumps(row) + "\n" for row in unseen), encoding="utf-8")
        data = self.recipe({"preset": "none"}, seed=0).data
        self.fresh = prepare(str(held_out), data, self.tokenizer, "validation").to_list()
        self.tasks = TwoTasks(self.tasks, HeldOutTasks(place, self.tokenizer, section.tasks))

    def measure(self, model: Any, perturbation: Any = None) -> Any:
        """The demo's rows, then the fresh ones."""
        found, top1_TL = super().measure(model, perturbation)
        if self.fresh:
            more, _ = measure(
                model,
                self.fresh,
                self.frequencies_VE,
                embeddings=self.section.embeddings,
                perturbation=perturbation,
            )
            found |= {f"fresh/{name}": value for name, value in more.items()}
        return found, top1_TL


class TwoTasks:
    """The demo's held-out tasks, and the same kinds with other items."""

    def __init__(self, own: HeldOutTasks, fresh: HeldOutTasks):
        self.own, self.fresh = own, fresh

    def score(self, model: Any, perturbation: Any = None) -> dict[str, float]:
        """Share of right answers by task."""
        more = self.fresh.score(model, perturbation)
        return self.own.score(model, perturbation) | {f"fresh/{k}": v for k, v in more.items()}


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def compared(arm: str, ours: dict[str, float], baseline: dict[str, float]) -> dict[str, Any]:
    """Each figure asked for as a multiple of the baseline's, on both held-out parts."""
    found = {}
    for name, limit in {**ASKED.get(arm.partition("@")[0], {}), **ALWAYS}.items():
        metric = name.removeprefix("least:")
        for place in ("", "fresh/"):
            key = place + metric
            ratio = ours[key] / baseline[key]
            met = ratio >= limit if name.startswith("least:") else ratio <= limit
            found[key] = {
                "baseline": round(baseline[key], 6),
                "ours": round(ours[key], 6),
                "times": round(ratio, 4),
                "asked": f"{'>=' if name.startswith('least:') else '<='} {limit}",
                "met": met,
            }
    return found


def demo_section() -> tuple[FinetuneSection, dict[str, dict[str, Any]]]:
    """The demo's recipe without what a study fills in, and all arms' methods."""
    demo = ROOT / "recipes" / "demo"
    shared = yaml.safe_load((demo / "demo.yaml").read_text(encoding="utf-8"))
    trainer = {
        k: v for k, v in shared["trainer"].items() if k not in ("eval_steps", "save_strategy")
    }
    recipe = {
        "router": shared["router"],
        "lora": shared["lora"],
        "data": {"max_length": shared["data"]["max_length"]},
        "trainer": trainer,
    }
    own = yaml.safe_load((demo / "orthogonal_variance.yaml").read_text(encoding="utf-8"))["method"]
    arms = {"orthogonal_variance": {"preset": "orthogonal_variance", **own}, **ARMS}
    section = FinetuneSection(recipe=recipe, arms=arms, probes=1, embeddings=1500, tasks=100)
    return section, arms


def baseline_of(arm: str, method: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and method of the balance loss alone that an arm is compared with."""
    share = BASELINES.get(arm, method["terms"]["load_balance"].get("share"))
    return f"balance_{share:g}", {"terms": {"load_balance": {**BALANCE, "share": share}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=["orthogonal_variance", *ARMS])
    parser.add_argument("--set", nargs="*", default=[], metavar="TERM.OPTION=VALUE",
                        help="change the arms' terms")  # fmt: skip
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint", type=Path, help="in the place of the demo's own")
    parser.add_argument("--folder", type=Path, help="where runs go; a temporary folder by default")
    add_save(parser, "demo_strength")
    arguments = parser.parse_args()
    section, arms = demo_section()
    if arguments.checkpoint:
        section.recipe["model"] = {"path": str(arguments.checkpoint)}
    for change in arguments.set:
        place, _, value = change.partition("=")
        term, _, option = place.partition(".")
        for arm in arguments.arms:
            arms[arm]["terms"].setdefault(term, {})[option] = yaml.safe_load(value)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        bench = TwoHeldOuts(section, folder)
        found: dict[str, Any] = {}
        runs: dict[str, dict[str, Any]] = {}
        baselines = {arm: baseline_of(arm, arms[arm]) for arm in arguments.arms}
        for arm in arguments.arms:
            runs |= dict([baselines[arm]]) | {arm: arms[arm]}
        for arm, method in runs.items():
            result = run_finetune(bench, method, arguments.seed, folder / "runs" / arm)
            end = result["probes"][-1]
            weights = {
                key.split("/")[1]: value
                for row in result["log"]
                for key, value in row.items()
                if key.startswith("strength/") and key.endswith("/weight")
            }
            found[arm] = {"metrics": end, "scores": result["scores"], "weights": weights}
            if arm in baselines:
                against = baselines[arm][0]
                found[arm]["baseline"] = against
                found[arm]["compared"] = compared(arm, end, found[against]["metrics"])
                for name, row in found[arm]["compared"].items():
                    print(f"{arm:26} {name:24} {row['baseline']:.4g} -> {row['ours']:.4g}  "
                          f"x {row['times']:.3f} ({row['asked']}) {'' if row['met'] else 'MISSED'}",
                          flush=True)  # fmt: skip
            scores = " ".join(f"{k} {100 * v:.1f}" for k, v in result["scores"].items())
            print(f"{arm:26} {scores}", flush=True)
        fresh = len(bench.fresh)
    finish(arguments, {"methods": runs, "fresh_rows": fresh, "arms": found}, show=False)


if __name__ == "__main__":
    main()
