"""What :mod:`moe_finetune.data.load_rows` returns, as most tests look at it."""

from moe_finetune.data import prepared_rows
from moe_finetune.data.load_rows import load_examples
from moe_finetune.data.token_rows import TokenRows


def load_dataset_for(*arguments, **options):
    """Training and validation rows."""
    loaded = load_examples(*arguments, **options)
    return loaded.train, loaded.validation


def prepare(sources, data, tokenizer, name, seed=0):
    """The rows without their counts."""
    return prepared_rows.prepare(sources, TokenRows(data, tokenizer), name, seed)[0]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei – né."},
]


def texts(rows) -> list[dict]:
    return [{"text": f"{i:02d} " + "word " * (i % 7)} for i in range(rows)]
