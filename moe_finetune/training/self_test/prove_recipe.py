"""Proof that a recipe trains on the installed versions as it should, on a small twin of its model.

On the CPU in float32, in train mode, with the recipe's adapter, method and bias:

1. gradients = those of the stock model with the method's losses added to its loss by hand;
2. gradients under checkpointing, with dropout and noise, = those without;
3. the five comparisons of :mod:`moe_finetune.training.self_test.family_check`;
4. two optimizer steps of the installed trainer with accumulation = those of a loop.

Each loss gets the weight at which its gradient is as large as the language loss's, so that none is
below the bounds.
"""

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses.base import Schedule
from moe_finetune.losses.objective import Objective
from moe_finetune.losses.tensors import without_autocast
from moe_finetune.models.family import Family
from moe_finetune.moe.checkpointing import checkpoint_layers
from moe_finetune.moe.context import CONTEXT_KEY
from moe_finetune.moe.layers import model_facts, places_in
from moe_finetune.moe.layout import read_layout
from moe_finetune.moe.tokens import read_tokens
from moe_finetune.recipe.method import Method, Perturbations, resolve_method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.save_and_resume.state_files import random_state, set_random_state
from moe_finetune.training.self_test.family_check import (
    FIVE,
    GRADIENTS,
    RECORDED,
    Check,
    FamilyCheck,
    Gradients,
    batch,
    compare,
    differences,
    random_factors,
)
from moe_finetune.training.self_test.losses_by_hand import losses, records, seeing
from moe_finetune.training.specialization import Specialization

LEARNING_RATE = 1e-2
STEPS = 2
ACCUMULATION = 2
BY_HAND, CHECKPOINTED = "gradients of the method", "gradients under checkpointing"
STEPS_OF_TRAINER = "steps of the trainer"


def prove(config: Any, family: Family, recipe: Recipe) -> FamilyCheck:
    """Compare what ``recipe`` does on a small model of ``config``'s type; takes seconds."""
    state = random_state()
    try:
        with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
            proof = _Proof(recipe, Path(folder))
            first = {BY_HAND: proof.injected, CHECKPOINTED: proof.checkpointed}
            result = compare(config, family, first | FIVE | {STEPS_OF_TRAINER: proof.trained})
    finally:
        set_random_state(state)
    result.notes += proof.notes
    result.ends = (
        "proved: the recipe trains on these versions as by hand",
        "not proved: do not train with these versions; docs/install.md has those that were tested",
    )
    return result


