"""Loss-free balancing: a bias on the selection, updated after every optimizer step.

``b_e += u * sign(mean load - load_e)`` (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing";
DeepSeek-V3), loads summed over the accumulation window and all ranks. The bias changes which
experts are selected, never their weights. It is stored outside the model, so a reference forward
with the adapter disabled, or with another adapter active, uses the checkpoint's own routing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.losses.tensors import distributed_run
from moe_finetune.moe.choice.select_again import Rule, select_with_bias
from moe_finetune.moe.experts.active_adapter import TrainedAdapter
from moe_finetune.moe.layers import MoeLayer, moe_layers
from moe_finetune.moe.perturbation import Perturbation


class BiasBalancer(Perturbation):
    """Stores one bias per MoE layer, counts loads, and updates the biases.

    Args:
        layers: those whose router selects.
        update: step size u, 1e-3 in the paper.
        inner: another perturbation, which acts before and after the selection.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        num_experts: int,
        update: float,
        inner: Perturbation | None = None,
    ):
        self.update = update
        self.bias = {layer: torch.zeros(num_experts) for layer in layers}
        self._load = {layer: torch.zeros(num_experts) for layer in layers}
        self._inner = inner or Perturbation()
        self._rules: dict[int, Rule] = {}
        self._adapter: TrainedAdapter | None = None
        self.expert_dropout = self._inner.expert_dropout

    def install(self, model: nn.Module) -> None:
        if self._adapter is None:
            self._adapter = TrainedAdapter(model)
        self._rules = {}
        for layer in moe_layers(model):
            if layer.index not in self.bias:
                continue
            self._rules[layer.index] = Rule(layer)
            # Now, rather than in a forward: a copy from the host waits for the device.
            device = next(layer.router.parameters()).device
            self.bias[layer.index] = self.bias[layer.index].to(device)
            self._load[layer.index] = self._load[layer.index].to(device)
        self._inner.install(model)

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that the bias belongs to; empty for a model without adapters."""
        return self._adapter.names if self._adapter is not None else frozenset()

    def router_input(self, layer: MoeLayer, hidden: Tensor) -> Tensor:
        return self._inner.router_input(layer, hidden)

    def routing(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Select again with the layer's bias while the trained adapter is active."""
        acts = self._adapter is None or self._adapter.acts()
        if acts and layer.index in self.bias:
            rule = self._rules.setdefault(layer.index, Rule(layer))
            bias_E = self.bias[layer.index] = self.bias[layer.index].to(logits_TE.device)
            return select_with_bias(logits_TE, bias_E, index_TK, weights_TK, rule)
        return weights_TK, index_TK

    def noise(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> Tensor:
        return self._inner.noise(layer, logits_TE, weights_TK, index_TK)

    def observe(self, record: RoutingRecord, _: LayerLoss) -> None:
        """Count the loads of a training forward (an observer of the recorder).

        They are those of the biased selection, also where router replay runs other experts: a bias
        could not change these, and would grow for ever.
        """
        if record.layer not in self.bias:
            return
        own = record.own_index_TK
        index_TK = record.index_TK if own is None else own
        load = self._load[record.layer] = self._load[record.layer].to(index_TK.device)
        counted = record.mask_T.unsqueeze(1).expand(index_TK.shape).reshape(-1)
        load.scatter_add_(0, index_TK.reshape(-1), counted.to(load.dtype))

    def step(self) -> None:
        """Update the biases from the loads since the last step; every rank must call this."""
        loads_LE = torch.stack(list(self._load.values()))
        if distributed_run():
            torch.distributed.all_reduce(loads_LE)
        for layer, load_E in zip(self._load, loads_LE, strict=True):
            bias = self.bias[layer].to(load_E.device)
            self.bias[layer] = bias + self.update * torch.sign(load_E.mean() - load_E)
            self._load[layer] = torch.zeros_like(load_E)

    def effective(self, layers: Sequence[MoeLayer]) -> dict[str, Tensor]:
        """Biases to export: the learned ones plus the checkpoint's own, if any."""
        biases = {}
        for layer in layers:
            if layer.index not in self.bias:
                continue
            learned = self.bias[layer.index].cpu()
            layer_bias = Rule(layer).own_bias(learned)
            biases[f"bias.{layer.index}"] = layer_bias.detach().cpu() + learned
        return biases

    def state_dict(self) -> dict[str, Tensor]:
        """Biases as ``bias.<decoder layer>``; loads are zero between steps and not included."""
        return {f"bias.{layer}": bias for layer, bias in self.bias.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for layer in self.bias:
            self.bias[layer] = state[f"bias.{layer}"].clone()
