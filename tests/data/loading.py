"""What :mod:`moe_finetune.data.prepared_rows` returns, as most tests look at it."""

from moe_finetune.data import prepared_rows


def load_dataset_for(*arguments, **options):
    """Training and validation rows."""
    loaded = prepared_rows.load_examples(*arguments, **options)
    return loaded.train, loaded.validation


def prepare(*arguments, **options):
    """The rows without their counts."""
    return prepared_rows.prepare(*arguments, **options)[0]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei – né."},
]


def texts(rows) -> list[dict]:
    return [{"text": f"{i:02d} " + "word " * (i % 7)} for i in range(rows)]
