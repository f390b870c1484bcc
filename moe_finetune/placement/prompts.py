"""The prompts of a benchmark, from rows of data as training takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.io import write_atomic


def write_prompts(rows: Path, checkpoint: Path, count: int, output: Path) -> None:
    """Write ``{"prompt": ...}`` lines: what the model is asked in the first ``count`` rows.

    Raises:
        DataError: fewer rows, or one that cannot be used.
    """
    from moe_finetune.families.loading import load_tokenizer
    from moe_finetune.training.rows import Former
    from moe_finetune.training.sources import read_rows

    tokenizer, former = load_tokenizer(checkpoint), Former()
    prompts: list[str] = []
    for place, row in read_rows(str(rows)):
        if len(prompts) == count:
            break
        prompts.append(prompt_of(former(place, row), tokenizer))
    if len(prompts) < count:
        raise DataError(f"{rows}: {len(prompts)} rows, fewer than --samples {count}; lower it")
    write_atomic(output, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def prompt_of(row: dict[str, Any], tokenizer: Any) -> str:
    """The text before the last answer of a formed row; of a plain text, all of it."""
    if "messages" in row:
        turns = row["messages"]
        asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
        return tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return row.get("prompt") or row["text"]
