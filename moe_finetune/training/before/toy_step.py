"""Two steps of the stage's own trainer on a toy, in a child process, before weights load.

TRL checks many values only when its trainer is built, or in the first loss. The toy has the run's
tokenizer, and it accumulates, evaluates and saves where the recipe does, because values may need
that; it runs on a CPU, without the launcher, loggers, vLLM or rewards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.stages import CHECKPOINTING, STAGES
from moe_finetune.recipe.yaml_tree import Tree

if TYPE_CHECKING:
    from moe_finetune.training.run.checkpoint_and_rows import Start

log = logging.getLogger(__name__)
COMPLETION = 4
"""Tokens that the toy generates."""
SECONDS = 120.0
"""Time to wait for the child, imports included; a run then starts without its verdict."""
CHECKED = (
    *("learning_rate", "per_device_*_batch_size", "gradient_accumulation_steps", "max_steps"),
    *("num_train_epochs", "warmup_steps", "weight_decay", "adam_*", "max_grad_norm", "logging_*"),
    *("eval_steps", "eval_delay", "eval_on_start", "save_steps", "save_total_limit", "report_to"),
    *("run_name", "disable_tqdm", "seed", "data_seed", "bf16", "load_best_model_at_end"),
    *("beta", "num_generations", "max_completion_length", "temperature", "dataloader_*"),
    *("gradient_checkpointing", "activation_checkpointing", "full_determinism"),
    *("greater_is_better", "save_only_model"),
)
"""Keys whose values a type and its limits cover; with no others there is no rehearsal."""
CHECKPOINTING_OPTIONS = tuple(f"{key}_kwargs" for key in CHECKPOINTING)
USUAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(CHECKPOINTING_OPTIONS, ({"use_reentrant": False}, {"use_reentrant": True})),
    "lr_scheduler_type": ("constant", "constant_with_warmup", "cosine", "linear"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "metric_for_best_model": ("loss", "eval_loss"),
}
"""Values that need no step, of keys whose others do."""
NOT_ON_A_TOY = (
    *("optim*", "fsdp*", "*liger*", "activation_offloading", "torch_compile*", "tf32", "use_cpu"),
    *("*vllm*", "ddp_*", "hub_*", "trackio_*", "project", "auto_find_batch_size", "bf16_full_eval"),
    *("use_transformers_*", "transformers_continuous_*", "generation_batch_size"),
)
"""Keys that need a GPU, several processes, a server or a package that the toy does without."""
_LAUNCHER = ("ACCELERATE_*", "FSDP_*", "PARALLELISM_*", "TORCHELASTIC_*", "MASTER_*", "*RANK")
STEPS = 2
"""Steps of a toy, which evaluates and saves after each if the recipe's run does so at all."""
_OURS: dict[str, Any] = {
    "eval_steps": 1,
    "eval_delay": 0,
    "save_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
}
_SIZES = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "max_completion_length"),
    *("max_steps", "gradient_accumulation_steps", "max_length"),
)
"""Keys of which the toy has other values than the recipe, besides those above."""


def to_rehearse(recipe: Recipe) -> dict[str, Any]:
    """The values of ``trainer:`` that only a step can check."""
    config = STAGES[recipe.stage].config_class()
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {
        name: value
        for name, value in recipe.trainer.items()
        if value != defaults.get(name)
        and value not in USUAL.get(name, ())
        and not any(fnmatchcase(name, pattern) for pattern in (*CHECKED, *NOT_ON_A_TOY))
    }


# -- in the process that trains -------------------------------------------------------------------


@contextlib.contextmanager
def rehearsing(start: Start) -> Iterator[Rehearsal]:
    """Rehearse in a child while the ``with`` block goes on; ``check()`` waits for the verdict."""
    recipe, rehearsal = start.recipe, Rehearsal()
    if os.environ.get("LOCAL_RANK", "0") == "0" and to_rehearse(recipe):
        tokenizer = str(recipe.model.tokenizer or start.folder)
        rehearsal.begin({"recipe": recipe.to_mapping(), "tokenizer": tokenizer})
    try:
        yield rehearsal
    finally:
        rehearsal.end()


class Rehearsal:
    """A child process that rehearses a recipe."""

    _process: subprocess.Popen[str] | None = None

    def begin(self, request: Mapping[str, Any]) -> None:
        """Start the child."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not any(fnmatchcase(name, pattern) for pattern in (*_LAUNCHER, "*WORLD_SIZE"))
        }
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moe_finetune.training.before.toy_step"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request))
            self._process.stdin.close()

    def check(self) -> None:
        """Wait for the verdict."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        try:
            self._process.wait(SECONDS)
            problem = json.loads(self._process.stdout.read())["problem"]
        except (subprocess.TimeoutExpired, ValueError):
            log.warning(
                "trainer: its values were not tried on a toy; a wrong one ends the run late"
            )
            return
        if problem:
            raise RecipeError(problem)

    def end(self) -> None:
        """End the child, whatever it does."""
        if self._process is not None:
            assert self._process.stdout is not None
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


# -- in the child ---------------------------------------------------------------------------------


