"""The prompts of a benchmark, from rows of training data."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from moe_finetune.data.tokenize import rendered
from moe_finetune.errors import DataError
from moe_finetune.io import write_atomic


def write_prompts(rows: Path, checkpoint: Path, files: Mapping[Path, int]) -> None:
    """Write ``{"prompt": ...}`` lines: different rows in each of ``files``.

    No prompt is written twice, so that none is in the server's cache.

    Args:
        rows: a file of training data.
        checkpoint: the checkpoint whose chat template renders the rows.
        files: file -> number of its prompts.

    Raises:
        DataError: too few rows, or a row cannot be used.
    """
    from moe_finetune.data.rows import Former
    from moe_finetune.data.sources import read_rows
    from moe_finetune.models.loading import load_tokenizer

    tokenizer, former = load_tokenizer(checkpoint), Former()
    count = sum(files.values())
    prompts: dict[str, None] = {}
    for location, row in read_rows(str(rows)):
        if len(prompts) == count:
            break
        prompts[prompt_of(former(location, row), tokenizer)] = None
    if len(prompts) < count:
        raise DataError(
            f"{rows}: {len(prompts)} different prompts, but --bench needs {count}: the warm-up "
            "and each repetition need new ones, because vLLM serves repeated prompts from its "
            "cache; lower --samples or --repeat"
        )
    drawn = iter(prompts)
    for file, size in files.items():
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in islice(drawn, size))
        write_atomic(file, "".join(lines))


def prompt_of(row: dict[str, Any], tokenizer: Any) -> str:
    """The text before the last answer of a formed row; a plain text is returned whole."""
    if "messages" in row:
        turns = row["messages"]
        question = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        return rendered({**row, "messages": question}, tokenizer, prompt=True)[0]
    return row.get("prompt") or row["text"]
