"""The table: by hand on small results that are written as the evaluation writes them."""

import csv
import dataclasses
import html
import io
import json
import re
from pathlib import Path

import pytest
import yaml

from moe_finetune.errors import EvaluationError, StudyError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.study import expand, load_results, load_study
from moe_finetune.study.folder import prepare, run_folder
from moe_finetune.study.page import write_page
from moe_finetune.study.render import to_csv, to_text
from moe_finetune.study.table import Table, make_table

BASE = {"model": {"path": "some/model"}, "data": {"train": "a.jsonl"}}


def _metric(task: str) -> str:
    return "word_perplexity" if task == "wikitext" else "acc"


def write_run(
    output: Path,
    run,
    tasks: dict[str, list[float]],
    loss: float | None = None,
    logged: list[dict] | None = None,
) -> None:
    """A finished run whose items of each task have these values; ``logged`` are further lines."""
    folder = run_folder(output, run.name).path
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(run.recipe.to_yaml())
    row = {"kind": "train", "step": 1} | ({} if loss is None else {"loss": loss})
    lines = [row, *({"kind": "train", **line} for line in logged or [])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for name, values in tasks.items():
        samples = folder / "eval" / "tasks" / name / "samples.jsonl"
        samples.parent.mkdir(parents=True)
        lines = [
            {"task": name, "item": f"{name}{i}", "prompt_sha256": f"p{i}", "filter": "none",
             "metrics": {_metric(name): value}}
            for i, value in enumerate(values)
        ]  # fmt: skip
        samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found[name] = {
            "task": name, "metric": _metric(name), "filter": "none", "n": len(values),
            "stderr": None,
            "value": sum(values) / len(values), "samples": f"tasks/{name}/samples.jsonl",
        }  # fmt: skip
    results = {"schema": 1, "complete": True, "unfinished": [], "tasks": found}
    if tasks:
        (folder / "eval" / "results.json").write_text(json.dumps(results))
    RunFolder(folder).finish()


@pytest.fixture
def made(tmp_path):
    """A study's folder with results by ``(arm, seed)``; those left out are missing."""

    def make(results: dict, **values) -> Table:
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump({"base": BASE, **values}, sort_keys=False))
        study = load_study(file)
        runs, output = expand(study), tmp_path / "out"
        prepare(study, runs, output, resume=False)
        for run in runs:
            if (run.arm, run.seed) in results:
                write_run(output, run, *results[run.arm, run.seed])
        return make_table(load_results(output))

    return make


ITEMS = {  # accuracy of each arm by model: aux .5 .25, erc .75 .5, dpp .5 .75
    "m1-aux_loss": [1, 1, 0, 0], "m1-erc": [1, 1, 1, 0], "m1-dpp": [1, 1, 0, 0],
    "m2-aux_loss": [1, 0, 0, 0], "m2-erc": [1, 1, 0, 0], "m2-dpp": [1, 1, 1, 0],
}  # fmt: skip
GRID = {
    "axes": {
        "model": {"m1": {"model": {"path": "a/one"}}, "m2": {"model": {"path": "a/two"}}},
        "method": ["aux_loss", "erc", "dpp"],
    },
    "baseline": "aux_loss",
}


def test_ranks_gains_and_best_by_hand(made):
    table = made({(arm, 1): ({"acc": v},) for arm, v in ITEMS.items()}, seeds=[1], **GRID)
    assert [group.name for group in table.groups] == ["m1", "m2"]
    best = {(g.name, row.label): row.cells["acc"].best for g, row in table.rows}
    assert [key for key, is_best in best.items() if is_best] == [("m1", "erc"), ("m2", "dpp")]
    # m1: erc first, the others share 2 and 3; m2: dpp, erc, aux
    assert table.ranks == {"aux_loss": (2.5 + 3) / 2, "erc": (1 + 2) / 2, "dpp": (2.5 + 1) / 2}
    assert table.gains == pytest.approx(
        {"erc": ((0.75 / 0.5 - 1) + (0.5 / 0.25 - 1)) / 2, "dpp": (0 + (0.75 / 0.25 - 1)) / 2}
    )
    assert "one seed" in " ".join(table.notes)
    assert table.won == {"aux_loss": 0, "erc": 1 / 2, "dpp": 1 / 2}


