"""What :mod:`moe_finetune.data.examples` returns, as most tests look at it."""

from __future__ import annotations

from moe_finetune.data import examples


def load_dataset_for(*arguments):
    """Training and validation rows."""
    loaded = examples.load_examples(*arguments)
    return loaded.train, loaded.validation


def prepare(*arguments):
    """The rows without their counts."""
    return examples.prepare(*arguments)[0]