class _Proof:
    """The comparisons of one recipe; the first finds the losses' weights for the others."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.folder = recipe, folder
        self.notes: list[str] = []
        if recipe.method.perturbations != Perturbations():
            self.notes.append("method.perturbations, but for checkpointing")
        if recipe.model.quantization != "none":
            self.notes.append(f"model.quantization {recipe.model.quantization}: float32 ran")
        if recipe.lora is not None and recipe.lora.experts != "all":
            self.notes.append("lora.experts: all experts were adapted")
        self.weights: dict[str, float] = {}

    # -- 1 ------------------------------------------------------------------------------------

    def injected(self, base: Any, family: Family) -> Iterator[Check]:
        model, tokens = self._adapted(base, dropout=0.0), batch(base)
        objective = self._objective(model)
        with seeing(model) as seen:
            torch.manual_seed(1)
            output = model(**tokens)
        read = read_tokens(
            read_layout((), {"input_ids": tokens["input_ids"]}),
            labels_BS=tokens["labels"],
            count_labels=self.recipe.method.token_mask == "labels",
        )
        layers = records(seen, read)
        torch.manual_seed(2)
        with without_autocast(torch.device("cpu")):
            totals, draws = losses(objective, layers)
        expected = _differentiated(model, output.loss)
        size = _norm(expected)
        for name, total in totals.items():
            gradient = _differentiated(model, total)
            if not (norm := _norm(gradient)):
                self.notes.append(f"{name}: has no gradient on this model")
                continue
            self.weights[name] = size / norm
            for key, value in gradient.items():
                expected[key] = expected.get(key, 0) + value * self.weights[name]

        def same_draws(module: nn.Module, args: tuple, kwargs: dict) -> None:
            kwargs[CONTEXT_KEY].draws.update(draws)

        def add_draws(running: Specialization) -> None:
            running.recorder.backbone.register_forward_pre_hook(same_draws, with_kwargs=True)

        actual = self._gradients(model, self._method(noise=False), 0.0, add_draws)
        for group, difference in differences(expected, actual, places_in(model)).items():
            yield Check(f"{BY_HAND}, {group}", difference, GRADIENTS)

    def _objective(self, model: Any) -> Objective:
        """The recipe's losses that this model can have, each with weight 1."""
        facts, possible = model_facts(model), {}
        for name, options in self.recipe.method.terms.items():
            options = self._options(name, options, facts.vocab_size, facts.num_experts)
            try:
                Objective({name: options}, facts)
            except ObjectiveError as error:
                self.notes.append(f"{name}: {error}")
                continue
            possible[name], self.weights[name] = options, 1.0
        self.weights = {}
        return Objective(possible, facts)

    def _options(self, name: str, options: Any, vocabulary: int, experts: int) -> Any:
        """A loss's options with weight 1 in all layers, and a table of the small model's size."""
        if getattr(options, "table", None):
            from safetensors.torch import save_file

            file = self.folder / f"{name}.safetensors"
            torch.manual_seed(4)
            save_file({"token_frequencies": torch.rand(vocabulary, experts).softmax(1)}, file)
        return self._everywhere(name, options, 1.0)

    # -- 2 ------------------------------------------------------------------------------------

    def checkpointed(self, base: Any, family: Family) -> Iterator[Check]:
        dropout = self.recipe.lora.dropout if self.recipe.lora else 0.0
        runs = []
        for checkpoints in (False, True):
            model = self._adapted(copy.deepcopy(base), dropout)
            if checkpoints:
                checkpoint_layers(model)
            runs.append(self._gradients(model, self._method(noise=True), dropout, _with_bias))
        worst = max(differences(runs[0], runs[1], places_in(model)).values())
        yield Check(CHECKPOINTED, worst, RECORDED)

    # -- 4 ------------------------------------------------------------------------------------

    def trained(self, base: Any, family: Family) -> Iterator[Check]:
        model = self._adapted(base, dropout=0.0)
        looped, method = copy.deepcopy(model), self._method(noise=False)
        start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        batches = self._train(model, method)
        _seed_forwards(looped)
        trained = [p for p in looped.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        options = {"accumulation": ACCUMULATION, "total_steps": STEPS}
        with Specialization(looped, method, kernel=self._kernel, **options) as running:
            for first in range(0, len(batches), ACCUMULATION):
                for ids in batches[first : first + ACCUMULATION]:
                    loss = looped(input_ids=ids, labels=ids, use_cache=False).loss
                    (loss / ACCUMULATION).backward()
                optimizer.step()
                optimizer.zero_grad()
                running.step()
        expected, actual = (
            {n: p.detach() - start[n] for n, p in one.named_parameters() if n in start}
            for one in (looped, model)
        )
        for group, difference in differences(expected, actual, places_in(model)).items():
            yield Check(f"{STEPS_OF_TRAINER}, {group}", difference, GRADIENTS)

    def _train(self, model: Any, method: Method) -> list[Tensor]:
        """Train by the installed trainer; returns the micro-batches that it made."""
        from datasets import Dataset

        from moe_finetune.training.callback.callback import SpecializationCallback

        most = min(260, model.config.get_text_config().vocab_size)
        ids = torch.randint(4, most, (STEPS * ACCUMULATION * 2, 13))
        batches = _seed_forwards(model)
        trainer, arguments, options = self._trainer()
        run = trainer(
            model=model,
            args=arguments(
                output_dir=str(self.folder / "trainer"),
                max_steps=STEPS,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=ACCUMULATION,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                optim="sgd",
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **options.pop("arguments"),
            ),
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}),
            callbacks=[SpecializationCallback(method, kernel=self._kernel)],
            **options,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # what it measured
            run.train()
        return batches

    def _trainer(self) -> tuple[Any, Any, dict[str, Any]]:
        """The trainer's class, its arguments' class, and what it needs besides."""
        from transformers import Trainer, TrainingArguments, default_data_collator

        if self.recipe.stage not in ("sft", "pretrain"):
            self.notes.append(f"stage {self.recipe.stage}: transformers' Trainer ran in its place")
            return (
                Trainer,
                TrainingArguments,
                {"arguments": {}, "data_collator": default_data_collator},
            )
        from trl import SFTConfig, SFTTrainer

        arguments = {
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "max_length": None,
            "router_aux_loss_coef": 0.0,
        }
        return SFTTrainer, SFTConfig, {"arguments": arguments, "processing_class": _tokenizer()}

    # -- what all use ---------------------------------------------------------------------------

    @property
    def _kernel(self) -> Any:
        return self.recipe.model.experts_kernel

    def _adapted(self, model: nn.Module, dropout: float) -> Any:
        """The model with the recipe's adapter, random factors in it, in train mode."""
        from moe_finetune.lora.targets import add_lora

        lora = self.recipe.lora
        if lora is not None:
            lora = lora.model_copy(update={"experts": "all", "start": None, "dropout": dropout})
        adapted: Any = random_factors(
            add_lora(model, lora, self.recipe.router.train, self.recipe.router.layers)
        )
        if hasattr(adapted, "enable_input_require_grads"):
            adapted.enable_input_require_grads()
        return adapted.train()

    def _method(self, noise: bool) -> Method:
        """The recipe's method with the weights that were found; ``noise``: its perturbations."""
        method = self.recipe.method
        terms = {
            name: self._everywhere(name, options, self.weights[name]).model_dump()
            for name, options in method.terms.items()
            if name in self.weights
        }
        return resolve_method(
            {
                "terms": terms,
                "token_mask": method.token_mask,
                "perturbations": method.perturbations.model_dump() if noise else {},
                "bias_update": method.bias_update,
                "strength": {"first": False},
            }
        )

    def _everywhere(self, name: str, options: Any, weight: float) -> Any:
        """A loss's options at one weight in all layers and steps, with the small model's table."""
        fixed = {"weight": weight, "share": None, "every": None, "layers": "all"}
        if getattr(options, "table", None):
            fixed["table"] = str(self.folder / f"{name}.safetensors")
        return options.model_copy(update={**fixed, "schedule": Schedule()})

    def _gradients(
        self,
        model: nn.Module,
        method: Method,
        dropout: float,
        prepared: Callable[[Specialization], None],
    ) -> Gradients:
        """Gradients of one recorded forward."""
        model.zero_grad()
        with Specialization(model, method, dropout=dropout, kernel=self._kernel) as running:
            prepared(running)
            torch.manual_seed(1)
            model(**batch(model)).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _seed_forwards(model: nn.Module) -> list[Tensor]:
    """Seed each forward by its number, and note its rows."""
    batches: list[Tensor] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        batches.append(kwargs["input_ids"].clone())
        torch.manual_seed(len(batches))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return batches


def _with_bias(running: Specialization) -> None:
    """Give the experts other biases, as after some steps."""
    if running.balancer is not None:
        for layer, bias in running.balancer.bias.items():
            running.balancer.bias[layer] = torch.linspace(-0.05, 0.05, len(bias)).roll(layer)


def _differentiated(model: nn.Module, value: Tensor) -> Gradients:
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not value.requires_grad:
        return {}
    gradients = torch.autograd.grad(
        value, list(named.values()), retain_graph=True, allow_unused=True
    )
    return {n: g for n, g in zip(named, gradients, strict=True) if g is not None}


def _norm(gradients: Gradients) -> float:
    return float(sum(value.double().square().sum() for value in gradients.values())) ** 0.5


def _tokenizer() -> Any:
    """A tokenizer that is never asked: the trainer wants one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="a", eos_token="b")
