"""Find a transformers model's experts and routers from its modules.

Used for messages and for the proof of a declaration, not for training.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

_EXPERTS = re.compile(r"(?P<stack>(?:^|.*\.)layers)\.(?P<layer>\d+)\.(?P<path>.+)")
MOST_SHARED = 8
"""Rows of a router's weight after those of the routed experts."""
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True)
class Site:
    """One layer's experts.

    Attributes:
        block_path, experts_name: paths of the block in the layer and of the experts in the block.
        gated: whether they have a gate projection.
        num_experts, hidden, width: sizes of the stacked down projection (E, H, D).
    """

    index: int
    layer: Any
    block_path: str
    experts_name: str
    gated: bool
    num_experts: int
    hidden: int
    width: int

    @property
    def block(self) -> Any:
        """The module that contains router and experts."""
        return self.layer.get_submodule(self.block_path)

    @property
    def routers(self) -> list[tuple[str, str]]:
        """(name in the block, path of its weight) for each module with an (E, H) weight.

        Some weights have extra rows for shared experts at the end.
        """
        candidates = [
            (parts[0], parts[2], parameter.shape[0])
            for name, parameter in self.block.named_parameters()
            if parameter.dim() == 2
            and parameter.shape[1] == self.hidden
            and 0 <= parameter.shape[0] - self.num_experts <= MOST_SHARED
            and (parts := name.partition("."))[0] != self.experts_name
            and parts[2]
        ]
        fewest = min((rows for *_, rows in candidates), default=0)
        return [(name, path) for name, path, rows in candidates if rows == fewest]

    @property
    def biases(self) -> list[str]:
        """Names of the block's vectors with one number per expert, except the routers' biases."""
        tensors = [*self.block.named_parameters(), *self.block.named_buffers()]
        return [
            name
            for name, tensor in tensors
            if tensor.shape[-1:].numel() == tensor.numel() == self.num_experts
            and not name.endswith(".bias")
        ]

    @property
    def other_linears(self) -> list[str]:
        """Paths, from the decoder layer, of the block's linear layers outside of router and experts
        that are wider than one: shared experts. None where the block is the layer itself."""
        if not self.block_path:
            return []
        skipped = (self.experts_name, *(name for name, _ in self.routers))
        return [
            f"{self.block_path}.{name}".lstrip(".")
            for name, module in self.block.named_modules()
            if isinstance(module, nn.Linear)
            and name.partition(".")[0] not in skipped
            and 1 not in module.weight.shape
        ]

    def next_to(self, attention: Collection[str]) -> list[str]:
        """Paths of the decoder layer's linear layers outside of the block and of the modules
        ``attention``: shared experts of some classes."""
        routers = () if self.block_path else tuple(name for name, _ in self.routers)
        return [
            name
            for name, module in self.layer.named_modules()
            if isinstance(module, nn.Linear)
            and not name.startswith(f"{self.block_path}.")
            and name.partition(".")[0] not in (*attention, *routers)
            and not any(part in name.partition(".")[0] for part in ("attn", "norm", "hyper"))
        ]


def sites(model: nn.Module) -> list[Site]:
    """Every layer of ``model`` with experts that follow transformers' experts interface."""
    modules = dict(model.named_modules())
    layer_sites = []
    for name, experts in modules.items():
        match = _EXPERTS.fullmatch(name)
        if match is None or not follows_interface(experts):
            continue
        size, first, second = experts.down_proj.shape
        hidden, width = (second, first) if experts.is_transposed else (first, second)
        block, _, experts_name = match["path"].rpartition(".")
        layer = modules[f"{match['stack']}.{match['layer']}"]
        site = Site(
            int(match["layer"]), layer, block, experts_name, experts.has_gate, size, hidden, width
        )
        layer_sites.append(site)
    return sorted(layer_sites, key=lambda site: site.index)


def follows_interface(module: Any) -> bool:
    """Whether ``module`` is an experts class with ``use_experts_implementation``."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS) and (
        getattr(getattr(module, "down_proj", None), "ndim", 0) == 3
    )
