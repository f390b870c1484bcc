"""The page: structure, words from the data, escaping, size, and what is missing."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moe_finetune.errors import OutputError, OutputExistsError
from moe_finetune.evaluation.score import compare_scores
from moe_finetune.evaluation.statistics import holm
from moe_finetune.report import write_report
from moe_finetune.report.context import Report, Section
from moe_finetune.report.markup import VOID, Markup, tag
from moe_finetune.report.page import render_page
from moe_finetune.report.read_runs import read_runs
from moe_finetune.report.score_differences import difference
from moe_finetune.report.sections.text import token_consistency
from tests.report.folders import routing, write_run

SECTION_IDS = ["answer", "routing", "specialization", "curves", "scores", "settings",
               "environment", "reproduce"]  # fmt: skip


class Page(HTMLParser):
    """Elements with their attributes, and the text outside script and style."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def _page(paths: list[Path], out: Path, **kwargs) -> tuple[str, Page]:
    text = write_report(paths, out, **kwargs).read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    presets = ["aux_loss", "orthogonal_variance", "erc", "coupling", "dpp"]
    return [
        write_run(root / name, i, preset=name, lift=0.1 * i, evenness=3 + 2 * i, base=i == 0)
        for i, name in enumerate(presets)
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_structure(runs: list[Path], tmp_path: Path, count: int):
    text, page = _page(runs[:count], tmp_path / "page.html")
    assert text.startswith('<!doctype html>\n<html lang="en">')
    for landmark in ("header", "nav", "main", "footer"):
        assert len(page.all(landmark)) >= 1
    assert len(page.all("main")) == len(page.all("h1")) == 1
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert [i for i in ids if i in SECTION_IDS] == SECTION_IDS
    links = [a["href"] for a in page.all("a")]
    assert all(link[1:] in ids for link in links if link.startswith("#"))
    assert links[0] == "#main"  # the skip link comes first
    for name, attributes in page.elements:
        if name == "th":
            assert attributes["scope"] in ("col", "row")
        if name == "svg" and attributes.get("role") == "img":
            assert "tabindex" in attributes or "data-lines" not in attributes
        if name == "button":
            assert attributes["type"] == "button"
    for run in runs[:count]:
        assert run.name in page.text
    # Nothing comes from elsewhere.
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:"))
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    assert "url(" not in style and "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_every_picture_has_words(runs: list[Path], tmp_path: Path):
    text, page = _page(runs[:2], tmp_path / "page.html")
    pictures = re.findall(r'<svg[^>]*role="img"[^>]*>(.{0,40})', text)
    assert len(pictures) > 30
    start = re.compile(r"<title>[^<]")
    assert all(start.match(words) for words in pictures)
    named = len(
        re.findall(r'<svg[^>]*role="img"[^>]*><title>[^<]+</title><desc>[^<]+</desc>', text)
    )
    assert named == len(pictures)
    assert len(page.all("caption")) == len(page.all("table"))
    assert len(page.all("figcaption")) == len(page.all("figure"))


def test_size_of_a_large_report(tmp_path: Path):
    folders = [
        write_run(tmp_path / f"r{i}", i, layers=48, experts=128, steps=2000) for i in range(5)
    ]
    page = write_report(folders, tmp_path / "page.html")
    assert page.stat().st_size <= 2_000_000


def test_title_of_the_load_says_what_happened(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "routing").mkdir(parents=True)
    loads = {"before": [[10, 0, 2], [4, 4, 4]], "after": [[4, 3, 5], [4, 4, 4]]}
    for name, load in loads.items():
        data = {"layers": [1, 2], "num_experts": 3, "load": load}
        (folder / "routing" / f"{name}.json").write_text(json.dumps(data))
    _, page = _page([folder], tmp_path / "page.html")
    # MaxVio before: layer 1 (10 - 4) / 4 = 1.5, layer 2: 0; after: 0.25 and 0
    assert "The load became more even in run: MaxVio 0.750 → 0.125" in page.text
    assert "MaxVio −83\u00a0% (0.750 → 0.125)" in page.text


def test_verdicts_on_the_page(runs: list[Path], tmp_path: Path):
    """They are corrected over every difference on it: with the baseline, and with before."""
    baseline, run = read_runs(runs[:2])
    tests = {
        (other, label, task): compare_scores([references[task]], [score])
        for label, shown in (("baseline", baseline), ("run", run))
        for other, references in (("base", shown.base_scores), ("baseline", baseline.scores))
        for task, score in shown.scores.items()
        if task in references and (other, label) != ("baseline", "baseline")
    }
    corrected = holm([test.p for test in tests.values()])
    clear = {key for key, p in zip(tests, corrected, strict=True) if p < 0.05}
    better = [task for task in run.scores if ("baseline", "run", task) in clear]
    alone = [
        t for t, s in run.scores.items() if difference(baseline.scores[t], s).verdict != "unclear"
    ]
    assert better and set(better) < set(alone)
    _, page = _page(runs[:2], tmp_path / "page.html")
    scores = re.search(r"Scoresbetter on (.*?); no clear difference", page.text).group(1)
    assert re.findall(r"(\w+) \(\+[\d.]+ pp, 95\xa0% interval \[", scores) == better
    assert page.text.count("▲ better") == len(better)


def test_everything_is_escaped(tmp_path: Path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    folder = write_run(tmp_path / "run", preset=evil)
    data = routing(np.random.default_rng(0))
    data["colored_text"][0]["tokens"][0] = evil
    data["domains"] = {evil: data["load"], "other": data["load"]}
    data["metrics"][evil] = {"mean": 1.5}
    (folder / "routing" / "after.json").write_text(json.dumps(data))
    results = {"tasks": {evil: {"metric": evil, "value": 0.5, "notes": [evil]}}, "backend": evil,
               "notes": [evil]}  # fmt: skip
    (folder / "eval" / "results.json").write_text(json.dumps(results))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": evil, "step": 3, evil: 1.0, "note": evil}) + "\n")
    _, page = _page([folder, folder], tmp_path / "page.html", title=evil, labels=[evil, f"{evil}2"])
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "alert(1)" in page.text


def test_secrets_are_hidden(runs: list[Path], tmp_path: Path):
    text, page = _page(runs[:1], tmp_path / "page.html")
    assert "hf_secret" not in text
    assert "(hidden)" in page.text
    encoded = re.search(r'href="data:text/yaml;base64,([^"]+)"', text).group(1)
    recipe = base64.b64decode(encoded).decode()
    assert "hf_secret" not in recipe
    assert "max_length: 256" in recipe


def test_missing_parts_are_named(tmp_path: Path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    _, page = _page([folder], tmp_path / "page.html")
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert "missing" in ids
    assert not {"scores", "routing", "specialization", "settings"} & set(ids)
    for what in ("Scores", "Routing pictures", "Settings", "Environment"):
        assert f"{what}: " in page.text
    assert "Training loss2.50 → 2.50" in page.text
    assert "plot" not in {a.get("class") for a in page.all("svg")}  # one point is no curve


def test_nan_and_null_are_dashes(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(
        "".join(f'{{"kind": "train", "step": {step}, "loss": NaN}}\n' for step in (1, 2, 3))
    )
    data = json.loads((folder / "routing" / "after.json").read_text())
    data["metrics"]["silhouette"] = {"per_layer": [None] * 4, "mean": None}
    (folder / "routing" / "after.json").write_text(json.dumps(data))
    results = {"tasks": {"a": {"metric": "acc", "value": None, "stderr": None, "n": None}}}
    (folder / "eval" / "results.json").write_text(json.dumps(results))
    text, page = _page([folder], tmp_path / "page.html")
    assert "Training loss: no finite value" in page.text
    assert re.search(r"<th[^>]*>a<span[^>]*>acc</span></th><td[^>]*>–</td>", text)
    assert not re.search(r"\bnan\b", page.text, re.I)


def test_snapshots_without_expert_outputs_are_named(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    for file in folder.glob("routing/*.json"):
        shot = json.loads(file.read_text())
        del shot["coherence"]
        file.write_text(json.dumps(shot))
    _, page = _page([folder], tmp_path / "page.html")
    assert "Coherence against the barrier: the snapshots have no expert outputs" in page.text


def test_unknown_logged_keys_are_drawn(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"kind": "train", "step": s, "loss": 1.0 / s, "my_own": 3.0 * s} for s in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    _, page = _page([folder], tmp_path / "page.html")
    assert "My own rises in run: 3.00 → 24.0" in page.text


def test_two_runs_of_different_size_still_compare(tmp_path: Path):
    a = write_run(tmp_path / "a", 1, layers=3, experts=10)
    b = write_run(tmp_path / "b", 2, layers=5, experts=24)
    _, page = _page([a, b], tmp_path / "page.html")
    assert "Before · a" in page.text  # two checkpoints: two pictures before
    assert "Before · b" in page.text


def test_a_new_section_is_one_object(runs: list[Path]):
    def render(report: Report) -> Markup:
        return tag("p", f"{len(report.runs)} runs <&>")

    page = render_page(Report(read_runs(runs[:2]), "t"), [Section("mine", "Mine", render)])
    assert '<section id="mine" aria-labelledby="mine-title">' in page
    assert "<p>2 runs &lt;&amp;&gt;</p>" in page
    assert '<a href="#mine">Mine</a>' in page


def test_output(runs: list[Path], tmp_path: Path):
    folder = tmp_path / "out"
    folder.mkdir()
    assert write_report(runs[:1], folder) == folder / "index.html"
    assert write_report(runs[:1], folder) == folder / "index.html"  # a report is replaced
    assert write_report(runs[:1], tmp_path / "new" / "deep" / "a.html").exists()
    assert write_report(runs[:2], tmp_path / "report") == tmp_path / "report" / "index.html"
    other = tmp_path / "notes.html"
    other.write_text("<p>mine</p>")
    with pytest.raises(OutputExistsError, match=r"notes\.html: exists and is not a report"):
        write_report(runs[:1], other)
    assert other.read_text() == "<p>mine</p>"
    with pytest.raises(OutputError, match=r"notes\.html: is not a folder"):
        write_report(runs[:1], other / "below" / "a.html")
    assert sorted(p.name for p in folder.iterdir()) == ["index.html"]


def test_the_page_is_the_same_every_time(runs: list[Path], tmp_path: Path):
    first = write_report(runs[:2], tmp_path / "a.html").read_text()
    assert write_report(runs[:2], tmp_path / "b.html").read_text() == first


def test_what_the_pictures_rest_on_is_said(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    said = "These are tokens of the training data"
    assert said not in _page([run], tmp_path / "page.html")[1].text
    file = run / "routing" / "after.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "data": "train"}))
    assert said in _page([run], tmp_path / "page.html")[1].text


def test_consistency_counts_repeated_tokens_only():
    # a: 1, 1, 5 -> 2 of 3; b: 2, 6 -> 1 of 2; c occurs once
    assert token_consistency("abacab", [1, 2, 1, 3, 5, 6]) == pytest.approx(3 / 5)
    assert math.isnan(token_consistency("abc", [1, 2, 3]))