def rehearse(recipe: Recipe, tokenizer: Tokenizer) -> str | None:
    """Why the stage's trainer cannot run with a key of ``trainer:``; None if it can.

    A second toy, without the keys that need one, tells whether they are to blame at all; which of
    them is, the error's words tell.
    """
    keys = to_rehearse(recipe)
    try:
        toy_step(recipe, tokenizer)
        return None
    except RecipeError as error:  # ours names its key
        return str(error)
    except Exception as error:  # whatever the libraries raise
        words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    others = {name: value for name, value in recipe.trainer.items() if name not in keys}
    if _names_a_key_of_the_toy(words):
        return None
    try:
        toy_step(recipe.model_copy(update={"trainer": others}), tokenizer)
    except Exception:  # the toy cannot run as it is
        return None
    key = max(keys, key=lambda key: likeness(words, key, keys[key]))
    if len(keys) > 1 and not any(likeness(words, key, keys[key])):
        return f"trainer: {', '.join(keys)} cannot be used here: {words}; change them"
    return f"trainer.{key}: {keys[key]!r} cannot be used here: {words}; change it or leave it out"


def likeness(words: str, name: str, value: Any) -> tuple[bool, bool, int]:
    """Whether ``words`` have a key's name or its value, and how many parts of the name."""
    texts = map(str, value if isinstance(value, list | dict) else [value])
    parts = sum(len(part) > 3 and part in words for part in name.split("_"))
    return name in words, any(len(text) > 2 and text in words for text in texts), parts


def _names_a_key_of_the_toy(words: str) -> bool:
    """Whether an error is about a value that the toy sets itself, instead of the recipe's."""
    return any(re.search(rf"\b{key}\b", words) for key in (*_OURS, *_SIZES))


def toy_step(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Build the stage's trainer on a toy and take its steps; raise what it raises."""
    from datasets import Dataset

    from moe_finetune.training.run.trainer import RunTrainer, training_arguments

    stage, model = STAGES[recipe.stage], _toy(recipe, tokenizer)
    trainer = {
        name: value
        for name, value in recipe.trainer.items()
        if not any(fnmatchcase(name, pattern) for pattern in NOT_ON_A_TOY)
    }
    more: dict[str, Any] = {}
    row: dict[str, Any]
    if stage.form == "tokens":
        trainer |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        row = {"input_ids": list(range(5, 12)), "labels": [-100, -100, *range(7, 12)]}
    elif stage.form == "prompts":
        check_generation(recipe.trainer)
        size = trainer.get("num_generations", 8)
        trainer |= {"per_device_train_batch_size": size, "max_completion_length": COMPLETION}
        more["reward_funcs"] = [_alternating(section.name) for section in recipe.rewards]
        row = {"prompt": "a b"}
    else:
        trainer |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        row = {"prompt": "a b", "chosen": " c d", "rejected": " e"}
        if stage.reference and not hasattr(model, "peft_config"):
            more["ref_model"] = _toy(recipe, tokenizer)
    rows = Dataset.from_list([row] * (4 * (trainer.get("steps_per_generation") or 1)))
    validation = None if recipe.data.validation is None else Dataset.from_list([row] * 2)
    checkpointing = any(trainer.get(key) for key in CHECKPOINTING_OPTIONS)
    trainer = {name: value for name, value in trainer.items() if name not in CHECKPOINTING}
    trainer |= {**_OURS, "gradient_checkpointing": checkpointing}
    trainer["max_steps"] = 1 if trainer.get("max_steps") == 1 else STEPS
    trainer["gradient_accumulation_steps"] = min(trainer.get("gradient_accumulation_steps") or 1, 2)
    smaller = recipe.model_copy(update={"trainer": trainer})
    kind = type("Toy", (RunTrainer, stage.trainer_class()), {})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = training_arguments(smaller, Path(folder))
        args.max_length = 64
        if stage.form == "tokens":
            args.packing = False
        kind(
            model,
            args=args,
            train_dataset=rows,
            eval_dataset=validation,
            processing_class=tokenizer,
            **more,
        ).train()


def check_generation(trainer: Mapping[str, Any]) -> None:
    """Build the generator's own parameters from ``generation_kwargs`` and the keys next to it."""
    from transformers import GenerationConfig

    options = trainer.get("generation_kwargs") or {}
    if trainer.get("use_vllm"):
        from vllm import SamplingParams

        beside = ("temperature", "top_p", "min_p", "repetition_penalty")
        SamplingParams(**{n: trainer[n] for n in beside if n in trainer}, **options)
        return
    known = GenerationConfig().to_dict()
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"generation_kwargs.{unknown[0]} is unknown{did_you_mean(unknown[0], known)}"
        )


def _alternating(name: str) -> Any:
    """A reward of 0 and 1 in turn; its name is a part of the names of what is logged."""

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    reward.__name__ = name
    return reward


def _toy(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """A model of one small layer with the tokenizer's vocabulary, adapted if the run's is."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    if recipe.lora is None or not recipe.lora.adapts(recipe.router.train):
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))


def main() -> None:
    """Read a request from standard input, and print the verdict."""
    from moe_finetune.data.tokenize import set_chat_template
    from moe_finetune.models.config_and_tokenizer import load_tokenizer
    from moe_finetune.plugins import use_inherited

    request = json.load(sys.stdin)
    use_inherited()
    recipe = recipe_from_tree(Tree(request["recipe"]))
    tokenizer = load_tokenizer(request["tokenizer"])
    set_chat_template(tokenizer, recipe.data.chat_template)
    print(json.dumps({"problem": rehearse(recipe, tokenizer)}))


if __name__ == "__main__":
    main()
