"""GRPO rollouts: how far generation and training disagree, and router replay.

A mixin for TRL's trainer, for completions that transformers generates in this process. Shape
legend: B rows, P prompt positions, C completion positions, S = P + C, L MoE layers, K selected
experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerationMode

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.models import Family
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import causal_lm
from moe_finetune.moe.lora_active import TrainedAdapter
from moe_finetune.moe.rollout import AgainstRollout, RolloutChoice
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.callback import SpecializationCallback

log = logging.getLogger(__name__)
_Trainer: Any = object
EXPERTS = "rollout_experts"
"""Key in a training batch for the result of :meth:`RolloutChoice.experts`."""


class FollowsRollouts(_Trainer):
    """Mixin that records rollouts and compares each training forward with them.

    Every log has, over sampled tokens, ``routing/changed_from_rollout``: the share of (token,
    layer) pairs for which training selects other experts than the rollout;
    ``rollout/log_prob_difference``: the mean of ``|log p_training - log p_rollout|``; and
    ``rollout/kl``: the mean of ``r - 1 - log r`` for ``r = p_training / p_rollout``, which
    estimates ``KL(rollout || training)`` (Schulman 2020). Probabilities are the model's at the
    sampling temperature, before ``top_p`` and similar filters.

    Attributes:
        callback: its recorder is on the model during training.
        replay: whether each token trains with the experts that the rollout selected.
    """

    callback: SpecializationCallback
    replay = False
    _policy: TrainedAdapter | None = None
    _rollout: _Rollout | None = None
    _batch: Mapping[str, Any] | None = None
    _said = False

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self._rollout = None
        if not self.model.training or not self._can_be_noted():
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        recorder = self.callback.recorder
        self._policy = self._policy or TrainedAdapter(recorder.model)
        longest, step = max(map(len, prompt_ids)), self.pad_to_multiple_of or 1
        rollout = _Rollout(recorder, self.temperature, prompt=-(-longest // step) * step)
        with rollout.noting():
            completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._rollout = rollout
        return completions, rollout.log_probs(completions)

    def _can_be_noted(self) -> bool:
        """Whether transformers samples the completions in this process, token by token."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            what = "vLLM" if self.use_vllm else "continuous batching"
            obstacle = f"{what} does not return the experts of a rollout to TRL"
        else:
            mode = self.generation_config.get_generation_mode()
            if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
                obstacle = f"trainer.generation_kwargs select {mode.value} instead of sampling"
            elif self.generation_config.use_cache is False:
                obstacle = (
                    "trainer.generation_kwargs.use_cache is false, so complete rows run again"
                )
            else:
                return True
        if self.replay:
            raise CaptureError(f"router.replay: {obstacle}")
        if not self._said:
            self._said = True
            log.warning("routing/changed_from_rollout is not logged: %s", obstacle)
        return False

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._rollout is not None:
            mask_BS = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            output[EXPERTS] = self._rollout.choice.experts(mask_BS)
            self._rollout = None
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._batch = inputs if EXPERTS in inputs else None
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._batch = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's forward of whole rows: for the loss, the old policy or the reference."""
        run = partial(
            super()._get_per_token_logps_and_entropies,
            model, input_ids, attention_mask, *args, **kwargs,
        )  # fmt: skip
        if self._policy is None or not self._is_policy(model):
            return run()
        recorder = self.callback.recorder
        layers = _layers(recorder)
        if self._batch is not None:
            mask_BC = self._batch["completion_mask"].bool()
            missing = attention_mask.shape[1] - mask_BC.shape[1]
            counted_BS = torch.nn.functional.pad(mask_BC, (missing, 0))
            against = AgainstRollout(self._batch[EXPERTS], counted_BS, layers, self.replay)
            with recorder.using(overrides=against.begin):
                result = run()
            self._log(against, result[0].detach(), self._batch["sampling_per_token_logps"], mask_BC)
            return result
        if self._rollout is not None and self.replay:  # the old policy, right after its rollout
            experts_BSLK = self._rollout.choice.experts(attention_mask)
            none_BS = torch.zeros_like(attention_mask, dtype=torch.bool)
            replay = AgainstRollout(experts_BSLK, none_BS, layers, True)
            with recorder.using(overrides=replay.begin):
                return run()
        return run()

    def _is_policy(self, model: Any) -> bool:
        """Whether ``model`` is the policy with its adapter on, not a reference."""
        assert self._policy is not None
        policy = causal_lm(self.callback.recorder.model)
        return causal_lm(model) is policy and self._policy.acts()

    def _log(
        self, against: AgainstRollout, trained_BC: Tensor, sampled_BC: Tensor, mask_BC: Tensor
    ) -> None:
        ratio = (trained_BC.double() - sampled_BC.double())[mask_BC]
        sums = [against.changed, ratio.abs().sum(), (ratio.exp() - 1 - ratio).sum()]
        counts = [against.compared, mask_BC.sum().double()]
        totals = self.accelerator.reduce(torch.stack([*sums, *counts]), reduction="sum")
        changed, difference, divergence, compared, tokens = totals.tolist()
        for name, total, count in (
            ("routing/changed_from_rollout", changed, compared),
            ("rollout/log_prob_difference", difference, tokens),
            ("rollout/kl", divergence, tokens),
        ):
            if count:
                self._metrics["train"][name].append(total / count)


