"""Forms in which programs read adapters; a new one is a file here and a line below."""

from moe_finetune.checkpoint.forms import peft, per_expert, vllm
from moe_finetune.checkpoint.forms.form import FORMS, Form, Written

FORMS.register("peft", peft.FORM)
FORMS.register("per-expert", per_expert.FORM)
FORMS.register("vllm", vllm.FORM)

__all__ = ["FORMS", "Form", "Written"]
