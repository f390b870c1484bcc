"""Combinations of keys that cannot run, and keys that ``--resume`` may not change."""

import re
from collections.abc import Callable, Container, Iterator
from fnmatch import fnmatchcase
from typing import Any

from moe_finetune.errors import RecipeError
from moe_finetune.recipe.section_base import leaves
from moe_finetune.recipe.stages import STAGES

BEST = "load_best_model_at_end"
ADAPTER = "add a `lora:` section with a rank"
SELECT_FIRST = (
    "choose them before the run ('moe-finetune select TRACE --top 25%') and give the file"
)


def conflicts(recipe: Any) -> Iterator[str]:
    """Combinations that cannot run, one line each, starting with the key to change."""
    yield from _of_weights(recipe)
    yield from _of_lora(recipe)
    yield from _of_stage(recipe)
    yield from _of_data(recipe)
    yield from _of_trainer(recipe.trainer)
    evaluation = recipe.evaluation
    merge = recipe.export.merge
    best = recipe.trainer.get(BEST)
    if recipe.export.verify and not merge:
        yield "export.verify: checks the merged checkpoint; set export.merge: true"
    if evaluation and not merge:
        yield "evaluation: scores the merged checkpoint; set export.merge: true"
    if evaluation and evaluation.every and best:
        yield f"evaluation.every: trainer.{BEST} returns to an earlier step; leave one of them out"
    for key in ("eval_strategy", BEST):
        value = recipe.trainer.get(key)
        if recipe.data.validation is None and value not in (None, False, "no"):
            yield f"trainer.{key}: {value!r} needs data.validation"


def _of_weights(recipe: Any) -> Iterator[str]:
    model = recipe.model
    lora = recipe.lora
    router = recipe.router.train
    if model.init == "random":
        if lora is not None:
            yield "lora: an adapter needs trained weights, not random ones; set lora: null"
        if router == "frozen":
            yield "router.train: 'frozen' would leave the routers random; set it to full"
        if STAGES[recipe.stage].form != "tokens":
            yield f"model.init: 'random' cannot start with stage {recipe.stage}; pretrain first"
        if model.quantization != "none":
            yield "model.quantization: needs a checkpoint; with model.init: random set it to none"
    elif model.config:
        yield "model.config: only valid for a new model; set model.init: random"
    if model.quantization != "none" and lora is None and model.init != "random":
        yield f"model.quantization: quantized weights do not train; {ADAPTER}, or set it to none"
    if model.offload != "none" and lora is None:
        yield f"model.offload: weights that train stay on the GPU; {ADAPTER}, or set it to none"
    if recipe.method.router_gradient == "dense":
        if router == "frozen":
            yield "router.train: frozen, but method.router_gradient: dense trains routers; set full"
        if recipe.parallel.experts != 1:
            yield "method.router_gradient: dense needs all experts on each rank; set selected"
    if router == "lora" and lora is None:
        yield f"router.train: lora needs an adapter; {ADAPTER}"
    if recipe.parallel.experts != 1:
        spread = f"parallel.experts: {recipe.parallel.experts}"
        if lora is None or not lora.adapts(router):
            yield f"{spread} keeps experts frozen; {ADAPTER} and targets, or use FSDP2 instead"
        if model.offload != "none":
            yield f"{spread} already leaves each GPU a part of the experts; set model.offload: none"
        for key in ("torch_compile", "fsdp", "use_vllm"):
            if recipe.trainer.get(key):
                yield f"trainer.{key}: cannot be combined with {spread}; leave one of them out"


def _of_lora(recipe: Any) -> Iterator[str]:
    lora, router = recipe.lora, recipe.router.train
    if router == "frozen" and recipe.router.layers != "all":
        yield "router.layers: no router trains; set router.train: full or lora, or leave it out"
    if lora is None:
        return
    others = {"router": router, "shared_expert_gate": lora.shared_expert_gate}
    adapted = {*lora.targets, *(part for part, how in others.items() if how == "lora")}
    if lora.rank is None:
        yield "lora.rank: required, but missing; set a whole number such as 32"
    if not lora.targets and set(others.values()) == {"frozen"}:
        yield "lora.targets: nothing trains; add a target, or set router.train: full"
    if lora.experts != "all" and "experts" not in lora.targets:
        yield "lora.experts: needs 'experts' in lora.targets; add it, or leave lora.experts out"
    measured = {"model.offload": recipe.model.offload != "none",
                "parallel.experts": recipe.parallel.experts != 1}  # fmt: skip
    for key in (key for key, is_set in measured.items() if is_set):
        if not isinstance(lora.experts, str):
            yield f"lora.experts: cannot be measured with {key}; {SELECT_FIRST}"
    for part, options in lora.parts.items():
        if options.rank == "auto" and part != "experts":
            yield f"lora.parts.{part}.rank: 'auto' is for experts; set a whole number such as 8"
        if part not in adapted:
            keys = {"router": "router.train", "shared_expert_gate": "lora.shared_expert_gate"}
            remedy = f"set {keys[part]}: lora" if part in keys else "add it to lora.targets"
            yield f"lora.parts.{part}: this part has no adapter; {remedy}, or leave it out"
    without_start = {
        "lora.experts": lora.experts != "all",
        "model.offload": recipe.model.offload != "none",
        "parallel.experts": recipe.parallel.experts != 1,
    }
    for key in (key for key, is_set in without_start.items() if is_set and lora.start is not None):
        yield f"lora.start: cannot be combined with {key}; leave one out, or start from a merge"


