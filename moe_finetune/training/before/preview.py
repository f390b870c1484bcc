"""``moe-finetune preview``: the rows of a recipe as training will see them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from moe_finetune.data.load_rows import load_examples, load_for_stage
from moe_finetune.data.preference_and_prompt_forms import ANSWERS
from moe_finetune.data.preference_and_prompt_rows import ids_of
from moe_finetune.data.tokenize import IGNORED, run_tokenizer
from moe_finetune.io.counted import counted
from moe_finetune.models.config_and_tokenizer import local_folder
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.run.step_count import describe_steps, step_arguments

BINS, BAR = 8, 40
COLORED, PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")


def preview(recipe: Recipe, rows: int = 3, color: bool = False) -> str:
    """The size of a step, the first rows as the model will see them, and the rows' lengths.

    Prepares the data as a run would, which reuses it. ``color``: mark learned tokens by color
    instead of double brackets.
    """
    base = local_folder(recipe.model.path, False, recipe.model.revision)
    tokenizer = run_tokenizer(recipe, base)
    if STAGES[recipe.stage].form != "tokens":
        return preview_rows(recipe, tokenizer, rows, COLORED if color else PLAIN)
    train = load_examples(recipe.data, tokenizer, recipe.seed).train
    lengths_N = np.array([len(ids) for ids in train["input_ids"]])
    examples = [
        f"row {index}: {counted(len(row['input_ids']), 'token')}, "
        f"{sum(label != IGNORED for label in row['labels'])} learned\n"
        + marked(row["input_ids"], row["labels"], tokenizer, COLORED if color else PLAIN)
        for index, row in enumerate(train.select(range(min(rows, len(train)))), 1)
    ]
    return "\n\n".join(
        [
            describe_steps(
                recipe, step_arguments(recipe.trainer), len(train), int(lengths_N.sum())
            ),
            f"learned tokens are {'green' if color else 'between ' + ' and '.join(PLAIN)}",
            *examples,
            histogram(lengths_N),
        ]
    )


def preview_rows(
    recipe: Recipe, tokenizer: Tokenizer, rows: int, marks: tuple[str, str] = PLAIN
) -> str:
    """The first rows for a stage whose trainer tokenizes them."""
    examples = load_for_stage(recipe, tokenizer)
    train = examples.train
    example_rows = [
        f"row {index}\n" + "\n".join(_fields(row, tokenizer, marks))
        for index, row in enumerate(train.select(range(min(rows, len(train)))), 1)
    ]
    return "\n\n".join([f"stage {recipe.stage}: {counted(len(train), 'row')}", *example_rows])


def _fields(row: dict[str, Any], tokenizer: Tokenizer, marks: tuple[str, str]) -> Iterator[str]:
    """A row's fields, with its texts as TRL's tokens have them: the prompt before each answer."""
    prompt, *answers = ids_of(row, tokenizer)
    for name, ids in zip(ANSWERS, answers, strict=False):
        labels = [IGNORED] * len(prompt) + ids
        yield f"  {name}: {marked([*prompt, *ids], labels, tokenizer, marks)}"
    if not answers:
        yield f"  prompt: {tokenizer.decode(prompt)}"
    for name, value in row.items():
        if not name.endswith("_ids") and name not in ("prompt", *ANSWERS):
            yield f"  {name}: {value}"


def marked(ids: list[int], labels: list[int], tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    """The text of ``ids`` with each run of learned tokens between ``marks``."""
    text = ""
    pairs = zip(ids, labels, strict=True)
    for learned, stretch in itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        piece = tokenizer.decode([token for token, _ in stretch])
        text += f"{marks[0]}{piece}{marks[1]}" if learned else piece
    return text


def histogram(lengths_N: np.ndarray) -> str:
    """A text histogram of lengths in tokens."""
    low, high = int(lengths_N.min()), int(lengths_N.max())
    edges = np.unique(np.linspace(low, high + 1, BINS + 1).astype(int))
    counts, _ = np.histogram(lengths_N, bins=edges)
    lines = [
        f"  {f'{start}–{end - 1}':>13}  {count:>9,}  {'█' * round(BAR * count / counts.max())}"
        for count, start, end in zip(counts, edges, edges[1:], strict=False)
    ]
    middle, most = np.percentile(lengths_N, [50, 95])
    head = f"tokens in a row: median {middle:.0f}, 95 % have {most:.0f} or less, longest {high}"
    return "\n".join([head, *(line.rstrip() for line in lines)])
