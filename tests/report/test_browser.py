"""The page in a real browser: no error, nothing beside or over anything else, and it answers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_finetune.report import write_report
from tests.report.folders import TASKS, write_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
PROBE = Path(__file__).with_name("probe.js")


def _chromium(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            "--window-size=1500,1000",
            "--enable-logging=stderr",
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )


def _console(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture(scope="module", params=[1, 2, 5])
def page(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    sizes = {"layers": 26, "experts": 64} if request.param == 5 else {}
    names = ["aux_loss", "orthogonal_variance", "coupling_specialization_long", "erc", "dpp"]
    runs = [
        write_run(root / name, i, preset=name, lift=0.07 * i, evenness=2 + i, **sizes)
        for i, name in enumerate(names[: request.param])
    ]
    return write_report(runs, root / "page.html")


def test_the_console_check_can_fail(tmp_path: Path):
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><script>nowhere()</script><script src='gone.js'></script>")
    assert any("nowhere is not defined" in line for line in _console(_chromium(broken, tmp_path)))


def test_no_console_message(page: Path, tmp_path: Path):
    result = _chromium(page, tmp_path)
    assert _console(result) == []
    # the script ran under the page's own policy: it labels the button
    assert re.search(r'<button[^>]*id="theme"[^>]*>[☀☾]', result.stdout)


@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_and_behaviour(page: Path, tmp_path: Path, width: int, scheme: str):
    found = _probe(page, tmp_path, width, scheme)
    assert found["errors"] == []
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["wide"] == []
    assert found["overlaps"] == []
    assert found["unnamed"] == 0

    tasks = sorted([*TASKS, "wikitext"])
    assert found["sorted"] == {
        "up": tasks, "down": tasks[::-1], "first": "ascending", "second": "descending",
    }  # fmt: skip

    first, second, third = found["theme"]
    assert first == third != second
    bright = [int(c) for c in re.findall(r"\d+", first)[:3]]
    assert (sum(bright) > 600) == (scheme == "light")

    lines, cells = found["tips"]["lines"], found["tips"]["cells"]
    assert lines["shown"] == cells["shown"] == "visible"
    assert lines["hidden"] == cells["hidden"] == "hidden"
    assert lines["point"].startswith("step 5\n")
    assert lines["key"].startswith("step 10\n")
    before = json.loads((page.parent / "aux_loss" / "routing" / "before.json").read_text())
    load = before["load"][0]
    for told, expert in ((cells["point"], 0), (cells["key"], 1)):
        place, value = told.split("\n")
        assert place == f"layer 0, expert {expert}"
        share = load[expert] / (sum(load) / len(load))
        assert float(value.split(" ")[0]) == pytest.approx(share, abs=2e-3)


def _probe(page: Path, tmp_path: Path, width: int, scheme: str) -> dict:
    """Open the page in a frame of this width with the probe added, and return what it tells."""
    text = page.read_text(encoding="utf-8")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)
    assert policy is not None
    # the policy would rightly refuse the probe; without it the frame may run both scripts
    text = text.replace(policy.group(0), f"<script>{PROBE.read_text()}</script>")
    text = text.replace('<html lang="en">', f'<html lang="en" data-theme="{scheme}">')
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<!doctype html><meta charset=utf-8><pre id=found></pre><script>"
        "addEventListener('message', (event) => {"
        "document.getElementById('found').textContent = JSON.stringify(event.data); });"
        f'</script><iframe style="border:0;width:{width}px;height:900px" '
        f'srcdoc="{html.escape(text, quote=True)}"></iframe>',
        encoding="utf-8",
    )
    result = _chromium(frame, tmp_path / "profile", "--virtual-time-budget=20000")
    told = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.S)
    assert told is not None
    assert told.group(1), f"the probe said nothing: {_console(result)}"
    return json.loads(html.unescape(told.group(1)))