def check_rollouts(recipe: Recipe, family: Family) -> None:
    """Refuse rollouts of a family whose class samples wrongly with padding.

    Raises:
        RecipeError: transformers would sample completions of prompts of different lengths.
    """
    if STAGES[recipe.stage].form != "prompts" or recipe.trainer.get("use_vllm"):
        return
    if not family.rows.generates_padded:
        raise RecipeError(
            f"stage: {recipe.stage} samples completions of several prompts at once, and "
            f"transformers' {family.title} computes wrong logits for a prompt with padding on its "
            "left; set trainer.use_vllm: true, or choose a stage without rollouts"
        )


def check_replay(family: Family) -> None:
    """Refuse a family whose expert weights do not follow from logits and selection.

    Raises:
        RecipeError: the message names what its router does instead.
    """
    if family.own_weights is not None:
        raise RecipeError(
            f"router.replay: not supported for {family.title}, whose weights cannot be computed "
            f"for given experts: {family.own_weights}; set router.replay: false"
        )


class _Rollout:
    """One rollout: its tokens' experts, and the log-probabilities of the sampled tokens.

    ``prompt`` is P, padding included.
    """

    def __init__(self, recorder: Recorder, temperature: float, prompt: int):
        self.recorder, self.temperature, self.prompt = recorder, temperature, prompt
        self.choice = RolloutChoice(_layers(recorder))
        self._ran = 0
        self._sampled: list[Tensor] = []
        self._last_BV: Tensor | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        model = causal_lm(self.recorder.model)
        hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        )
        try:
            with self.recorder.using(overrides=self.choice.begin):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        ids = kwargs["input_ids"]
        if self._ran >= self.prompt:  # a token that was sampled from what ran last
            self._keep(ids[:, -1])
        self._ran += ids.shape[1]

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        logits_BV = output.logits[:, -1].float()
        self._last_BV = (logits_BV / self.temperature).log_softmax(-1)

    def _keep(self, ids_B: Tensor) -> None:
        assert self._last_BV is not None
        self._sampled.append(self._last_BV.gather(1, ids_B[:, None]).squeeze(1))

    def log_probs(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probability of each token of the completions that the rollout has just returned.

        Raises:
            CaptureError: a forward ran something other than (part of) the prompt or one more token.
        """
        assert self._last_BV is not None
        if self._ran != self.prompt + len(self._sampled):
            raise CaptureError(
                f"the rollout ran {self._ran} places for a prompt of {self.prompt} and "
                f"{len(self._sampled)} tokens: it did not sample them one after the other"
            )
        longest = max(map(len, completions))
        if len(self._sampled) < longest:  # the last token was sampled and not run
            last = [ids[-1] if len(ids) == longest else 0 for ids in completions]
            self._keep(torch.tensor(last, device=self._last_BV.device))
        self._last_BV = None
        # Rows that have ended run on while those of other ranks have not, where these need them.
        self.choice.end(self.prompt + longest - 1)
        rows = torch.stack(self._sampled[:longest], dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]


def _layers(recorder: Recorder) -> list[int]:
    return [layer.index for layer in recorder.layers]
