"""The README's picture: the top of a report's page in a browser.

python docs/site/report_picture.py runs/demo/report/index.html recipes/demo/report.png
"""

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SIZE = {"width": 1180, "height": 1000}


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="a report's HTML file")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(given.page.resolve().as_uri())
        end = page.locator("#answer").bounding_box()
        assert end is not None, "the page has no answer"
        clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": end["y"] + end["height"]}
        page.screenshot(path=given.picture, clip=clip, full_page=True)
        browser.close()
    Image.open(given.picture).convert("P", palette=Image.Palette.ADAPTIVE).save(
        given.picture, optimize=True
    )


if __name__ == "__main__":
    main()
