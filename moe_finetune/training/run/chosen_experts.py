"""The experts that get LoRA, measured on the run's own training rows before the adapter is made.

HELLoRA (arXiv 2605.18795) and MoE-Sieve (arXiv 2603.24044) take a share of each layer's experts,
ESFT (arXiv 2407.01906) those that cover a share of the tokens.

Shape legend: T tokens, L MoE layers, E routed experts, K selected.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
from torch import distributed, nn

from moe_finetune.data.preference_and_prompt_rows import measured_row
from moe_finetune.errors import CheckpointError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.lora.select import ExpertSelection, share_of, top_experts, top_p_experts
from moe_finetune.losses.objective import LayerLoss
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.layers import family_in, model_facts
from moe_finetune.moe.recorder.observe import observed
from moe_finetune.recipe.sections import ChosenExperts
from moe_finetune.training import ranks
from moe_finetune.training.measures.routing_samples import Example, first_rows, forward_all
from moe_finetune.training.memory.plan import GIB, plan_recipe
from moe_finetune.training.run.checkpoint_and_rows import Inputs

log = logging.getLogger(__name__)
ROWS = 1024
"""Most rows that are measured."""
TOKENS = 1 << 18
"""Most tokens: rows of two thousand are enough of a sample before there are a thousand."""


def chosen_experts(
    model: nn.Module, inputs: Inputs, run: RunFolder, resumed: bool
) -> dict[int, list[int]] | None:
    """Experts by decoder layer where ``lora.experts`` asks for a measurement, else None.

    They are written into the run, and read from there ever after: a training that goes on has the
    factors of these experts. Every rank must call this.
    """
    start = inputs.start
    options = None if start.recipe.lora is None else start.recipe.lora.experts
    if not isinstance(options, ChosenExperts):
        return None
    facts = model_facts(model)
    if ranks.any_rank(run.experts.is_file()):
        selection = ExpertSelection.read(run.experts)
        selection.check(family_in(model).model_type, facts.moe_layers, facts.num_experts)
    elif resumed:
        raise CheckpointError(
            f"{run.experts}: is missing, and says which experts the checkpoints have factors for; "
            "restore it, or start the run again in a new folder"
        )
    else:
        selection = measure(model, inputs, options)
        if ranks.rank() == 0:
            selection.write(run.experts)
    if ranks.rank() == 0:
        run.note(experts=describe(selection))
        log.info("lora.experts: %s", describe(selection))
        _plan_again(inputs, options, selection)
    return selection.experts


def measure(model: nn.Module, inputs: Inputs, options: ChosenExperts) -> ExpertSelection:
    """One forward of at most :data:`ROWS` training rows, divided among the ranks."""
    facts = model_facts(model)
    position = {layer: row for row, layer in enumerate(facts.moe_layers)}
    if torch.cuda.is_available() and next(model.parameters()).device.type == "cpu":
        model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
    size = len(position), facts.num_experts
    counts_LE = torch.zeros(size, dtype=torch.float64)
    weights_LE = torch.zeros(size, dtype=torch.float64)

    def add(record: RoutingRecord, _: LayerLoss) -> None:
        row = position[record.layer]
        ids_n = record.index_TK[record.mask_T].flatten().cpu()
        weights_n = record.weights_TK[record.mask_T].flatten().double().cpu()
        counts_LE[row] += torch.bincount(ids_n, minlength=facts.num_experts)
        weights_LE[row] += torch.bincount(ids_n, weights_n, minlength=facts.num_experts)

    rows = training_rows(inputs)
    of_rank = rows[ranks.rank() :: ranks.world_size()]
    with observed(model, add):
        forward_all(model, [row["input_ids"] for row in of_rank])
    if ranks.world_size() > 1:
        for sums_LE in (counts_LE, weights_LE):
            on_device = sums_LE.to(ranks.device())
            distributed.all_reduce(on_device)
            sums_LE.copy_(on_device)
    share_LE = share_of(counts_LE.numpy())
    if options.by == "random":
        assert options.top is not None
        # Drawn scores have the same number of experts as counts.
        drawn_LE = np.random.default_rng(inputs.start.recipe.seed).random(size)
        chosen = top_experts(drawn_LE, options.top)
    elif options.top is not None:
        chosen = top_experts(share_LE, options.top)
    else:
        assert options.top_p is not None
        chosen = top_p_experts(share_LE, options.top_p)
    carried_LE = share_of(weights_LE.numpy())
    carried = sum(row[ids].sum() for row, ids in zip(carried_LE, chosen, strict=True)) / size[0]
    return ExpertSelection(
        experts=dict(zip(facts.moe_layers, chosen, strict=True)),
        model_type=family_in(model).model_type,
        num_experts=facts.num_experts,
        score="token" if options.by == "counts" else "random",
        top_p=options.top_p,
        top=options.top,
        weight_share=float(carried),
        tokens=round(float(counts_LE[0].sum()) / facts.top_k),
    )


def training_rows(inputs: Inputs) -> list[Example]:
    """Rows drawn by the seed: tokens, of a preference those of the prompt and the chosen answer,
    and of a prompt its own.
    """
    start, train = inputs.start, inputs.train
    generator = np.random.default_rng(start.recipe.seed)
    count = min(ROWS, len(train))
    rows = train.select(sorted(generator.choice(len(train), count, replace=False)))
    limit = start.recipe.data.max_length
    if "input_ids" in rows.column_names:
        formed = ({"input_ids": row["input_ids"][:limit]} for row in rows)
    else:
        formed = (measured_row(row, start.tokenizer, limit) for row in rows)
    return first_rows(formed, TOKENS)


def describe(selection: ExpertSelection) -> str:
    """The choice as a sentence, for the log and the page."""
    chosen = sum(map(len, selection.experts.values()))
    total = len(selection.experts) * (selection.num_experts or 0)
    way = "drawn at random" if selection.score == "random" else "chosen by their tokens"
    return (
        f"{chosen:,} of {total:,} experts get LoRA, {way}; they carry {selection.weight_share:.0%} "
        f"of the routing weight of {selection.tokens:,} training tokens"
    )


def _plan_again(inputs: Inputs, options: ChosenExperts, selection: ExpertSelection) -> None:
    """Log the memory with the experts that ``top_p`` chose, which was planned as that of all."""
    if options.top_p is None or inputs.memory is None:
        return
    start = inputs.start
    device = inputs.memory.device
    lengths = inputs.rows.lengths
    plan = plan_recipe(start.config, start.recipe, device, 1, selection.experts, lengths)
    log.info("memory with these experts: %.2f GiB, not %.2f of all", plan.total / GIB,
             inputs.memory.total / GIB)  # fmt: skip