def test_arms_that_tie_share_a_benchmark_won(made):
    table = made(
        {
            ("aux_loss", 1): ({"a": [1, 0], "b": [0, 0]},),
            ("erc", 1): ({"a": [0, 1], "b": [1, 0]},),
            ("dpp", 1): ({"a": [0, 0], "b": [0, 0]},),
        },
        axes={"method": ["aux_loss", "erc", "dpp"]}, seeds=[1],
    )  # fmt: skip
    assert table.won == {"aux_loss": 1 / 4, "erc": 3 / 4, "dpp": 0}
    assert re.search(r"erc .* 75\.0 %", to_text(table))


def test_the_average_is_over_the_benchmarks_of_a_row(made):
    """Two groups share a row; seed 2 lacks a benchmark, so it has no average."""
    groups = {"math": {"lora": {"rank": 4}}, "code": {"lora": {"rank": 8}}}
    results = {
        ("aux_loss-math", 1): ({"gsm8k": [1, 0, 0, 0], "aime": [1, 1]}, 1.0),
        ("aux_loss-code", 1): ({"mbpp": [0, 1]}, 3.0),
        ("aux_loss-math", 2): ({"gsm8k": [1, 1, 0, 0], "aime": [1, 1]}, 1.0),
        ("erc-math", 1): ({"gsm8k": [1, 1, 1, 0], "aime": [0, 1]}, 2.0),
        ("erc-code", 1): ({"mbpp": [1, 1]}, 8.0),
    }
    options = {
        "axes": {"method": ["aux_loss", "erc"], "group": groups}, "seeds": [1, 2],
        "baseline": "aux_loss", "together": ["group"], "metrics": {"average": "higher"},
    }  # fmt: skip
    table = made(results, **options)
    aux, erc = (row.cells["average"] for _, row in table.rows)
    assert aux.values == {1: pytest.approx((0.25 + 1 + 0.5) / 3)}
    assert erc.values == {1: pytest.approx((0.75 + 0.5 + 1) / 3)}
    assert erc.test.difference == pytest.approx((0.5 - 0.5 + 0.5) / 3)
    assert [column.name for column in table.columns] == ["gsm8k", "aime", "mbpp", "average"]
    assert "average" not in {c.name for c in table.columns if c.benchmark}, "no rank of its own"


def test_an_average_over_other_directions_is_refused(made, tmp_path):
    both = {("base", 1): ({"acc": [1, 0], "wikitext": [9.0, 8.0]},)}
    table = made(both, axes={}, seeds=[1], metrics={"average": "higher"}, benchmarks=["acc"])
    assert table.groups[0].rows[0].cells["average"].mean == 0.5
    every = dataclasses.replace(load_results(tmp_path / "out"), benchmarks=None)
    with pytest.raises(StudyError, match="average: acc, wikitext differ in direction or unit"):
        make_table(every)


def test_holm_over_the_whole_table(made):
    """Two arms, two models: the least p is multiplied by 4, and a large difference survives."""
    n = 30
    results = {
        ("m1-aux_loss", 1): ({"acc": [0] * n},), ("m1-erc", 1): ({"acc": [1] * n},),
        ("m1-dpp", 1): ({"acc": [1] * 6 + [0] * (n - 6)},),
        ("m2-aux_loss", 1): ({"acc": [1] * n},), ("m2-erc", 1): ({"acc": [0] * n},),
        ("m2-dpp", 1): ({"acc": [1] * n},),
    }  # fmt: skip
    table = made(results, seeds=[1], **GRID)
    tests = {(g.name, r.label): r.cells["acc"].test for g, r in table.rows if not r.baseline}
    p = 2 * 0.5**n
    assert tests["m1", "erc"].p == pytest.approx(p)
    assert tests["m1", "erc"].p_holm == pytest.approx(4 * p)
    assert tests["m2", "erc"].p_holm == pytest.approx(4 * p), "not less than a smaller p"
    assert tests["m1", "dpp"].p == pytest.approx(2 * 0.5**6)
    assert tests["m1", "dpp"].p_holm == pytest.approx(2 * 2 * 0.5**6)
    verdicts = {key: test.verdict for key, test in tests.items()}
    assert verdicts == {
        ("m1", "erc"): "better", ("m2", "erc"): "worse", ("m1", "dpp"): "unclear",
        ("m2", "dpp"): "unclear",
    }  # fmt: skip


