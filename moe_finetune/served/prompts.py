"""The prompts that a served model is asked, as token ids: the run's own rows if there is a run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.data.load_rows import load_for_stage
from moe_finetune.errors import DataError
from moe_finetune.io.row_files import placed_rows
from moe_finetune.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

COUNT = 32
MOST_TOKENS = 64
FEWEST_TOKENS = 2
TEXTS = (
    "The committee met again on Thursday to decide whether the bridge should be repaired.",
    "def area(width, height):\n    return width * height\n",
    "Water boils at a lower temperature on a mountain because the air pressure is lower there.",
    "Question: A train travels 60 miles in 45 minutes. How far does it travel in two hours?",
    "Dear Ms. Alvarez, thank you for your letter of 3 March about the order that arrived late.",
    "SELECT name, COUNT(*) FROM visits GROUP BY name ORDER BY COUNT(*) DESC;",
    "The patient reports a mild headache since yesterday and no fever.",
    "Le marché ouvre à huit heures et ferme à midi, sauf le dimanche.",
)
"""Texts for a checkpoint without a run; each is asked from several beginnings."""


def run_prompts(recipe: Recipe, tokenizer: Tokenizer) -> list[list[int]]:
    """Beginnings of a run's validation rows, then of its training rows, as its stage reads them."""
    try:
        examples = load_for_stage(recipe, tokenizer)
    except DataError as error:
        raise DataError(f"{error}; or give prompts with --prompts FILE") from error
    parts = [part for _, part in examples.sources]
    if examples.validation is not None and "input_ids" in examples.train.column_names:
        parts.append(examples.train)
    # Some rows may be too short; a prompt needs no more than these of each part.
    return shortened(row["input_ids"] for part in parts for row in islice(part, 4 * COUNT))


def file_prompts(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts of a file: lines of ``.txt``, else rows with ``input_ids`` or ``text``."""
    if file.suffix == ".txt":
        try:
            texts = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read ({error})") from None
        return shortened(tokenizer(text)["input_ids"] for text in texts if text.strip())
    prompts = []
    for location, row in placed_rows(file):
        ids = row.get("input_ids")
        if isinstance(ids, list) and all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
            prompts.append(ids)
        elif isinstance(row.get("text"), str):
            prompts.append(tokenizer(row["text"])["input_ids"])
        else:
            raise DataError(
                f"{location}: a prompt is a row with 'text', or with 'input_ids', a list of token "
                f"ids below {len(tokenizer)}"
            )
    return shortened(prompts)


def fixed_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts where there are neither a run's rows nor a file: the same for every checkpoint."""
    parts = COUNT // len(TEXTS)
    texts = [text[len(text) // (2 * parts) * part :] for text in TEXTS for part in range(parts)]
    return shortened(tokenizer(text)["input_ids"] for text in texts)


def shortened(rows: Iterable[list[int]]) -> list[list[int]]:
    """The first :data:`COUNT` rows of at least two tokens, cut to :data:`MOST_TOKENS` each."""
    prompts = [list(row[:MOST_TOKENS]) for row in rows if len(row) >= FEWEST_TOKENS][:COUNT]
    if len(prompts) < 2:
        raise DataError(
            f"{len(prompts)} prompts of at least {FEWEST_TOKENS} tokens; at least 2 are needed, "
            f"and {COUNT} are asked: give more with --prompts FILE"
        )
    return prompts
