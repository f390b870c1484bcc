"""Scores beside those of lm-eval's own command, which knows nothing of this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
import yaml

from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.results import load_samples
from tests.evaluation.made_rows import made_row

# Name: lm-eval's file of the task, its data set on the hub, examples, tested split, metrics.
TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", "allenai/ai2_arc", "ARC-Easy", 2, "acc"),
    "boolq": ("super_glue/boolq/default.yaml", "aps/super_glue", "boolq", 0, "acc"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "allenai/openbookqa", "main", 0, "acc_norm"),
    "sciq": ("sciq/sciq.yaml", "allenai/sciq", None, 0, "acc"),
    "winogrande": ("winogrande/default.yaml", "allenai/winogrande", "winogrande_xl", 0, "acc"),
    "gsm8k": ("gsm8k/gsm8k.yaml", "openai/gsm8k", "main", 3, "exact_match"),
}
ROWS = {"train": range(9, 20), "tested": range(9)}


def write_rows(folder: Path) -> None:
    folder.mkdir()
    for name, (_, path, subset, _, _) in TASKS.items():
        for split, numbers in ROWS.items():
            rows = [made_row(path, subset, n) for n in numbers]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}_{split}.jsonl").write_text(text)


def with_six_tasks(folder: Path) -> Path:
    """A folder with links to lm-eval and the tasks that are asked: its command reads all it has."""
    source, copy = Path(lm_eval.__file__).parent, folder / "lm_eval"
    (copy / "tasks").mkdir(parents=True)
    asked = {file.partition("/")[0] for file, *_ in TASKS.values()}
    files = [path for path in source.iterdir() if path.name not in ("tasks", "__pycache__")]
    tasks = [path for path in (source / "tasks").iterdir() if path.is_file() or path.name in asked]
    for path in [*files, *tasks]:
        (copy / path.relative_to(source)).symlink_to(path)
    return folder


def by_their_command(checkpoint: Path, rows: Path, folder: Path) -> tuple[dict, dict]:
    """Results of all tasks, and each one's samples."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True)
    for name, (file, _, _, shots, _) in TASKS.items():
        files = {split: str(rows / f"{name}_tested.jsonl") for split in ("validation", "test")}
        config = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / file),
            "task": f"their_{name}",
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"train": str(rows / f"{name}_train.jsonl")} | files},
            "num_fewshot": shots,
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(config))
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={checkpoint},dtype=float32"),
        *("--include_path", str(tasks), "--batch_size", "1"),
        *("--tasks", ",".join(f"their_{name}" for name in TASKS)),
        *("--output_path", str(folder / "out"), "--log_samples"),
    ]
    alone = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(with_six_tasks(folder / "package"))}
    subprocess.run(command, check=True, env=os.environ | alone, cwd=folder)
    (file,) = (folder / "out").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        (log,) = (folder / "out").rglob(f"samples_their_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in log.read_text().splitlines()]
    return json.loads(file.read_text())["results"], samples


@pytest.mark.slow
def test_six_tasks_score_as_lm_evals_own_command(checkpoint, tmp_path):
    rows = tmp_path / "rows"
    write_rows(rows)
    theirs, their_samples = by_their_command(checkpoint, rows, tmp_path / "theirs")
    lines = []
    for name, (_, _, _, shots, metric) in TASKS.items():
        tested = "validation" if name in ("boolq", "winogrande") else "test"
        files = {tested: f"{name}_tested.jsonl"}
        if shots:
            files["train"] = f"{name}_train.jsonl"
        line = {"task": name, "shots": shots, "metric": metric, "files": files}
        lines.append(line | ({"filter": "flexible-extract"} if name == "gsm8k" else {}))
    suite = tmp_path / "six.yaml"
    suite.write_text(yaml.safe_dump({"name": "six", "tasks": lines}))
    # lm-eval's command draws few-shot examples with this seed.
    results = evaluate(
        checkpoint, suite, "hf", tmp_path / "ours", rows, seed=1234, batch_size=1, progress=False
    )  # fmt: skip
    assert list(results["tasks"]) == list(TASKS)
    for name, task in results["tasks"].items():
        scores = {key: value for key, value in theirs[f"their_{name}"].items() if "," in key}
        for key, found in task["metrics"].items():
            metric, _, filtered = key.partition(",")
            assert found["value"] == scores.pop(key), (name, key)
            assert found["stderr"] == pytest.approx(scores.pop(f"{metric}_stderr,{filtered}"))
        assert not scores, name
        ours = [
            row for row in load_samples(tmp_path / "ours", task) if row["filter"] == task["filter"]
        ]
        chosen = [row for row in their_samples[name] if row["filter"] == task["filter"]]
        assert len(ours) == len(chosen) == len(ROWS["tested"])
        for row, their_row in zip(ours, chosen, strict=True):
            asked = list(their_row["arguments"].values())
            assert [prompt[0] for prompt in row["prompts"]] == [one["arg_0"] for one in asked]
            same_replies(row["replies"], their_row["resps"])


def same_replies(ours: list, theirs: list) -> None:
    """Texts as they are; log-likelihoods to what a sum in another order rounds."""
    for (one,), (other,) in zip(ours, theirs, strict=True):
        if isinstance(one, str):
            assert one == other.rstrip("\ufffd")  # a character that the last token cut
        else:
            assert one[0] == pytest.approx(float(other[0]), rel=1e-5)
            assert str(one[1]) == other[1]