def _of_stage(recipe: Any) -> Iterator[str]:
    stage = recipe.stage
    if stage == "grpo" and not recipe.rewards:
        yield "rewards: stage grpo needs exact_match, boxed, code, or one of your plugin"
    replay = recipe.router.replay
    for key, value in (("rewards", recipe.rewards), ("router.replay", replay != "off")):
        if value and stage != "grpo":
            yield f"{key}: only valid for stage grpo, and this is stage {stage}; leave it out"
    if replay == "rollout" and not recipe.trainer.get("use_vllm"):
        yield (
            "router.replay: rollout: only vLLM returns the experts of a rollout; set "
            "trainer.use_vllm: true, or router.replay: old_policy"
        )
    if replay != "off" and recipe.method.perturbations.random_second_choice:
        yield (
            "router.replay: method.perturbations.random_second_choice draws experts of its own; "
            "leave one out"
        )


def _of_data(recipe: Any) -> Iterator[str]:
    data, stage = recipe.data, STAGES[recipe.stage]
    if stage.name == "pretrain" and data.format != "text":
        yield "data.format: stage pretrain needs text, not prompts and answers; set it to text"
    if stage.form != "tokens" and data.packing:
        yield f"data.packing: stage {stage.name} does not pack; leave it out"
    if stage.form != "tokens" and data.format != "auto":
        yield f"data.format: stage {stage.name} has its own format; leave it out"
    if data.columns and data.template:
        yield "data.template: cannot be combined with data.columns; keep one of them"
    if data.format == "text" and data.completion_only_loss:
        yield "data.completion_only_loss: true needs completions, and data.format is 'text'"
    if data.packing and data.packing_strategy != "bfd" and data.format not in ("text", "auto"):
        yield f"data.packing_strategy: only bfd keeps {data.format} whole; set it to bfd"


def _of_trainer(trainer: dict[str, Any]) -> Iterator[str]:
    """Keys that nothing reads."""
    if trainer.get("fsdp_config") and not trainer.get("fsdp"):
        yield "trainer.fsdp_config: is read with trainer.fsdp only; see recipes/hardware for FSDP2"
    reports = trainer.get("report_to") or ()
    if not {"trackio", "all"} & {*([reports] if isinstance(reports, str) else reports)}:
        for key in (key for key in trainer if key.startswith("trackio_") and trainer[key]):
            yield f"trainer.{key}: is read with trackio in trainer.report_to only; add it there"


CHANGEABLE = (
    *("evaluation*", "export.*", "method.strength.*", "data.num_proc"),
    *("trainer.eval_*", "trainer.log_*", "trainer.logging_*", "trainer.save_*"),
    *("trainer.report_to*", "trainer.run_name", "trainer.disable_tqdm"),
    *("trainer.per_device_eval_batch_size", "trainer.dataloader_num_workers"),
)
"""Keys that do not affect steps already trained."""


_SOURCE = re.compile(r"(data\.(?:train|validation))(?:\.\d+)?(?:\.path)?")
"""Keys with the path or hub id of rows; of a list, one for each source."""


def check_resumable(
    saved: Any,
    resumed: Any,
    where: str,
    by_content: Container[str] = (),
    same_trainer: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """The dotted keys that differ; none of them changes steps that are already trained.

    Args:
        where: the file of ``saved``.
        by_content: keys whose content is compared elsewhere, so that paths need not be equal.
        same_trainer: whether a key of ``trainer:`` that only one recipe has is set to its default.
    """
    old, new = (dict(leaves(recipe.to_mapping())) for recipe in (saved, resumed))
    _name_sources_alike(old, new)
    _name_sources_alike(new, old)
    changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    changed = [
        key
        for key in changed
        if (key in old and key in new)
        or not key.startswith("trainer.")
        or not same_trainer(key.split(".")[1])
    ]

    def is_content(key: str) -> bool:
        source = _SOURCE.fullmatch(key)
        texts = isinstance(old.get(key), str) and isinstance(new.get(key), str)
        return texts and (source[1] if source else key) in by_content

    fixed = [
        key
        for key in changed
        if not is_content(key) and not any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)
    ]
    if fixed:
        lines = [f"\n  {key}: {_short(old, key)}, now {_short(new, key)}" for key in fixed]
        raise RecipeError(
            f"--resume: the recipe differs from {where}, which started this run, in keys that "
            f"affect the steps already trained:{''.join(lines)}\n"
            "restore them, or choose another --output"
        )
    return changed


def _name_sources_alike(values: dict[str, Any], others: Container[str]) -> None:
    """Give a source's path the key that it has in ``others``: it may be a text or a mapping, and
    alone or in a list.
    """
    for key in [key for key in values if _SOURCE.fullmatch(key) and key not in others]:
        for longer in (f"{key}.path", f"{key}.0", f"{key}.0.path"):
            if longer in others:
                values[longer] = values.pop(key)
                break


def _short(values: dict[str, Any], key: str) -> str:
    return f"{values[key]!r:.60}" if key in values else "not set"
