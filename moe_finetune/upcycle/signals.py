"""Interrupting an upcycle: finish the step, save, and say how to go on."""

from __future__ import annotations

from moe_finetune.training.signals import StopOnSignal


class StopUpcycle(StopOnSignal):
    """As in ``train``; only the command that goes on is another."""

    def _message(self) -> str:
        said, _, _ = super()._message().partition(" To go on:")
        return f"{said} To go on: repeat the command with --resume"
