"""Losses in torchtitan 0.3.0, which builds every MoE model from one block: hooks fill the record.

Set ``config.model_spec = with_losses(config.model_spec, BlockLosses(loss_of, scale))`` in the
config function of ``--module`` and ``--config``. torchtitan sums gradients over the data-parallel
ranks and over the micro-batches of a step, so ``scale`` is 1 / (ranks x gradient accumulation
steps). Compile the loss only (``--compile.components loss``): a compiled block would trace the
hooks. Tensor and expert parallelism need the losses inside torchtitan's dispatcher, and are not
covered.
"""

import torch
from torchtitan.models.common.moe import MoE

from moe_finetune.losses import RoutingRecord, inject
from moe_finetune.losses.record import ProjectionFactors


class BlockLosses:
    """Adds losses to the outputs of torchtitan's MoE blocks.

    ``loss_of(record, below)`` returns the weighted sum of a block's losses, for example
    ``0.1 * variance_loss(record.scores_TE, record.mask_T)``; ``below`` is the record of the MoE
    layer below, None in the first.

    T tokens, K selected experts, D model dimension, F expert width, N = T*K rows by expert.
    """

    def __init__(self, loss_of, scale=1.0):
        self.loss_of, self.scale = loss_of, scale
        self.records, self.losses = {}, {}

    def attach(self, block: MoE, layer: int) -> None:
        """Hook one block; ``layer`` is its place among the MoE layers, from 0."""
        router, experts, seen = block.router, block.routed_experts.inner_experts, {}
        router.gate.register_forward_hook(lambda module, args, out: seen.update(logits=out))
        router.register_forward_hook(lambda module, args, out: seen.update(choice=out))
        experts.register_forward_hook(lambda module, args, out: seen.update(outputs=out))
        product = experts._grouped_mm

        def noted(*, A, B_t, offs):
            seen["activations"] = A  # the last of three products is the down projection
            return product(A=A, B_t=B_t, offs=offs)

        experts._grouped_mm = noted

        def add(block, args, output):
            if not (block.training and torch.is_grad_enabled()):
                return output
            weights_TK, index_TK = (part.flatten(0, 1) for part in seen["choice"][:2])
            # The dispatcher sorts the choices by expert, stably; this is the way back.
            back_N = index_TK.flatten().argsort(stable=True).argsort()
            self.records[layer] = record = RoutingRecord(
                layer=layer,
                inputs_TH=args[0].flatten(0, 1),
                logits_TE=seen["logits"].flatten(0, 1).float(),
                index_TK=index_TK,
                weights_TK=weights_TK,
                mask_T=torch.ones(len(index_TK), dtype=torch.bool, device=index_TK.device),
                score=router.score_func,
                router_weight_EH=router.gate.weight,
                activations_TKD=seen["activations"][back_N].view(*index_TK.shape, -1),
                outputs_TKH=seen["outputs"][back_N].view(*index_TK.shape, -1),
                expert_factors=lambda name: ProjectionFactors(
                    {"gate": experts.w1_EFD, "up": experts.w3_EFD, "down": experts.w2_EDF}[name]
                ),
            )
            loss = self.loss_of(record, self.records.get(layer - 1))
            self.losses[layer] = loss.detach()
            return inject(output, loss, self.scale)

        block.register_forward_hook(add)


def with_losses(spec, losses: BlockLosses):
    """A torchtitan ``ModelSpec`` whose model gets the hooks when it is parallelized."""
    parallelize = spec.parallelize_fn

    def hooked(model, **options):
        model = parallelize(model, **options)
        blocks = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
        for number, block in enumerate(blocks):
            losses.attach(block, number)
        return model

    spec.parallelize_fn = hooked
    return spec
