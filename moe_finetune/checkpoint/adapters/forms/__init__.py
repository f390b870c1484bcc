"""Forms in which programs write and read adapters; a new one is a file here and a line below."""

from moe_finetune.checkpoint.adapters.forms import (
    grouped,
    peft,
    per_expert,
    shared_side,
    stacked,
    vllm,
)
from moe_finetune.checkpoint.adapters.forms.form import (
    FORMS,
    Form,
    Written,
    in_class,
    losses_by_form,
)

FORMS.register("peft", peft.FORM)
FORMS.register("per-expert", per_expert.FORM)
FORMS.register("vllm", vllm.FORM)
FORMS.register("stacked", stacked.FORM)
FORMS.register("shared-outer", stacked.SHARED_OUTER)
FORMS.register("megatron-bridge", shared_side.FORM)
FORMS.register("unsloth-lists", shared_side.LISTS)
FORMS.register("automodel", grouped.FORM)

__all__ = ["FORMS", "Form", "Written", "in_class", "losses_by_form"]
