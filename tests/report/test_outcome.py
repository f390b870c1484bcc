"""The end of a run on the terminal."""

import json
import shlex
import shutil
import sys

import pytest

from moe_finetune.io.next_commands import listed, program
from moe_finetune.io.terminal import Terminal, use_terminal
from moe_finetune.report.end_of_run import end_run, next_commands, second_run


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


def test_each_fact_of_two_runs_is_printed_once(tmp_path, capsys):
    runs = {
        "aux": _run(tmp_path / "aux", 0.5, (0.4, 0.41), [3.0, 2.4]),
        "ours": _run(tmp_path / "ours", 0.75, (0.4, 0.3), [3.0, 2.1]),
    }
    base = tmp_path / "base"
    base.mkdir()
    task = {"value": 0.25, "stderr": None, "n": 40, "metric": "acc"}
    (base / "results.json").write_text(json.dumps({"tasks": {"sums": task}}))
    before = use_terminal(Terminal("plain", quiet=True))
    try:
        end_run(runs, base, "")
    finally:
        use_terminal(before)
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1:3] == [
        "scores n base aux ours",
        "sums (acc) 40 0.250 0.500 ± 0.020 0.750 ± 0.020",
    ]
    assert text.count("−27 % (0.410 → 0.300)") == text.count("overlap") == 1


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
        assert ("next:" in out) is not quiet
        assert out.count("expert overlap −50 %") == out.count("overlap") == 1
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


def test_a_run_on_texts_is_asked_without_a_chat_template(tmp_path):
    """The first command after a run was answered by text that no training row is like."""
    run, rows = recipe_in(tmp_path / "run", "none"), tmp_path / "rows.jsonl"
    (run / "merged").mkdir()
    (run / "recipe.yaml").write_text(f"model: {{path: m}}\ndata: {{train: {rows}}}\n")
    for row, raw in (({"text": "a b"}, True), ({"messages": [{"role": "user"}]}, False)):
        rows.write_text(json.dumps(row) + "\n")
        asked = next_commands(None, run).splitlines()[1]
        assert asked.endswith(" 'your question' --raw") is raw
        assert "ask" in asked
    rows.unlink()
    assert "--raw" not in next_commands(None, run)


def recipe_in(folder, method, rank=3):
    folder.mkdir(parents=True)
    lora = f"lora: {{rank: {rank}}}"
    text = f"model: {{path: m}}\nmethod: {{preset: {method}}}\ndata: {{train: d.jsonl}}\n{lora}\n"
    (folder / "recipe.yaml").write_text(text)
    return folder


def test_a_run_ends_with_the_run_to_compare_it_with(tmp_path):
    """Only `init` named one, without the values that `train` was given."""
    first, items = recipe_in(tmp_path / "first", "none"), ["my.yaml", "trainer.max_steps=20"]
    train, report = ([*words[1:]] for _, words in second_run(first, items))
    second = str(tmp_path / "second")
    losses = ["method=orthogonal_variance", "method.share=recommended"]
    assert train == ["train", *items, *losses, "--output", second]
    assert report == ["report", str(first), second, "--output", str(tmp_path / "both")]
    # Once it is there, only the report of both is left, the plain run first.
    other = recipe_in(tmp_path / "second", "orthogonal_variance")
    for run in (first, other):
        (only,) = second_run(run, items)
        assert [*only[1]][1:4] == ["report", str(first), second]
    lonely = recipe_in(tmp_path / "alone" / "a b", "erc")
    train, report = (shlex.join(words) for _, words in second_run(lonely, ["my.yaml"]))
    assert "train my.yaml method=none --output" in train
    assert report.index("alone/first") < report.index("a b'")
    (lonely / "recipe.yaml").write_text("stage: dpo\nmethod: {preset: none}\n")
    train, _ = (shlex.join(words) for _, words in second_run(lonely, ["my.yaml"]))
    # The recommended shares were measured in stage sft.
    assert "my.yaml method=orthogonal_variance method.share=0.1 --output" in train


@pytest.mark.parametrize(
    ("screen", "installed", "platform", "opener"),
    [
        ("DISPLAY", True, "linux", "xdg-open"),
        ("WAYLAND_DISPLAY", True, "linux", "xdg-open"),
        ("DISPLAY", False, "linux", None),
        (None, True, "linux", None),
        (None, False, "darwin", "open"),
    ],
)
def test_a_page_is_opened_where_there_is_a_screen_and_served_elsewhere(
    tmp_path, monkeypatch, screen, installed, platform, opener
):
    page = tmp_path / "report" / "index.html"
    page.parent.mkdir()
    page.write_text("page")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if screen is not None:
        monkeypatch.setenv(screen, ":0")
    paths = {"python": "/usr/bin/python"} | ({"xdg-open": "/usr/bin/xdg-open"} if installed else {})
    monkeypatch.setattr(shutil, "which", paths.get)
    monkeypatch.setattr(sys, "platform", platform)
    serves = ["python", "-m", "http.server", "--directory", str(page.parent)]
    words = serves if opener is None else [opener, str(page)]
    shown = next_commands(page, tmp_path)
    assert shlex.join(words) in shown
    assert ("http.server" in shown) is (opener is None)
