"""The tables of studies that have been run, as one result file.

    python eval/bench/study.py runs/demo-strength --save demo_strength

``effects`` are a study's rows, ``arms`` the means over seeds of each arm's last probe.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from saved import add_save, finish


def summary(folder: Path) -> dict[str, Any]:
    """Effects, arms and minutes of the study in ``folder``."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for shard in sorted((folder / "shards").rglob("*.json")):
        part, arm = shard.relative_to(folder / "shards").parts[:2]
        runs.setdefault(f"{part}/{arm}", []).append(json.loads(shard.read_text(encoding="utf-8")))
    return {
        "runs": sum(map(len, runs.values())),
        "minutes": round(sum(r["seconds"] for results in runs.values() for r in results) / 60, 1),
        "arms": {
            name: {"seeds": len(results), **_means([r["probes"][-1] for r in results])}
            for name, results in runs.items()
            if "probes" in results[0]
        },
        "effects": json.loads((folder / "effects.json").read_text(encoding="utf-8")),
    }


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(f"{fmean(row[key] for row in rows):.5g}") for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    add_save(parser, "study")
    arguments = parser.parse_args()
    studies = {folder.name.replace("-", "_"): summary(folder) for folder in arguments.folders}
    arguments.folders = [folder.name for folder in arguments.folders]
    finish(arguments, {"studies": studies}, show=False)


if __name__ == "__main__":
    main()
