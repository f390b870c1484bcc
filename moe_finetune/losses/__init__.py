"""Loss terms by name: a new one is a file of its own and one line here."""

from moe_finetune.losses.base import TERMS
from moe_finetune.losses.load_balance import LoadBalance
from moe_finetune.losses.orthogonality import Orthogonality
from moe_finetune.losses.variance import Variance
from moe_finetune.losses.z_loss import ZLoss

TERMS.register("load_balance", LoadBalance)
TERMS.register("z_loss", ZLoss)
TERMS.register("orthogonality", Orthogonality)
TERMS.register("variance", Variance)

__all__ = ["TERMS"]
