"""Interface for methods that change routing while the model runs."""

from torch import Tensor, nn

from moe_finetune.moe.layers import MoeLayer


class Perturbation:
    """Base class for changes to routing; changes nothing.

    ``router_input`` and ``expert_dropout`` act only in training forwards; the others are called in
    every forward. A checkpointed layer that runs again takes the experts of its first visit, after
    ``routing`` and before ``noise``.
    """

    expert_dropout: float = 0.0

    def install(self, model: nn.Module) -> None:
        """Called with the model before its first forward."""

    def router_input(self, layer: MoeLayer, hidden: Tensor) -> Tensor:
        """Return the router's input in place of ``hidden``."""
        return hidden

    def routing(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weights and index that the block uses instead of the router's."""
        return weights_TK, index_TK

    def noise(
        self, layer: MoeLayer, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor
    ) -> Tensor:
        """Return the weights of the selected experts."""
        return weights_TK
