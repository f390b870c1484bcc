"""What tests of trainers share: a model, its policy's forwards, gradients of the objective."""

import torch

from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support.objectives import objective_of

COMMON = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "max_steps": 1,
    "learning_rate": 0.0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "router_aux_loss_coef": 0.0,
}


def explicit(model, inputs, terms, scale):
    """Gradients of the objective alone, from one recorded forward."""
    objective, totals, below = objective_of(terms, model_facts(model)), [], []

    def observer(record, _):
        with torch.enable_grad():
            context = LayerContext(previous=below[-1] if below else None)
            totals.append(objective(record, context).total)
        below.append(PreviousLayer(record.layer, record.distribution_TE, record.index_TK))

    with Recorder(model, observers=[observer], needs=objective.needs):
        model(**inputs)
    (scale * sum(total for total in totals if total is not None)).backward()


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class Policy:
    """Counts forwards that train and keeps their inputs."""

    def __init__(self, model):
        self.inputs = []
        backbone = model.get_base_model().model
        backbone.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        if module.training and torch.is_grad_enabled():
            self.inputs.append(
                {k: kwargs[k].detach().clone() for k in ("input_ids", "attention_mask")}
            )
