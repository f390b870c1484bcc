"""The page in a real browser: quiet, readable, usable by keyboard, and it shows what it was given.

One browser process and one page for all checks.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_finetune.report import write_report
from tests.report.folders import TASKS, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
SYSTEM = next(filter(None, map(shutil.which, NAMES)), None)
OVERLAPS = """() => {
  const name = (node) => `${node.tagName}.${node.getAttribute("class") ?? ""} ${node.textContent.slice(0, 40)}`;
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const all = (what) => [...document.querySelectorAll(what)], found = [];
  const words = (cell) => { const range = document.createRange(); range.selectNodeContents(cell); return range.getBoundingClientRect(); };
  const groups = [
    ...all("svg.plot").map((svg) => [...svg.querySelectorAll(":scope > text")].map((t) => [t, t.getBoundingClientRect()])),
    ...all(".cards, .grid, .panels, .pair, .group, .slider, .filters, main, header, .card, .panel, .head, .legend, .key, .lede")
      .map((box) => [...box.children].map((child) => [child, child.getBoundingClientRect()])),
    ...all("tr").map((row) => [...row.cells].map((cell) => [cell, words(cell)])),
  ];
  for (const group of groups) {
    const boxes = group.filter(([, box]) => box.width && box.height);
    boxes.forEach(([a, box], i) => boxes.slice(i + 1).forEach(([b, other]) => {
      // the first cell of a row stays in its place when the table is scrolled
      if (meets(box, other)) found.push(`${name(a)} | ${name(b)}`);
    }));
  }
  for (const text of all("svg.plot > text")) {
    const box = text.getBoundingClientRect(), card = text.closest(".card").getBoundingClientRect();
    if (box.width && (box.left < card.left || box.right > card.right || box.bottom > card.bottom || box.top < card.top)) found.push(`outside its card: ${name(text)}`);
  }
  for (const node of all("body *")) {
    if (!node.closest(".scroll, pre, nav, .skip, #tip") && node.getBoundingClientRect().right > innerWidth + 1) found.push(`wider than the page: ${name(node)}`);
  }
  return found;
}"""  # noqa: E501


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """The page of two runs, one with a long name, as a browser has it, all unfolded."""
    root = tmp_path_factory.mktemp("pages")
    names = ("aux_loss", "coupling_specialization_at_double_strength")
    runs = [write_run(root / n, i, preset=n, lift=0.07 * i) for i, n in enumerate(names)]
    file = write_report(runs, root / "page.html")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=SYSTEM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium ('make test' installs it): {error}")
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        yield SimpleNamespace(page=page, file=file, runs=runs, said=said, asked=asked)
        browser.close()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "dark"), (400, "light")]
)
def test_nothing_overlaps_and_nothing_is_out_of_reach(shown, width, scheme):
    shown.page.set_viewport_size({"width": width, "height": 1000})
    shown.page.emulate_media(color_scheme=scheme)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.page.evaluate(OVERLAPS) == []
    ground = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 600) == (scheme == "light")
    if (width, scheme) in ((1400, "light"), (400, "dark")):
        found = axe.Axe().run(shown.page).response["violations"]
        worst = {v["id"]: [n["target"] for n in v["nodes"]] for v in found
                 if v["impact"] in ("serious", "critical")}  # fmt: skip
        assert worst == {}


def test_a_phone_has_the_difference_in_view_and_the_sections_folded(shown):
    for width, is_open in ((400, False), (1280, True)):
        page = shown.page.context.browser.new_page(viewport={"width": width, "height": 800})
        page.goto(shown.file.as_uri())
        parts = page.locator("details.part")
        assert parts.count() >= 6
        assert set(parts.evaluate_all("all => all.map((part) => part.open)")) == {is_open}
        for table in page.locator("#answer > .group table").all():
            box = table.locator("tbody td").first.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        page.locator("nav a[href='#curves']").click()
        page.locator("#curves svg.plot").first.wait_for(state="visible")
        page.close()


def test_the_checks_see_what_is_wrong(shown):
    page = shown.page.context.browser.new_page(viewport={"width": 400, "height": 300})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.set_content(
        "<html lang=en><title>t</title><div class=key><p style='width:500px;margin:0'>one</p>"
        "<p style='margin-top:-9px'>two</p><img src=data:></div><script>nowhere()</script>"
    )
    found = page.evaluate(OVERLAPS)
    assert any("one | P. two" in line for line in found)
    assert any("wider than the page: P. one" in line for line in found)
    assert said == ["nowhere is not defined"]
    ids = {v["id"] for v in axe.Axe().run(page).response["violations"]}
    assert "image-alt" in ids
    page.close()


def load_of(run: Path, name: str, line: int = 0) -> np.ndarray:
    """Relative load by layer and expert, from a file of the run's routing."""
    found = json.loads((run / "routing" / name).read_text().splitlines()[line])
    load_LE = np.array(found["load"], float)
    return load_LE / load_LE.mean(1, keepdims=True)


