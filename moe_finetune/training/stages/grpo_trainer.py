"""Mixins of TRL's GRPO trainer: train with pinned experts, save between rollouts.

Shape legend: B rows, P prompt positions, C completion positions, S = P + C, L MoE layers, K experts
selected.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.checkpoint.exported_bias import bias_name
from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.models import Family
from moe_finetune.moe.choice.pinned_choice import PinnedChoice, PinsChoice, RecordsChoice
from moe_finetune.moe.experts.active_adapter import TrainedAdapter
from moe_finetune.moe.layers import causal_lm, model_facts, moe_layers
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import Replay
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.callback.callback import SpecializationCallback
from moe_finetune.training.stages.vllm_rollouts import (
    ask_server,
    check_rolled_out,
    check_server,
    client_returns_experts,
    place,
    rolled_out,
    send_bias,
)

log = logging.getLogger(__name__)
_Trainer: Any = object
EXPERTS, MISSING = "pinned_experts", "pinned_missing"
"""Keys of a training batch: the tensors of a :class:`PinnedChoice`."""
BEFORE = {"old_policy": "old_per_token_logps", "rollout": "sampling_per_token_logps"}
"""Keys of a training batch: log-probabilities of its tokens before training, by whose they are."""
LOG_2 = math.log(2)


@contextmanager
def measured_from(reference: Callable[[], Any]) -> Iterator[None]:
    """The reference model of a trainer that is built inside the context is ``reference()``.

    TRL takes none for GRPO and reads one from the checkpoint's files, where ``beta`` needs it and
    no adapter can be disabled. Its routers would be bfloat16 where the policy has float32, and
    would select other experts.
    """
    from trl.trainer import grpo_trainer

    original = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = lambda *args, **kwargs: reference()
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = original


@dataclass
class Scoring:
    """The experts of a batch that is being generated and scored: of the old policy, or of vLLM.

    ``placed`` are vLLM's ``arrays`` in padded rows.
    """

    records: RecordsChoice | None = None
    arrays: list[np.ndarray] | None = None
    placed: PinnedChoice | None = None


class PinsExperts(_Trainer):
    """Mixin that trains each token with the experts of an earlier forward, and compares with it.

    Every log has, over the tokens of the loss, what the policy's log-probabilities differ by from
    the old policy's (``old_policy/...``, where TRL computes these) and, with vLLM, from the
    sampler's (``rollout/...``), with ``r = p_now / p_before``: ``log_prob_difference``, the mean of
    ``|log r|``; ``kl``, the mean of ``r - 1 - log r``, which estimates ``KL(before || now)``
    (Schulman 2020); and ``ratio_beyond_2``, the share of ratios outside [1/2, 2]. With replay it
    has ``routing/changed_from_old_policy`` or ``..._rollout``: the share of (token, layer) pairs
    whose router would select other experts than the pinned ones; and of a rollout
    ``rollout/missing_experts``, the share of the rows' tokens for which it has none.

    Attributes:
        callback: its recorder is on the model during training.
        replay: whose experts the tokens get.
    """

    callback: SpecializationCallback
    replay: Replay = "off"
    _policy: TrainedAdapter | None = None
    _scoring: Scoring | None = None
    _batch: Mapping[str, Any] | None = None

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        completions, log_probs = super()._generate_single_turn(prompt_ids, images, *args, **kwargs)
        if self._scoring is not None and self.replay == "rollout":
            if images is not None or self.tools or self._scoring.arrays is not None:
                raise CaptureError(
                    "router.replay: rollout: not supported with images or tools; set old_policy"
                )
            lengths = [len(p) + len(c) for p, c in zip(prompt_ids, completions, strict=True)]
            arrays = rolled_out(self.vllm_generation, len(prompt_ids))
            self._scoring.arrays = check_rolled_out(arrays, lengths, self._facts)
        return completions, log_probs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.replay == "off" or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        # Now, while the trained adapter is active, and not the reference.
        self._policy = self._policy or TrainedAdapter(self.callback.recorder.model)
        self._scoring = Scoring()
        try:
            output = super()._generate_and_score_completions(inputs)
            mask_BS = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            choice = self._earlier_choice(mask_BS)
        finally:
            self._scoring = None
        return {**output, EXPERTS: choice.index_BSLK, MISSING: choice.missing_BS}

    def _earlier_choice(self, mask_BS: Tensor) -> PinnedChoice:
        """The experts of the batch that is being generated and scored."""
        scoring = self._scoring
        assert scoring is not None
        if self.replay == "old_policy":
            if scoring.records is None or scoring.records.choice is None:
                raise CaptureError(
                    "router.replay: old_policy: TRL ran no forward of the old policy over this "
                    "batch; set router.replay: off"
                )
            return scoring.records.choice
        if scoring.arrays is None:
            raise CaptureError(
                "router.replay: rollout: vLLM did not sample this batch (rollout_func); set "
                "router.replay: old_policy"
            )
        if scoring.placed is None:
            scoring.placed = place(scoring.arrays, mask_BS, self._facts)
        return scoring.placed

    @property
    def _facts(self) -> ModelFacts:
        return model_facts(self.callback.recorder.model)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._batch = inputs if self.model.training else None
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
        recorder = self.callback.recorder
        layers = [layer.index for layer in recorder.layers]
        if self._batch is not None:
            return self._run_for_loss(run, self._batch, layers)
        if self._scoring is None or not self._is_policy(model):
            return run()
        if self.replay == "old_policy":
            self._scoring.records = RecordsChoice(attention_mask, layers)
            begin = self._scoring.records.begin
        else:
            choice = self._earlier_choice(attention_mask)
            begin = PinsChoice(choice, torch.zeros_like(choice.missing_BS), layers).begin
        with recorder.using(overrides=begin):
            return run()

    def _run_for_loss(self, run: Any, batch: Mapping[str, Any], layers: list[int]) -> Any:
        mask_BC = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            mask_BC = mask_BC & batch["tool_mask"].bool()
        if EXPERTS not in batch:
            result, sums = run(), {}
        else:
            choice = PinnedChoice(batch[EXPERTS], batch[MISSING])
            counted_BS = torch.zeros_like(choice.missing_BS)
            counted_BS[:, -mask_BC.shape[1] :] = mask_BC
            pins = PinsChoice(choice, counted_BS, layers)
            with self.callback.recorder.using(overrides=pins.begin):
                result = run()
            sums = {f"routing/changed_from_{self.replay}": (pins.changed, pins.compared)}
        if self.replay == "rollout":
            mask_BS = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
            ran_BS = mask_BS[:, 1:] & mask_BS[:, :-1]  # a row's last token never ran
            missing = (ran_BS & batch[MISSING][:, :-1]).sum().double()
            sums["rollout/missing_experts"] = missing, ran_BS.sum().double()
        self._log(result[0].detach(), batch, mask_BC, sums)
        return result

    def replay_from(self, recipe: Recipe, callback: SpecializationCallback) -> None:
        """Begin the replay that ``recipe`` asks for; called once the trainer is built."""
        self.callback, self.replay = callback, recipe.router.replay
        if self.replay != "rollout":
            return
        generation = self.vllm_generation
        if generation.mode == "server" and self.accelerator.is_main_process:
            client = generation.vllm_client
            check_server(client.get_server_info(), client.base_url)
            client_returns_experts(client)
        if recipe.method.bias_update is not None:
            send_bias(generation, self._learned_bias)

    def _learned_bias(self) -> dict[str, Tensor]:
        """The loss-free bias in training, by name of a checkpoint's tensor."""
        specialization = self.callback.specialization
        assert specialization is not None and specialization.balancer is not None
        layers = moe_layers(specialization.model)
        values = specialization.balancer.effective(layers)
        names = [
            name.replace("original_module.", "").replace("base_layer.", "")  # PEFT's wrappers
            for name in causal_lm(specialization.model).state_dict()
        ]
        return {bias_name(at.places, at.index, names): values[f"bias.{at.index}"] for at in layers}

    def _is_policy(self, model: Any) -> bool:
        assert self._policy is not None
        policy = causal_lm(self.callback.recorder.model)
        return causal_lm(model) is policy and self._policy.acts()

    def _log(
        self,
        now_BC: Tensor,
        batch: Mapping[str, Any],
        mask_BC: Tensor,
        sums: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        """Log ``sums``, pairs of a total and a count, and the differences of log-probabilities."""
        for whose, key in BEFORE.items():
            if key not in batch:
                continue
            log_ratio_BC = now_BC.double() - batch[key].double()
            counts_BC = mask_BC & ~log_ratio_BC.isnan()  # vLLM could not score all tokens
            log_ratio_BC = log_ratio_BC.masked_fill(~counts_BC, 0.0)
            tokens = counts_BC.sum().double()
            sums |= {
                f"{whose}/log_prob_difference": (log_ratio_BC.abs().sum(), tokens),
                f"{whose}/kl": ((log_ratio_BC.exp() - 1 - log_ratio_BC).sum(), tokens),
                f"{whose}/ratio_beyond_2": ((log_ratio_BC.abs() > LOG_2).sum().double(), tokens),
            }
        if not sums:
            return
        pairs = torch.stack([torch.stack(pair) for pair in sums.values()])
        totals = self.accelerator.reduce(pairs, reduction="sum").tolist()
        for name, (total, count) in zip(sums, totals, strict=True):
            if count:
                self._metrics["train"][name].append(total / count)


class SavesBetweenGenerations(_Trainer):
    """Mixin that moves saves to the ends of TRL's generation batches.

    TRL may train on a batch of completions several times; a save waits, so that none have to be
    kept. The order of prompts comes from a generator that no checkpoint stores: it is drawn again.
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
            self._step = self._trained_micro_batches()
            if not self.can_save():
                log.warning(
                    "the checkpoint is inside a generation batch, because its run ended there or "
                    "had another number of processes; the batch's completions are sampled again"
                )

    def _trained_micro_batches(self) -> int:
        """Those of all steps so far; an epoch's last step may have fewer than the others."""
        window = self.args.gradient_accumulation_steps
        an_epoch = len(self.callback_handler.train_dataloader)
        epochs, steps = divmod(self.state.global_step, math.ceil(an_epoch / window))
        return epochs * an_epoch + steps * window

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
    """Refuse rollouts of a family whose class samples wrongly with padding."""
    if STAGES[recipe.stage].form != "prompts" or recipe.trainer.get("use_vllm"):
        return
    if not family.rows.generates_padded:
        raise RecipeError(
            f"stage: {recipe.stage} samples completions of several prompts at once, and "
            f"transformers' {family.title} computes wrong logits for a prompt with padding on its "
            "left; set trainer.use_vllm: true, or choose a stage without rollouts"
        )


def check_replay(recipe: Recipe, family: Family) -> None:
    """Refuse a family whose experts cannot be replayed, or whose rollouts lack the learned bias."""
    replay = recipe.router.replay
    if replay != "off" and family.own_weights is not None:
        raise RecipeError(
            f"router.replay: not supported for {family.title}, whose weights cannot be computed "
            f"for given experts: {family.own_weights}; set router.replay: off"
        )
    biased = recipe.method.bias_update is not None
    if replay == "rollout" and biased and family.bias_export != "tensor":
        raise RecipeError(
            f"router.replay: rollout: vLLM's {family.title} has no tensor for the learned bias of "
            "method.bias_update, so it would sample without it; set router.replay: old_policy, or "
            "leave the bias out"
        )


def check_engine(recipe: Recipe, arguments: Any) -> None:
    """Refuse a replay for which TRL runs no forward, or whose server returns no experts."""
    replay = recipe.router.replay
    if replay == "off":
        return
    if replay == "rollout":
        if arguments.vllm_mode == "server":
            ask_server(arguments)
        return
    corrected = arguments.use_vllm and arguments.vllm_importance_sampling_correction
    batch = arguments.steps_per_generation * arguments.num_iterations
    if arguments.gradient_accumulation_steps % batch == 0 and not corrected:
        raise RecipeError(
            "router.replay: old_policy: each batch is trained once, so there is nothing to replay; "
            "set router.replay: off, or train on a batch several times (trainer.num_iterations: 2)"
        )
