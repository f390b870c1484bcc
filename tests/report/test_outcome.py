"""The end of a run on the terminal."""

import json

from moe_finetune.io.terminal import Terminal, use_terminal
from moe_finetune.report.outcome import end_run, listed, next_commands, outcome_text, program
from moe_finetune.report.runs import read_results, read_run


def _run(folder, score, overlap, losses):
    task = {"value": score, "stderr": 0.02, "n": 40, "metric": "acc"}
    for name in ("eval", "routing", "report", "merged"):
        (folder / name).mkdir(parents=True)
    (folder / "eval" / "results.json").write_text(json.dumps({"tasks": {"sums": task}}))
    for when, value in zip(("before", "after"), overlap, strict=True):
        metrics = {"expert_overlap": {"mean": value}, "max_violation": {"mean": None}}
        shot = {"layers": [1], "num_experts": 3, "top_k": 2, "load": [[3, 2, 5]]}
        (folder / "routing" / f"{when}.json").write_text(json.dumps(shot | {"metrics": metrics}))
    rows = [{"kind": "train", "step": n, "loss": loss} for n, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report" / "index.html").write_text("page")
    return folder


def text_of(folders, base=None):
    """The tables at the end of these runs."""
    runs = {label: read_run(folder, label) for label, folder in folders.items()}
    return outcome_text(runs, read_results(base / "results.json")[1] if base else {})


def test_scores_and_changes_of_two_runs_and_their_base(tmp_path):
    runs = {
        "aux": _run(tmp_path / "aux", 0.5, (0.4, 0.41), [3.0, 2.4]),
        "ours": _run(tmp_path / "ours", 0.75, (0.4, 0.3), [3.0, 2.1]),
    }
    base = tmp_path / "base"
    base.mkdir()
    task = {"value": 0.25, "stderr": None, "n": 40, "metric": "acc"}
    (base / "results.json").write_text(json.dumps({"tasks": {"sums": task}}))
    text = text_of(runs, base)
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        "scores n base aux ours",
        "sums (acc) 40 0.250 0.500 ± 0.020 0.750 ± 0.020",
        "",
        "what training changed before after aux after ours",
        "Expert overlap 0.4 0.41 (+2.5 %) 0.3 (-25 %)",
        "Training loss 3 2.4 (-20 %) 2.1 (-30 %)",
    ]


def test_a_first_log_after_step_0_is_not_called_before(tmp_path):
    """Each run's change is from its own first value, and the row says which step that is of."""
    runs = {}
    for name, rows in {
        "a": [(40, 2.5), (80, 2.0)],
        "b": [(40, 2.4), (80, 1.8)],
    }.items():
        (tmp_path / name).mkdir()
        lines = [{"kind": "eval", "step": step, "eval_loss": loss} for step, loss in rows]
        lines += [{"kind": "train", "step": 80, "reward": 0.5, "loss": 0.01}]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        runs[name] = tmp_path / name
    assert "Validation loss" not in text_of(runs)  # a policy gradient's says nothing
    for run in runs.values():
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = "".join(json.dumps(line) + "\n" for line in lines if "reward" not in line)
        (run / "metrics.jsonl").write_text(kept)
    text = " ".join(text_of(runs).split())
    assert "Validation loss, first log (step 40) and last differs" in text
    assert "2 (from 2.5, -20 %) 1.8 (from 2.4, -25 %)" in text


def test_a_run_without_scores_says_what_it_has(tmp_path, capsys):
    run = _run(tmp_path / "a b", None, (0.4, 0.2), [3.0])
    (run / "eval" / "results.json").unlink()
    following = next_commands(run / "report" / "index.html", run)
    for quiet in (False, True):
        before = use_terminal(Terminal("plain", quiet))
        try:
            end_run({"after": run}, None, following)
        finally:
            use_terminal(before)
        out = capsys.readouterr().out
        assert "scores  " not in out
        assert "0.2 (-50 %)" in out and ("next:" in out) is not quiet
        assert "expert overlap −50 %" in out
        assert quiet or f"moe-finetune serve '{run}'" in out


def test_commands_to_paste_name_the_program_as_the_shell_finds_it(monkeypatch, tmp_path):
    folder = tmp_path / "an env"
    folder.mkdir()
    script = folder / "moe-finetune"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script), "demo"])
    monkeypatch.setenv("PATH", "")
    assert f"'{script}' serve 'a b'" in listed([("serve", [program(), "serve", "a b"])])
    monkeypatch.setenv("PATH", str(folder))
    assert program() == "moe-finetune"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest"])  # in Python, not by the program
    assert program() == "moe-finetune"
