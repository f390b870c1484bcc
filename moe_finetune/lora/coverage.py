"""What training reaches, in parameters and tensors of attention, router and experts.

Works on a plain or PEFT model, also on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from moe_finetune.io.text_tables import aligned
from moe_finetune.models import family_of_model
from moe_finetune.models.module_places import Places

if TYPE_CHECKING:
    from torch import nn

GROUPS = ("attention", "router", "shared experts", "routed experts", "other")
_ADDED = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)\.")


@dataclass
class Group:
    """One group's totals.

    Attributes:
        tensors, parameters: of the model without an adapter's additions.
        reached_tensors, reached_parameters: those of the model that an adapter changes or training
            updates.
        trained_tensors, trained_parameters: those that the optimizer updates.
    """

    tensors: int = 0
    parameters: int = 0
    reached_tensors: int = 0
    reached_parameters: int = 0
    trained_tensors: int = 0
    trained_parameters: int = 0


@dataclass
class Coverage:
    """Totals by group, in the order of :data:`GROUPS`."""

    groups: dict[str, Group] = field(default_factory=lambda: {name: Group() for name in GROUPS})

    @property
    def total(self) -> Group:
        rows = [asdict(group) for group in self.groups.values()]
        return Group(**{name: sum(row[name] for row in rows) for name in rows[0]})

    def to_mapping(self) -> dict[str, dict[str, int]]:
        rows = {**self.groups, "total": self.total}
        return {name: asdict(group) for name, group in rows.items()}

    def table(self) -> str:
        """A text table of the parameters, and of what training reaches if anything trains."""
        trains = bool(self.total.reached_parameters or self.total.trained_parameters)
        rows = [["", "tensors", "parameters"]]
        if trains:
            rows[0] += ["reached", "trained", "trained parameters"]
        for name, group in {**self.groups, "total": self.total}.items():
            row = [name, f"{group.tensors:,}", f"{group.parameters:,}"]
            if trains:
                row += [
                    f"{group.reached_tensors:,} ({_share(group)})",
                    f"{group.trained_tensors:,}",
                    f"{group.trained_parameters:,}",
                ]
            rows.append(row)
        return aligned(rows)


def _share(group: Group) -> str:
    if not group.parameters:
        return "-"
    return f"{100 * group.reached_parameters / group.parameters:.0f} %"


def experts_line(model: nn.Module) -> str:
    """How many parameters train on the routed experts, and what they change, as a line."""
    group = lora_coverage(model).groups["routed experts"]
    if not group.trained_parameters:
        return "routed experts: nothing trains; give them LoRA, or train their weights"
    what = "their weights" if group.trained_tensors == group.reached_tensors else "LoRA"
    return (
        f"routed experts: {group.trained_parameters:,} parameters train ({what}), which change "
        f"{_share(group)} of the experts' {group.parameters:,}"
    )


def lora_coverage(model: nn.Module, trains: bool = True) -> Coverage:
    """Count the parameters of ``model`` and what training reaches, by group.

    Args:
        model: a transformers model or a PEFT model around one.
        trains: whether parameters with ``requires_grad`` count as trained.
    """
    peft_model: Any = model
    base = peft_model.get_base_model() if hasattr(model, "get_base_model") else peft_model
    places = family_of_model(base).places(base.config)
    adapted = {id(parameter): share for parameter, share in _adapted(model)}
    coverage = Coverage()
    for name, parameter in model.named_parameters():
        group = coverage.groups[group_of(name, places)]
        trained = trains and parameter.requires_grad
        if trained:
            group.trained_tensors += 1
            group.trained_parameters += parameter.numel()
        if _ADDED.search(name):
            continue
        group.tensors += 1
        group.parameters += parameter.numel()
        if trained or id(parameter) in adapted:
            group.reached_tensors += 1
            share = 1.0 if trained else adapted[id(parameter)]
            group.reached_parameters += round(share * parameter.numel())
    return coverage


def group_of(name: str, places: Places) -> str:
    """The group of a parameter by its name in ``named_parameters``, with PEFT's prefixes."""
    _, inside, suffix = f".{name}.".partition(f".{places.backbone}.layers.")
    number, _, suffix = suffix.partition(".")
    if not inside:
        return "other"
    layer = int(number)
    if suffix.startswith(tuple(f"{target}." for target in places.attention)):
        return "attention"
    if layer not in places.moe_layers:
        return "other"
    if suffix.startswith(f"{places.experts_path}."):
        return "routed experts"
    if suffix.startswith(f"{places.router_path}."):
        return "router"
    shared = {f"{target.rpartition('.')[0]}." for target in places.shared}
    gates = {f"{target}." for target in places.shared_gates}
    return "shared experts" if suffix.startswith((*shared, *gates)) else "other"


def _adapted(model: nn.Module) -> Iterator[tuple[Any, float]]:
    if not hasattr(model, "get_base_model"):
        return  # PEFT takes seconds to import

    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    from moe_finetune.moe.experts.lora_on_chosen import SelectedExpertsLora

    for module in model.modules():
        if isinstance(module, SelectedExpertsLora):
            yield module.get_param(), module.num_experts / module.total_experts
        elif isinstance(module, ParamWrapper):
            yield module.get_param(), 1.0
        elif isinstance(module, LoraLayer):
            yield module.get_base_layer().weight, 1.0
        elif isinstance(module, ModulesToSaveWrapper):
            for parameter in module.original_module.parameters():
                yield parameter, 1.0
