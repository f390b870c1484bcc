"""The training stage of a run: model, adapter, losses, checkpoints, routing before and after."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, set_seed

from moe_finetune.checkpoint.adapters.files import PREFIX
from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError, DiskSpaceError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.experts.lora_shared import SharedOuterLora
from moe_finetune.moe.large.offload import offload_experts
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.callback.callback import add_callbacks
from moe_finetune.training.callback.early_ends import EndsAsPlanned, StopOnSignal
from moe_finetune.training.measures.routing_samples import sample_examples, take_snapshot
from moe_finetune.training.run.checkpoint_and_rows import Start, start_model
from moe_finetune.training.run.chosen_experts import chosen_experts
from moe_finetune.training.run.trainer import build_trainer
from moe_finetune.training.save_and_resume.gathered_weights import live_weights
from moe_finetune.training.save_and_resume.resumable_trainer import find_checkpoint
from moe_finetune.training.save_and_resume.save_trained import name_base, run_metadata, save_trained

if TYPE_CHECKING:
    from torch import Tensor

    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.training.run.checkpoint_and_rows import Inputs

log = logging.getLogger(__name__)


def train(recipe: Recipe, run: RunFolder, inputs: Inputs, resume: bool = False) -> None:
    """Fine-tune and write the adapter (or, without LoRA, the model) to the run folder."""
    start = inputs.start
    checkpoint = find_checkpoint(run.checkpoints) if resume else None
    resumed = checkpoint is not None
    model = trainable_model(start, lambda base: chosen_experts(base, inputs, run, resumed))
    trainer, callback = build_trainer(
        recipe,
        run.path,
        model,
        start.tokenizer,
        inputs.train,
        inputs.validation,
        lambda: reference_model(start),
        checkpoint,
    )
    if start.adapted:
        name_base(model, recipe)  # checkpoints name it, too
        callback.run_metadata = run_metadata(recipe, start.checkpoint)
    if inputs.validation is None:
        log.warning(
            "data.validation is not set: routing before and after is measured on training data"
        )
    take = functools.partial(
        take_snapshot,
        model,
        sample_examples(inputs.rows.sources, recipe.data.max_length),
        tokenizer=start.tokenizer,
        data="train" if inputs.validation is None else "validation",
    )
    # All ranks take it, because the experts may be spread over them.
    if ranks.any_rank(ranks.rank() == 0 and not run.routing_before.exists()):
        take(run.routing_before)

    def save(folder: RunFolder) -> None:
        method = callback.specialization
        assert method is not None
        save_trained(
            model,
            start.tokenizer,
            recipe,
            folder.path,
            balancer=method.balancer,
            metadata=callback.run_metadata,
            base=start.checkpoint,
        )

    ending = EndsAsPlanned()
    add_callbacks(trainer, KeepSteps(recipe, run, save), ending)
    if checkpoint:
        trainer.args.eval_on_start = False
    with StopOnSignal(run.path, can_save=getattr(trainer, "can_save", None)) as stop:
        add_callbacks(trainer, stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            callback.close()
    ending.check(trainer.state)
    assert callback.specialization is not None
    take(run.routing_after, perturbation=callback.specialization.perturbation)
    save(run)


class KeepSteps(TrainerCallback):
    """Saves the trained model, on every rank, every ``evaluation.every`` steps but the last.

    Training checkpoints are no substitute: sharded ones cannot be opened, and old ones are deleted.
    """

    def __init__(self, recipe: Recipe, run: RunFolder, save: Any):
        self.every = recipe.evaluation and recipe.evaluation.every
        self.run, self.save = run, save

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if not self.every or step % self.every or step >= state.max_steps:
            return
        folder = self.run.step(step)
        # A resumed run passes steps that it saved before; only rank 0 writes.
        if ranks.any_rank(ranks.rank() == 0 and folder.trained):
            return
        try:
            self.save(folder)
        except (DiskSpaceError, OSError) as problem:  # of rank 0, for whom the others wait
            ranks.barrier()
            log.warning(
                "WARNING: the model after step %d could not be kept and will not be scored (%s)",
                step,
                problem,
            )


def trainable_model(
    start: Start, choose: Callable[[Any], Mapping[int, list[int]] | None] = lambda base: None
) -> Any:
    """The model with its adapter before training: new factors, or those of ``lora.start``.

    ``choose``: the experts that get LoRA, from the model without an adapter.
    """
    recipe = start.recipe
    model = start_model(start)
    chosen = choose(model)
    set_seed(recipe.seed)
    model = add_lora(model, recipe.lora, recipe.router.train, recipe.router.layers, chosen)
    continued(start, model)
    if recipe.model.offload == "experts":
        offload_experts(model)
    log.debug("LoRA coverage\n%s", lora_coverage(model).table())
    return model


def reference_model(start: Start) -> Any:
    """What a run without an adapter is measured from: the model as it starts, without gradients.

    Routers that alone train compute in float32 here, too, and select the same experts.
    """
    recipe = start.recipe
    model = add_lora(start_model(start), recipe.lora, recipe.router.train, recipe.router.layers)
    return model.requires_grad_(False)


def continued(start: Start, model: nn.Module) -> None:
    """Give ``model`` the factors of ``lora.start``, if the recipe has it."""
    lora = start.recipe.lora
    if start.checkpoint is not None and lora is not None and lora.start is not None:
        continue_adapter(model, Path(lora.start), start.checkpoint)


def _differs(path: Path, key: str, side: str) -> AdapterError:
    return AdapterError(
        f"{path}: '{key}.lora_{side}.weight' differs between experts, and lora.shared_outer has "
        "one for all of them; leave the key out to train on from this adapter"
    )


def continue_adapter(model: nn.Module, path: Path, checkpoint: Checkpoint) -> None:
    """Copy the weights of any program's adapter into the factors that ``add_lora`` gave.

    The model then computes the same as base and adapter. Directions that the adapter does not have
    start fresh; so do factors on parts that it does not adapt.
    """
    from moe_finetune.checkpoint.adapters.in_peft import peft_form
    from moe_finetune.checkpoint.adapters.peft_model import modules_of

    adapter = peft_form(check_adapter(path, checkpoint))
    updates = {update.name: update for update in adapter.low_rank}
    unread = set(adapter.tensors)
    live = {
        name.removeprefix(PREFIX): tensor.detach() for name, tensor in live_weights(model).items()
    }
    for lora in modules_of(model):
        update = updates.get(lora.loaded)
        module = lora.module
        key = lora.path
        if update is None or lora.embedding:
            continue
        a, b = (read_tensor(adapter.tensors[factor]).float() for factor in (update.a, update.b))
        unread -= {update.a, update.b}
        experts: Any = getattr(module, "num_experts", 1)
        rank, target_rank = a.shape[0] // experts, module.r[model.active_adapter]
        if rank > target_rank:
            raise AdapterError(
                f"{path}: '{key}' has rank {rank}, but the recipe gives it {target_rank}; set "
                f"lora.rank or lora.parts to {rank} or more"
            )
        scale = update.scale / module.scaling[model.active_adapter]
        # PEFT packs A as (experts x rank, inputs), and B as (outputs, rank x experts).
        a_ErI, b_OrE = a.view(experts, rank, -1), b.view(len(b), rank, experts)
        if isinstance(module, SharedOuterLora):
            if not (a_ErI == a_ErI[:1]).all() and module.shared == "A":
                raise _differs(path, key, "A")
            if not (b_OrE == b_OrE[..., :1]).all() and module.shared == "B":
                raise _differs(path, key, "B")
            a_ErI, b_OrE = (a_ErI[:1], b_OrE) if module.shared == "A" else (a_ErI, b_OrE[..., :1])
        target: Tensor = live[f"{key}.lora_A.weight"].view(len(a_ErI), target_rank, -1)
        target[:, :rank] = a_ErI.to(target)
        target = live[f"{key}.lora_B.weight"]
        target = target.view(len(target), target_rank, -1)
        target[:, :rank] = (b_OrE * scale).to(target)
    targets = {name.replace(".base_layer.", "."): tensor for name, tensor in live.items()}
    for saved in adapter.replaced:
        value = read_tensor(adapter.tensors[saved.key]).float()
        if saved.name in targets and targets[saved.name].shape == value.shape:
            targets[saved.name].copy_(value)
            unread.remove(saved.key)
    if unread:
        raise AdapterError(
            f"{path}: has '{min(unread)}' ({len(unread)} such tensors), which the recipe "
            "does not train; add its part to lora.targets, set router.train or "
            "lora.shared_expert_gate, or merge the adapter and train from the merged checkpoint"
        )
