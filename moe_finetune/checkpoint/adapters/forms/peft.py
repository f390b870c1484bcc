"""PEFT's own form over transformers' classes: a pair of factors for each stack of experts."""

from moe_finetune.checkpoint.adapters.forms.form import Form, Written
from moe_finetune.checkpoint.adapters.in_peft import peft_form
from moe_finetune.checkpoint.adapters.updates import OpenAdapter


def write(adapter: OpenAdapter) -> Written:
    """What PEFT reads, with a pair of factors for each stack."""
    form = peft_form(adapter)
    return form.config, form.tensors | form.tables


FORM = Form(
    programs="PEFT 0.19 and later with transformers 5, TRL, axolotl, LLaMA-Factory, Unsloth",
    loses="nothing; experts that were not chosen have zeros",
    write=write,
)
