"""Facts about an adapter: who wrote it, in which form, what it trains, how it can be written."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.adapters.files import read_adapter
from moe_finetune.checkpoint.adapters.forms import losses_by_form
from moe_finetune.checkpoint.adapters.forms.maker import form_of, maker_of
from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.adapters.updates import LowRank, Replace
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.io.text_tables import aligned
from moe_finetune.lora.coverage import GROUPS, group_of

if TYPE_CHECKING:
    from moe_finetune.checkpoint.adapters.updates import OpenAdapter


@dataclass(frozen=True)
class PartFacts:
    """What an adapter trains in one part: matrices or stacks with factors, and tensors in full."""

    part: str
    adapted: int
    ranks: list[int]
    scales: list[float]
    in_full: int
    parameters: int


@dataclass(frozen=True)
class AdapterInspection:
    """An adapter's facts; ``forms`` maps each form to the programs, and to what is lost."""

    path: str
    base: str
    maker: str
    form: str
    parts: list[PartFacts]
    forms: dict[str, tuple[str, str]]

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The facts as printed."""
        rows = [["", "with factors", "rank", "scale", "in full", "parameters"]]
        for part in self.parts:
            ranks = ", ".join(map(str, part.ranks)) or "-"
            scales = ", ".join(f"{scale:g}" for scale in part.scales) or "-"
            counts = str(part.adapted), ranks, scales, str(part.in_full), f"{part.parameters:,}"
            rows.append([part.part, *counts])
        forms = [["--to", "read by", "lost"], *([name, *row] for name, row in self.forms.items())]
        lines = (f"adapter  {self.path}", f"base     {self.base}", f"made by  {self.maker}")
        return "\n".join(
            [*lines, f"form     {self.form}", "", aligned(rows), "", aligned(forms, "left")]
        )


def inspect_adapter(folder: Path, base: Path) -> AdapterInspection:
    """The facts of an adapter over its base; refused where a merge would be."""
    stored = read_adapter(folder)
    adapter = check_adapter(folder, open_checkpoint(base, stored=True))
    forms = {name: (programs, lost) for name, programs, lost in losses_by_form(adapter)}
    parts = [_part(adapter, part) for part in GROUPS]
    return AdapterInspection(
        path=str(folder),
        base=str(base),
        maker=maker_of(stored),
        form=form_of(stored),
        parts=[part for part in parts if part.adapted or part.in_full],
        forms=forms,
    )


def _part(adapter: OpenAdapter, part: str) -> PartFacts:
    places, names = adapter.base.places, adapter.base.names
    updates: list[LowRank] = []
    keys: list[str] = []
    all_updates: list[LowRank | Replace] = [*adapter.low_rank, *adapter.replaced]
    for update in all_updates:
        loaded = names.loaded[update.name] if adapter.of_files else update.name
        if group_of(loaded, places) != part:
            continue
        if isinstance(update, LowRank):
            updates.append(update)
            keys += [update.a, update.b]
        else:
            keys.append(update.key)
    return PartFacts(
        part=part,
        adapted=len(updates),
        ranks=sorted({update.rank for update in updates}),
        scales=sorted({round(update.scale, 6) for update in updates}),
        in_full=len(keys) - 2 * len(updates),
        parameters=sum(math.prod(adapter.tensors[key].shape) for key in keys),
    )
