"""Mixins of TRL's GRPO trainer: compare and replay rollouts' experts, save between rollouts.

Shape legend: B rows, P prompt positions, C completion positions, S = P + C, L MoE layers, K experts
selected.
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
TOKEN_BY_TOKEN = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
EXPERTS = "rollout_experts"
"""Key of a training batch: experts as of :meth:`RolloutChoice.experts`, from any rollout."""


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
        self._note_policy()
        recorder = self.callback.recorder
        longest, step = max(map(len, prompt_ids)), self.pad_to_multiple_of or 1
        rollout = _Rollout(recorder, self.temperature, prompt=-(-longest // step) * step)
        with rollout.noting():
            completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._rollout = rollout
        return completions, rollout.log_probs(completions)

    def _can_be_noted(self) -> bool:
        """Whether transformers samples the completions in this process, token by token."""
        obstacle = ""
        if self.use_vllm or self.use_transformers_continuous_batching:
            what = "vLLM" if self.use_vllm else "continuous batching"
            obstacle = f"{what} does not return the experts of a rollout to TRL"
        elif (mode := self.generation_config.get_generation_mode()) not in TOKEN_BY_TOKEN:
            obstacle = f"trainer.generation_kwargs select {mode.value} instead of sampling"
        elif self.generation_config.use_cache is False:
            obstacle = "trainer.generation_kwargs.use_cache is false, so complete rows run again"
        if not obstacle:
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
        if EXPERTS in inputs:
            self._note_policy()
            self._batch = inputs
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
        batch = self._batch
        # Without a batch, the old policy runs right after its rollout.
        replays = batch is not None or (self.replay and self._rollout is not None)
        if not (replays and self._is_policy(model)):
            return run()
        counted_BS = torch.zeros_like(attention_mask, dtype=torch.bool)
        if batch is not None:
            mask_BC = batch["completion_mask"].bool()
            counted_BS[:, -mask_BC.shape[1] :] = mask_BC
            experts_BSLK = batch[EXPERTS]
        else:
            assert self._rollout is not None
            experts_BSLK = self._rollout.choice.experts(attention_mask)
        recorder = self.callback.recorder
        against = AgainstRollout(experts_BSLK, counted_BS, _layers(recorder), self.replay)
        with recorder.using(overrides=against.begin):
            result = run()
        if batch is not None:
            sampled_BC = batch["sampling_per_token_logps"]
            self._log(against, result[0].detach(), sampled_BC, mask_BC)
        return result

    def _note_policy(self) -> None:
        """Note the adapter that trains; called where it is active, not the reference."""
        self._policy = self._policy or TrainedAdapter(self.callback.recorder.model)

    def _is_policy(self, model: Any) -> bool:
        assert self._policy is not None
        policy = causal_lm(self.callback.recorder.model)
        return causal_lm(model) is policy and self._policy.acts()

    def _log(
        self, against: AgainstRollout, trained_BC: Tensor, sampled_BC: Tensor, mask_BC: Tensor
    ) -> None:
        ratio = (trained_BC.double() - sampled_BC.double())[mask_BC]
        tokens = mask_BC.sum().double()
        sums = {
            "routing/changed_from_rollout": (against.changed, against.compared),
            "rollout/log_prob_difference": (ratio.abs().sum(), tokens),
            "rollout/kl": ((ratio.exp() - 1 - ratio).sum(), tokens),
        }
        pairs = torch.stack([torch.stack(pair) for pair in sums.values()])
        totals = self.accelerator.reduce(pairs, reduction="sum").tolist()
        for name, (total, count) in zip(sums, totals, strict=True):
            if count:
                self._metrics["train"][name].append(total / count)


class SavesBetweenGenerations(_Trainer):
    """Mixin that moves saves to the ends of TRL's generation batches.

    TRL samples completions for several micro-batches at once, and may train on them several times.
    A save inside waits for the end, so that no completions have to be saved. The order of prompts
    comes from a generator that no checkpoint stores, and is drawn again for the epoch.
    """

    _save_waits = False

    def can_save(self) -> bool:
        """Whether the next step samples new completions, or none follows."""
        window = self.args.gradient_accumulation_steps
        batch = getattr(self.args, "steps_per_generation", window)
        batch *= getattr(self, "num_iterations", 1)
        return self._step % batch == 0 or self.state.global_step >= self.state.max_steps

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        due = self._save_waits or self.control.should_save
        self.control.should_save = due and self.can_save()
        self._save_waits = due and not self.control.should_save
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            if not self.can_save():
                log.warning(
                    "the checkpoint is inside a generation batch, because its run ended there or "
                    "had another number of processes; the batch's completions are sampled again"
                )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        sampler.set_epoch = partial(_order_of_epoch, sampler)  # the Trainer calls it
        return sampler


def _order_of_epoch(sampler: Any, epoch: int) -> None:
    """Give a ``RepeatSampler`` the order that an uninterrupted run would have in ``epoch``."""
    if sampler.shuffle:
        sampler.generator.manual_seed(sampler.seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


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
        hook = model.register_forward_hook(self._after, with_kwargs=True)
        try:
            with self.recorder.using(overrides=self.choice.begin):
                yield
        finally:
            hook.remove()

    def _after(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        ids = kwargs["input_ids"]
        if self._ran >= self.prompt:  # a token that was sampled from what ran before
            self._keep(ids[:, -1])
        self._ran += ids.shape[1]
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