def test_the_slider_goes_through_the_training_by_keyboard(shown):
    page = shown.page
    figure = page.locator("#routing figure").first
    bar, maps = figure.locator("input[type=range]"), figure.locator("svg[data-cells]")
    second = shown.runs[1]
    bar.focus()
    for key, place, load_LE in (
        ("Home", "before fine-tuning", load_of(second, "before.json")),
        ("ArrowRight", "step 100", load_of(second, "steps.jsonl", 0)),
        ("ArrowRight", "step 200", load_of(second, "steps.jsonl", 1)),
        ("End", "after fine-tuning", load_of(second, "after.json")),
    ):
        bar.focus()
        page.keyboard.press(key)
        assert bar.get_attribute("aria-valuetext") == place
        assert figure.locator("output").inner_text() == place
        violation = (load_LE.max(1) - 1).mean()
        note = figure.locator(".panel .note").nth(1).inner_text()
        assert note.startswith("MaxVio ") and float(note[7:]) == pytest.approx(violation, rel=6e-3)
        maps.nth(1).focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowRight")
        told, value = page.locator("#tip").inner_text().split("\n")
        column = int(told.removeprefix("layer 0, expert "))
        assert float(value.split()[0]) == pytest.approx(load_LE[0, column], abs=2e-3)
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
    # the more load, the brighter
    painted = page.evaluate(
        """async (svg) => {
          const image = new Image();
          image.src = svg.querySelector("image").getAttribute("href");
          await image.decode();
          const canvas = document.createElement("canvas");
          canvas.width = image.width; canvas.height = image.height;
          const context = canvas.getContext("2d");
          context.drawImage(image, 0, 0);
          const pixels = context.getImageData(0, 0, image.width, image.height);
          return [image.width, image.height, ...pixels.data];
        }""",
        maps.nth(1).element_handle(),
    )  # fmt: skip
    after_LE = load_of(second, "after.json")
    assert painted[:2] == [16, 4]
    colors = np.array(painted[2:]).reshape(4, 16, 4)
    rising = colors[..., :3].sum(-1).ravel()[np.argsort(after_LE, axis=None)]
    assert np.diff(rising).min() > -6 and rising[-1] > rising[0] + 100


def test_tokens_are_filtered_by_text_and_by_expert(shown):
    box = shown.page.locator(".filtered")
    rows = box.locator("tbody tr:visible")
    every = rows.count()
    box.locator("input").fill("DE")
    assert rows.locator("code").all_inner_texts() == ["def␣"]
    assert box.locator(".filters output").inner_text() == f"1 of {every} tokens"
    box.locator("input").fill("")
    takers: dict[str, set[str]] = {}
    for file in (shown.runs[0] / "routing" / "before.json",
                 *(run / "routing" / "after.json" for run in shown.runs)):  # fmt: skip
        text = json.loads(file.read_text())["colored_text"][0]
        for token, taken in zip(text["tokens"], text["selected"], strict=True):
            for expert in taken:
                takers.setdefault(str(expert), set()).add(token)
    rarest = min(takers, key=lambda expert: len(takers[expert]))
    box.locator("select").select_option(rarest)
    told = {text.replace("␣", " ") for text in rows.locator("code").all_inner_texts()}
    assert told == takers[rarest] and len(told) < every
    box.locator("select").select_option("")


def test_tables_sort_and_charts_read_out_by_keyboard(shown):
    page = shown.page
    table = page.locator("#answer table.sortable")
    tasks = sorted([*TASKS, "wikitext"])
    for order, sense in ((tasks, "ascending"), (tasks[::-1], "descending")):
        table.locator("thead button").first.press("Enter")
        keys = table.locator("tbody tr").evaluate_all(
            "rows => rows.map(r => r.cells[0].dataset.key)"
        )
        assert keys == order
        assert table.locator("thead th").first.get_attribute("aria-sort") == sense
    page.locator("#curves svg[data-lines]").first.press("ArrowLeft")
    told = page.locator("#tip").inner_text().split("\n")
    assert told[0] == "step 295" and told[1].startswith("aux_loss: ")
    first = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != first
    page.locator("#theme").press("Enter")


def test_the_page_is_quiet_small_and_alone(shown):
    assert shown.said == []
    assert [url for url in shown.asked if not url.startswith("data:")] == [shown.file.as_uri()]
    assert shown.file.stat().st_size < 2_000_000
    unnamed = shown.page.locator("svg[role=img]:not([aria-label])").count()
    assert unnamed == 0