def test_a_benchmark_where_lower_is_better(made):
    """Perplexity over the same items, two lower each: better, best, ranked first, a gain."""
    worse = [9.0, 12.0, 11.0, 10.5, 8.0, 13.0, 9.5, 10.0, 12.5, 11.5]
    better = [value - 2 for value in worse]
    results = {("aux_loss", 1): ({"wikitext": worse},), ("erc", 1): ({"wikitext": better},)}
    axes = {"method": ["aux_loss", "erc"]}
    table = made(results, axes=axes, seeds=[1], baseline="aux_loss")
    aux, erc = (row.cells["wikitext"] for _, row in table.rows)
    assert table.columns[0].better == "lower"
    assert erc.test.verdict == "better" and erc.best and not aux.best
    assert table.ranks == {"aux_loss": 2.0, "erc": 1.0}
    assert table.gains["erc"] == pytest.approx(aux.mean / erc.mean - 1)


def test_mean_and_spread_over_seeds_and_lower_is_better(made):
    losses = {("aux_loss", 1): 3.0, ("aux_loss", 2): 5.0, ("erc", 1): 2.0, ("erc", 2): 4.5}
    table = made(
        {key: ({}, loss) for key, loss in losses.items()},
        axes={"method": ["aux_loss", "erc"]}, seeds=[1, 2], baseline="aux_loss",
        metrics={"loss": "lower"},
    )  # fmt: skip
    aux, erc = (row.cells["loss"] for _, row in table.rows)
    assert (aux.mean, aux.std) == (4.0, pytest.approx(2**0.5))
    assert (erc.mean, erc.best, aux.best) == (3.25, True, False)
    assert (erc.test.name, erc.test.difference) == ("paired t", -0.75)
    assert table.ranks == {} and table.gains == {}


def test_perplexity_and_distance_of_curves_by_hand(tmp_path):
    """MaxVio's curve against that of erc, over the steps that both logged."""
    values = {
        "base": BASE, "seeds": [1], "axes": {"method": ["aux_loss", "erc", "dpp"]},
        "curves": "erc", "metrics": {"max_violation_rmse": "lower", "perplexity": "lower"},
    }  # fmt: skip
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    study = load_study(tmp_path / "study.yaml")
    runs, output = expand(study), tmp_path / "out"
    prepare(study, runs, output, resume=False)
    curves = {"aux_loss": [1.0, 3.0, 9.0], "erc": [2.0, 1.0], "dpp": [2.0, 5.0]}
    for number, run in enumerate(runs):
        if run.arm == "dpp":
            continue  # the table of an unfinished study
        write_run(output, run, {})
        rows = [
            {"kind": "train", "step": step, "routing/max_violation": value}
            for step, value in enumerate(curves[run.arm])
        ] + [{"kind": "eval", "step": 3, "eval_loss": 1.0 + number}]
        folder = run_folder(output, run.name).path
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        RunFolder(folder).finish()
    found = {row.label: row.cells for _, row in make_table(load_results(output)).rows}
    assert found["aux_loss"]["max_violation_rmse"].mean == pytest.approx(((1 + 4) / 2) ** 0.5)
    assert found["erc"]["max_violation_rmse"].mean == 0
    assert found["erc"]["perplexity"].mean == pytest.approx(2.718281828**2)


