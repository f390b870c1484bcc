"""A loss and a reward, as a package of its own brings them."""

from moe_finetune.losses.base import TERMS, Term
from moe_finetune.losses.tensors import mean_over_tokens
from moe_finetune.training.stages.rewards import REWARDS


class LogitSpread(Term):
    """Mean squared logit of the router."""

    name = "logit_spread"
    source = "an example"
    reads = "router logits"
    trains = frozenset({"router"})

    def loss(self, record, context):
        return mean_over_tokens(record.logits_TE.square().mean(-1), record.mask_T)


def brevity(completions, limit, **_):
    """1 where a completion has at most ``limit`` characters."""
    return [float(len(text) <= n) for text, n in zip(completions, limit, strict=True)]


TERMS.register("logit_spread", LogitSpread)
REWARDS.register("brevity", brevity)
