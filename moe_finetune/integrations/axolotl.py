"""axolotl's plugin: ``plugins: [moe_finetune.integrations.axolotl.SpecializationPlugin]``.

The config's ``specialization:`` section takes the keys of a recipe's ``method:``, and ``output``,
``dropout`` and ``kernel`` of :class:`~moe_finetune.SpecializationCallback`.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from moe_finetune.training.callback.callback import SpecializationCallback

SECTION = "specialization"


class SpecializationArgs(BaseModel):
    """The section, which axolotl adds to its config schema."""

    specialization: dict[str, Any] | str | None = None

    @field_validator(SECTION)
    @classmethod
    def _valid(cls, value: Any) -> Any:
        if value is not None:
            SpecializationCallback.from_section(value)
        return value


class SpecializationPlugin(BasePlugin):
    """Adds the section's method to axolotl's trainer."""

    def get_input_args(self) -> str:
        return f"{__name__}.{SpecializationArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        SpecializationCallback.from_section(_plain(cfg.get(SECTION))).attach(trainer)


def _plain(value: Any) -> Any:
    """Convert axolotl's dictionaries, in which a missing key is None, to plain ones."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