def test_curves_of_perplexity_of_validation_routing_and_of_the_average(made, tmp_path):
    """Training's routing before validation's; the average where every benchmark was scored."""
    logged = [
        {"step": 2, "eval_loss": 1.5, "eval_routing/activation_cosine": 0.25},
        {"step": 4, "eval_loss": 0.5, "eval_routing/activation_cosine": 0.125,
         "routing/entropy": 0.75, "eval_routing/entropy": 0.5},
    ]  # fmt: skip
    made({("base", 1): ({"a": [1, 0], "b": [1, 1]}, 0.5, logged)}, axes={}, seeds=[1])
    (run,) = load_results(tmp_path / "out").runs
    for step, (a, b) in {2: (0.25, 0.75), 3: (0.5, None)}.items():
        folder = run.folder / "steps" / str(step) / "eval"
        folder.mkdir(parents=True)
        tasks = {"a": {"value": a}, **({} if b is None else {"b": {"value": b}})}
        folder.joinpath("results.json").write_text(
            json.dumps({"schema": 1, "complete": True, "tasks": tasks})
        )
    (run,) = load_results(tmp_path / "out").runs
    assert run.curve("perplexity") == {2: pytest.approx(2.718281828**1.5),
                                       4: pytest.approx(2.718281828**0.5)}  # fmt: skip
    assert run.curve("activation_cosine") == {2: 0.25, 4: 0.125}
    assert run.curve("entropy") == {4: 0.75}
    assert run.curve("average") == {2: 0.5, 4: 0.75}, "step 3 lacks a benchmark"


def test_runs_that_share_a_row(made):
    """Benchmarks of one row come from the runs of different groups; metrics are averaged."""
    groups = {"math": {"lora": {"rank": 4}}, "code": {"lora": {"rank": 8}}}
    results = {
        ("aux_loss-math", 1): ({"gsm8k": [1, 0, 0]}, 1.0),
        ("aux_loss-code", 1): ({"mbpp": [0, 0]}, 3.0),
        ("erc-math", 1): ({"gsm8k": [1, 1, 0]}, 2.0),
        ("erc-code", 1): ({"mbpp": [1, 0]}, 8.0),
    }
    options = {
        "axes": {"method": ["aux_loss", "erc"], "group": groups}, "seeds": [1],
        "baseline": "aux_loss", "together": ["group"], "metrics": {"loss": "lower"},
    }  # fmt: skip
    table = made(results, **options)
    assert [row.label for _, row in table.rows] == ["aux_loss", "erc"]
    erc = table.groups[0].rows[1].cells
    assert erc["gsm8k"].mean == pytest.approx(2 / 3) and erc["mbpp"].mean == 0.5
    assert erc["loss"].mean == 5.0
    assert erc["mbpp"].test.difference == 0.5
    assert table.gains == {"erc": None}, "a baseline of 0 has no relative gain"


def test_two_runs_of_a_row_with_the_same_benchmark_are_refused(made):
    both = {("g1", 1): ({"acc": [1]},), ("g2", 1): ({"acc": [0]},)}
    axes = {"group": {"g1": {"lora": {"rank": 4}}, "g2": {"lora": {"rank": 8}}}}
    with pytest.raises(StudyError, match="several runs of a row have the benchmark 'acc'"):
        made(both, axes=axes, seeds=[1], together=["group"])


def test_what_is_missing_is_noted_and_the_rest_is_there(made):
    some = {(arm, 1): ({"acc": v},) for arm, v in ITEMS.items() if arm != "m1-aux_loss"}
    table = made(some, seeds=[1], **GRID)
    assert "m1: the baseline has no finished run yet" in table.notes
    assert "m1-aux_loss seed 1 is missing" in table.notes
    assert table.groups[0].rows[0].cells["acc"].test is None
    assert table.groups[1].rows[1].cells["acc"].test is not None


