"""Distillation of a teacher's routing and logits; a mixin for TRL's trainer."""

from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import RecipeError
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.models import Family
from moe_finetune.moe.context import ForwardOverrides
from moe_finetune.moe.hooks import Recorder
from moe_finetune.training.callback import SpecializationCallback

_Trainer: Any = object
TERM = "teacher_routing"


class RoutesAsTeacher(_Trainer):
    """Mixin that runs the teacher before the student if the method has ``teacher_routing``.

    TRL computes the student's hidden states first, but the term is evaluated inside the student's
    layers. So the teacher runs before the student, once and without gradients; its router logits go
    to the term, and its hidden states are kept until TRL needs them.

    Attributes:
        callback: its recorder is on the student during training.
    """

    callback: SpecializationCallback
    _teacher_states: Tensor | None = None

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> Tensor:
        hidden = super()._get_last_hidden_state
        if TERM not in self.callback.method.terms or not self.model.training:
            return hidden(unwrapped_model, *args, **kwargs)
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        if unwrapped_model is teacher:
            states, self._teacher_states = self._teacher_states, None
            assert states is not None, "the student runs first"
            return states
        logits: dict[int, Tensor] = {}

        def keep(record: RoutingRecord, _: LayerLoss) -> None:
            logits[record.layer] = record.logits_TE

        self.teacher_model.eval()
        with torch.no_grad(), Recorder(teacher, observers=[keep], observe="all"):
            self._teacher_states = self._forward_redirection(
                self.teacher_model, teacher, hidden, teacher, *args, **kwargs
            )
        overrides = ForwardOverrides(teacher=logits)
        with self.callback.recorder.using(overrides=lambda rows: overrides):
            return hidden(unwrapped_model, *args, **kwargs)


def check_teacher(student: tuple[Any, Family], teacher: tuple[Any, Family]) -> None:
    """Refuse a teacher whose routers do not match the student's one to one.

    Args:
        student, teacher: transformers config and family of each.

    Raises:
        RecipeError: family, MoE layers or number of experts differ.
    """
    (config, ours), (teacher_config, theirs) = student, teacher
    differing = [
        f"{what} {mine} and {other}"
        for what, mine, other in (
            ("families", ours.name, theirs.name),
            ("MoE layers", ours.moe_layers(config), theirs.moe_layers(teacher_config)),
            ("numbers of experts", ours.num_experts(config), theirs.num_experts(teacher_config)),
        )
        if mine != other
    ]
    if differing:
        raise RecipeError(
            f"method.terms.{TERM}: compares each router with the teacher's, but they have "
            f"different {'; '.join(differing)}; choose a teacher that matches, or remove the "
            "term (weight: 0) and learn only from its logits"
        )
