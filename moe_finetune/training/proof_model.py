"""The small model that a proof runs, with random weights everywhere; and one check of it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.models.base import Family
from moe_finetune.models.layout import Site, sites
from moe_finetune.models.structure import class_of

TOKENS = (3, 17)
PARTS = ("logits", "weights", "index")


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        difference: largest difference, relative to the largest value; None for names and numbers.
        bound: largest allowed difference.
        problem: the wrong fact and the model's value; None if the fact is right.
        note: anything else the reader should know.
    """

    name: str
    difference: float | None = None
    bound: float | None = None
    problem: str | None = None
    note: str = ""

    def line(self) -> str:
        if self.problem is not None:
            return f"WRONG  {self.name}: {self.problem}"
        within = (
            "" if self.difference is None else f"{self.difference:.1e} (bound {self.bound:.0e})"
        )
        return f"ok     {self.name:<24} {within or 'as declared'}{self.note and '; ' + self.note}"


def random_model(config: Any) -> nn.Module:
    """A float32 model in eval mode whose routers, biases and norms are random too."""
    torch.manual_seed(0)
    model = class_of(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
        for site in sites(model):
            tensors = dict([*site.block.named_parameters(), *site.block.named_buffers()])
            for name, path in site.routers:
                tensors[f"{name}.{path}"].normal_(0, 0.1)
            for name in site.biases:
                tensors[name].normal_(0, 0.1)
    return model


def batch(config: Any, seed: int = 5) -> dict[str, Any]:
    """Random tokens as a training batch of text."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        4, min(260, config.get_text_config().vocab_size), TOKENS, generator=generator
    )
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@dataclass
class Seen:
    """One layer of the stock model: the router's outputs and the experts' inputs.

    ``logits`` come from the router's inner module if the router returns none.
    """

    site: Site
    logits: list[Tensor] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def watch(model: nn.Module, family: Family) -> list[Seen]:
    """Run the stock model on one batch with hooks that only read."""
    seen, hooks = [], []
    for site in sites(model):
        layer = Seen(site)
        seen.append(layer)
        router = site.block.get_submodule(family.router_name)
        experts = site.block.get_submodule(site.experts_name)
        if family.router_logits is not None:
            inner = router.get_submodule(family.router_logits)
            hooks.append(inner.register_forward_hook(_note_logits(layer)))
        hooks.append(router.register_forward_hook(_note_answer(layer)))
        hooks.append(experts.register_forward_pre_hook(_note_given(layer), with_kwargs=True))
    try:
        with torch.no_grad():
            model(**batch(model.config))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _note_answer(layer: Seen) -> Any:
    return lambda module, args, output: layer.answers.append(output)


def _note_logits(layer: Seen) -> Any:
    return lambda module, args, output: layer.logits.append(output)


def _note_given(layer: Seen) -> Any:
    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False))
        named |= kwargs
        layer.given.append((named["top_k_index"], named["top_k_weights"]))

    return note


def named_parts(family: Family, layer: Seen) -> dict[str, Tensor]:
    """Logits (T, E), weights (T, K), both float32, and index (T, K) of a layer.

    Values that the router does not return come from its inner module or the experts' inputs.
    """
    answer = layer.answers[0]
    outputs = answer if isinstance(answer, tuple) else (answer,)
    index, weights = layer.given[0]
    named = {"index": index, "weights": weights}
    if layer.logits:
        named["logits"] = layer.logits[0]
    named |= dict(zip(family.router_returns, outputs, strict=True))
    flat = {name: named[name].reshape(-1, named[name].shape[-1]) for name in PARTS}
    return {name: part if name == "index" else part.float() for name, part in flat.items()}