def test_other_items_or_names_are_refused(made):
    results = {("aux_loss", 1): ({"acc": [1, 0]},), ("erc", 1): ({"acc": [1, 0, 1]},)}
    grid = {"axes": {"method": ["aux_loss", "erc"]}, "seeds": [1], "baseline": "aux_loss"}
    with pytest.raises(EvaluationError, match="acc: the results cover other items"):
        made(results, **grid)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("benchmarks", ["ac"], "benchmarks: no run has 'ac'; did you mean 'acc'"),
        ("metrics", {"los": "lower"}, "metrics: no run has 'los'; did you mean 'loss'"),
    ],
)
def test_an_unknown_column_is_refused(made, key, value, message):
    with pytest.raises(StudyError, match=message):
        made({("base", 1): ({"acc": [1]}, 0.5)}, axes={}, seeds=[1], **{key: value})


def test_every_form_says_the_same(made, tmp_path):
    n = 30
    results = {
        ("aux_loss", 1): ({"acc_x": [0] * n},), ("aux_loss", 2): ({"acc_x": [0] * n},),
        ("erc", 1): ({"acc_x": [1] * n},), ("erc", 2): ({"acc_x": [1] * (n - 3) + [0] * 3},),
    }  # fmt: skip
    table = made(
        results, axes={"method": ["aux_loss", "erc"]}, seeds=[1, 2], baseline="aux_loss",
        title="50 % & more",
    )  # fmt: skip
    spread = 100 * 0.1 / 2**0.5
    shown = f"95.00 ± {spread:.2f}"
    assert re.search(rf"erc +{re.escape(shown)}\* \(best\)", to_text(table))
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [row["label"] for row in rows] == ["aux_loss", "erc"]
    assert float(rows[1]["mean"]) == pytest.approx(0.95) and rows[1]["verdict"] == "better"
    assert [row["best"] for row in rows] == ["0", "1"]
    page = write_page(load_results(tmp_path / "out"), table, tmp_path / "p.html").read_text()
    assert f"<strong>{shown}*</strong>" in page and "50 % &amp; more" in page


def test_pictures_show_the_means_and_the_curves_of_every_arm(made, tmp_path):
    """Two models apart; an arm's line is the mean of its seeds where both logged."""
    arms = [f"{model}-{method}" for model in ("m1", "m2") for method in ("aux_loss", "erc")]

    def logged(place: int, seed: int) -> list[dict]:
        steps = range(2, 7 if seed == 1 else 6)  # seed 2 ends a step before
        return [{"step": s, "max_violation": (0.25 * place + 0.125 * seed) / s} for s in steps]

    results = {
        (arm, seed): (
            {"acc_x": [1.0] * (place + seed) + [0.0] * (9 - place - seed)},
            0.5,
            logged(place, seed),
        )
        for place, arm in enumerate(arms)
        for seed in (1, 2)
    }
    table = made(
        results,
        axes={
            "model": {"m1": {"model": {"path": "a/b"}}, "m2": {"model": {"path": "c/d"}}},
            "method": ["aux_loss", "erc"],
        },
        seeds=[1, 2],
        baseline={"method": "aux_loss"},
        metrics={"max_violation": "lower"},
    )
    page = write_page(load_results(tmp_path / "out"), table, tmp_path / "p.html").read_text()
    drawn = [json.loads(html.unescape(d)) for d in re.findall(r'data-lines="([^"]+)"', page)]
    assert len(drawn) == 2, "a picture of curves for each model"
    erc = drawn[1]["series"][1]
    assert (erc["label"], erc["x"]) == ("erc", [2, 3, 4, 5])
    mean = 0.75 + 0.125 * 1.5
    assert erc["y"] == pytest.approx([mean / step for step in (2, 3, 4, 5)], rel=1e-3)
    dots = re.findall(r'data-tip="([^"]+)"', page)
    assert len(dots) == 2 * (2 + 2), "two models, two arms: a benchmark and a metric"
    assert "erc: 0.278 ± 0.0786" in dots, "2 and 3 of 9"
