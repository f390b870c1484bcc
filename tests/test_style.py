"""The words of `docs/style.md` that pages, messages, help texts and docstrings avoid."""

import ast
import re
from collections.abc import Iterator

from moe_finetune import metrics
from moe_finetune.losses import functional
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "style.md"
PAGES = [
    ROOT / "README.md",
    *(page for page in ROOT.glob("docs/**/*.md") if page != PAGE),
    *(
        page
        for folder in ("recipes", "eval")
        for page in sorted((ROOT / folder).rglob("*"))
        if page.suffix in (".md", ".yaml", ".sbatch") or page.name == "Dockerfile"
    ),
]


def banned(name: str) -> list[str]:
    """The entries in backticks of the first column of one of the page's lists."""
    rows = PAGE.read_text(encoding="utf-8").partition(f"<!-- {name} -->")[2].partition("<!--")[0]
    return [word for row in rows.splitlines() for word in re.findall(r"`(.+?)`", row)]


TICS = re.compile(rf"\b({'|'.join(banned('tics'))})\b".replace(" ", r"\s+"), re.I)
SPELLINGS = re.compile(rf"\b\w*({'|'.join(banned('spellings'))})\w*\b", re.I)


def strings() -> Iterator[tuple[str, str]]:
    """Place and text of every docstring and string of the package and of ``eval``."""
    paths = (path for folder in ("moe_finetune", "eval") for path in (ROOT / folder).rglob("*.py"))
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def violations(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Each place with the words that it should not have."""
    return [
        f"{place}: {match[0]}"
        for place, text in texts
        for pattern in (TICS, SPELLINGS)
        for match in pattern.finditer(text)
    ]


def test_the_lists_are_read_and_their_words_found():
    assert len(banned("tics")) >= 12 and len(banned("spellings")) >= 15
    text = "It was said in the\nplace of the Neighbours, and normalised."
    found = violations(iter([("here", text)]))
    assert len(found) == 4, found


def test_pages_avoid_them():
    texts = ((str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in PAGES)
    assert violations(texts) == []


def test_the_package_and_the_evaluation_avoid_them():
    assert violations(strings()) == []


if __name__ == "__main__":
    print("\n".join(violations(strings())))


def test_errors_are_listed_in_the_public_api_only():
    """Refusals are tested; a list of them in prose is not."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    public = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", page, re.M)}
    public |= {name for module in (functional, metrics) for name in module.__all__}
    public |= {"term", "register_family"}  # what plugins call
    places = []
    for path in sorted((ROOT / "moe_finetune").glob("*/**/*.py")):
        places += [
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in public
            if re.search(r"^\s*Raises:$", ast.get_docstring(node) or "", re.M)
        ]
    assert places == []
