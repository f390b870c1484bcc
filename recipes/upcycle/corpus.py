"""The miniature's texts and tokenizer: ``python -m recipes.upcycle.corpus runs/texts``.

Real text of eight kinds, part of every installation of this package. Twenty-four categories, three
of each kind: prose of documentation, network code, C++ headers, codec tables, font metrics,
computer algebra, type stubs and model code. The files come from the standard library and from
dependencies of this package. The folder gets a file of rows for each category, the tokenizer, and
``texts.yaml``, a recipe that names them.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import yaml

from moe_finetune.io.row_files import write_jsonl
from moe_finetune.upcycle.categories import read_categories
from moe_finetune.upcycle.schema import TextSection
from moe_finetune.upcycle.texts import SPLITS, splits_of
from recipes.upcycle.tokenizer import train_tokenizer

VOCABULARY = 1024

STDLIB, PACKAGES = "stdlib", "purelib"

SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    # prose
    "language reference": (("topics", ""),),
    "docstrings": (("docstrings", "*.py"),),
    "data set descriptions": (
        (PACKAGES, "sklearn/datasets/descr/*.rst"),
        (PACKAGES, "numpy/doc/*.py"),
        (PACKAGES, "networkx-*.dist-info/METADATA"),
        (PACKAGES, "scikit_learn-*.dist-info/METADATA"),
    ),
    # network code
    "http and urllib": ((STDLIB, "http/*.py"), (STDLIB, "urllib/*.py")),
    "email": ((STDLIB, "email/*.py"), (STDLIB, "smtplib.py"), (STDLIB, "imaplib.py")),
    "asyncio": ((STDLIB, "asyncio/*.py"), (STDLIB, "socket*.py")),
    # C++ headers
    "c10 headers": ((PACKAGES, "torch/include/c10/core/*.h"),),
    "aten headers": ((PACKAGES, "torch/include/ATen/native/*.h"),),
    "torch api headers": ((PACKAGES, "torch/include/torch/csrc/api/include/torch/nn/**/*.h"),),
    # tables of code points
    "dos code pages": ((STDLIB, "encodings/cp[4-8]*.py"),),
    "windows code pages": ((STDLIB, "encodings/cp1*.py"),),
    "iso code pages": ((STDLIB, "encodings/iso8859_*.py"), (STDLIB, "encodings/mac_*.py")),
    # font metrics
    "tex fonts": ((PACKAGES, "matplotlib/mpl-data/fonts/afm/cm*.afm"),),
    "postscript fonts": ((PACKAGES, "matplotlib/mpl-data/fonts/afm/p*.afm"),),
    "pdf core fonts": ((PACKAGES, "matplotlib/mpl-data/fonts/pdfcorefonts/*.afm"),),
    # computer algebra
    "number theory": ((PACKAGES, "sympy/ntheory/*.py"),),
    "polynomials": ((PACKAGES, "sympy/polys/*.py"),),
    "integrals": ((PACKAGES, "sympy/integrals/*.py"), (PACKAGES, "sympy/series/*.py")),
    # type stubs
    "numpy stubs": ((PACKAGES, "numpy/**/*.pyi"),),
    "torch stubs": ((PACKAGES, "torch/**/*.pyi"),),
    "pandas stubs": ((PACKAGES, "pandas/_libs/**/*.pyi"),),
    # model code
    "model configurations": ((PACKAGES, "transformers/models/*/configuration_*.py"),),
    "tokenizers": ((PACKAGES, "transformers/models/*/tokenization_*.py"),),
    "image processors": ((PACKAGES, "transformers/models/*/image_processing_*.py"),),
}
"""Category -> (root, pattern): the standard library's folder, or that of installed packages."""

PIECE, FROM_FILE, FROM_CATEGORY = 1500, 9000, 60_000
"""Characters of a text, and at most from one file and in a category."""


def read_corpus() -> dict[str, list[str]]:
    """Texts by category: pieces of whole lines, files sorted by name."""
    corpus = {}
    for category, sources in SOURCES.items():
        pieces: list[str] = []
        remaining = FROM_CATEGORY
        for text in (t for root, pattern in sources for t in _texts(root, pattern)):
            for piece in _pieces(text[: min(FROM_FILE, remaining)]):
                pieces.append(piece)
                remaining -= len(piece)
            if remaining < PIECE:
                break
        if not pieces:
            patterns = " and ".join(f"{root}/{pattern}" for root, pattern in sources)
            sys.exit(f"no text for '{category}', looked for {patterns}; install "
                     "moe-finetune[pictures]")  # fmt: skip
        corpus[category] = pieces
    return corpus


def _texts(root: str, pattern: str) -> Iterator[str]:
    if root == "topics":
        from pydoc_data.topics import topics

        yield from (topics[name].strip() for name in sorted(topics))
        return
    folder = Path(sysconfig.get_paths()[STDLIB if root == "docstrings" else root])
    for path in sorted(folder.glob(pattern)):
        text = path.read_text(encoding="utf-8", errors="replace")
        if root == "docstrings":
            text = _docstrings(text)
        if text.strip():
            yield text


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # kept for another version of Python
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in docstrings if text)


def _pieces(text: str) -> Iterator[str]:
    """Runs of whole lines of about :data:`PIECE` characters; the last may be shorter."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(lines)
            lines, size = [], 0
    if size >= PIECE // 4:
        yield "".join(lines)


def main(folder: Path) -> None:
    """Write the texts, their tokenizer, and the recipe that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for category, pieces in read_corpus().items():
        files[category] = str(folder / f"{category.replace(' ', '_')}.jsonl")
        write_jsonl(Path(files[category]), [{"text": piece} for piece in pieces])
    section = TextSection(categories=files)
    texts = [
        text
        for category in read_categories(section).values()
        for text, split in zip(category, splits_of(len(category), section.seed), strict=True)
        if SPLITS[split] == "train"
    ]
    train_tokenizer(texts, VOCABULARY).save_pretrained(folder / "tokenizer")
    recipe = {
        "dense": {"pretrain": {"tokenizer": str(folder / "tokenizer")}},
        "texts": {"categories": files},
    }
    (folder / "texts.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m recipes.upcycle.corpus FOLDER")
    main(Path(sys.argv[1]))
