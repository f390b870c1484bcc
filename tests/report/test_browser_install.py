"""A browser for the tests of the page: installed where nobody has to be asked, else named."""

from __future__ import annotations

import os

import pytest

from tests import browser

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without a browser, whose only programs are those that a test writes here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("PLAYWRIGHT_DOWNLOAD_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_chromium_is_installed_with_the_systems_packages(bare):
    made = f"if [ $1 = install ]; then echo > {bare}/chromium; /bin/chmod +x {bare}/chromium; fi"
    program(bare, "apt-get", made)
    assert browser.ensure_browser() == "chromium installed with apt-get, so that the page is tested"
    assert browser.ensure_browser() == ""


def test_what_cannot_be_installed_is_named(bare, monkeypatch):
    monkeypatch.setattr(browser, "SECONDS", 1)  # it would try again and again
    program(bare, "apt-get", "echo no network >&2; exit 100")
    assert browser.ensure_browser() == (
        "no Chromium here ('apt-get update' says no network), so the page will not be tested; "
        "install it: apt-get update && apt-get install -y chromium"
    )
