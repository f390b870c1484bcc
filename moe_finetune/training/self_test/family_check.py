"""Check that a family's facts are those of transformers' class, on a small random model.

What the class shows is read from it; the rest follows from five comparisons: recorded = stock, the
record = what the class computes, gradients of recorded LoRA = stock's, merged = base + adapter,
packed = alone. It is not in ``models`` because it trains and merges.

Shape legend: T tokens, E experts, K selected.
"""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import NoSmallModelError, reason_of
from moe_finetune.lora.coverage import group_of
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.record import scores_of
from moe_finetune.models.class_structure import class_of, sites
from moe_finetune.models.family import Family
from moe_finetune.models.family_lookup import using
from moe_finetune.models.module_places import Places
from moe_finetune.models.small_configs import shrunk_config
from moe_finetune.moe.choice.select_again import correction_bias
from moe_finetune.moe.layers import moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.observe import generators_kept, observed, undisturbed
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.refuse_packing import BOUND as PACKED
from moe_finetune.training.refuse_packing import packed_difference, random_model

RECORDED = 2e-5
GRADIENTS = 2e-4
MERGED = 1e-4
"""Bounds on relative differences of float32 sums in another order; PEFT's merges round more."""


@dataclass(frozen=True)
class Check:
    """One comparison: the largest relative ``difference`` within ``bound``, or a ``problem``."""

    name: str
    difference: float = 0.0
    bound: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and self.difference <= self.bound

    def line(self) -> str:
        numbers = f"{self.difference:.1e} (bound {self.bound:.0e})" if self.bound else "as declared"
        return f"{'ok   ' if self.ok else 'WRONG'}  {self.name:<28} {self.problem or numbers}"


@dataclass
class FamilyCheck:
    """The comparisons of one family.

    ``notes``: what was not compared, and why; ``unbuilt``: why there is no small model to compare.
    """

    family: str
    model_type: str
    sizes: dict[str, int]
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unbuilt: str = ""
    ends: tuple[str, str] = (
        "proved: the declared facts are those of transformers' class",
        "not proved: correct the family's facts by the code of transformers' class",
    )

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        return [check.line() for check in self.checks if not check.ok]

    def to_mapping(self) -> dict[str, Any]:
        mapping = asdict(self) | {"ok": None if self.unbuilt else self.ok}
        del mapping["ends"]
        return mapping

    def text(self) -> str:
        if self.unbuilt:
            return f"not compared: {self.unbuilt}"
        sizes = ", ".join(f"{value} {name}" for name, value in self.sizes.items())
        end = self.ends[not self.ok]
        head = f"{self.model_type} as declared by family {self.family}, on a model of {sizes}"
        notes = (f"note   not covered: {note}" for note in self.notes)
        return "\n".join([head, *(check.line() for check in self.checks), *notes, end])


Gradients = dict[str, Tensor]
Comparison = Callable[[Any, Family], Iterator[Check]]


def check_family(config: Any, family: Family) -> FamilyCheck:
    """Compare ``family`` with transformers' class for ``config``; takes seconds and little memory.

    The first comparison that fails is the last, because the later ones depend on it.
    """
    return compare(config, family, FIVE)


def compare(config: Any, family: Family, comparisons: Mapping[str, Comparison]) -> FamilyCheck:
    """:func:`check_family` by these comparisons, each of a new random model."""
    with generators_kept(), using(family):
        result = FamilyCheck(family.name, config.model_type, {})
        try:
            smaller = shrunk_config(config, family)
        except NoSmallModelError as error:
            result.unbuilt = str(error)
            return result
        text = smaller.get_text_config()
        result.sizes = {
            "layers": text.num_hidden_layers,
            "hidden": text.hidden_size,
            "tokens of vocabulary": text.vocab_size,
        }
        for name, comparison in comparisons.items():
            try:
                result.checks += comparison(random_model(smaller), family)
            except Exception as error:  # a wrong fact can lead anywhere
                result.checks.append(Check(name, problem=reason_of(error)))
            if not result.ok:
                break
    return result


def _facts(model: nn.Module, family: Family) -> Iterator[Check]:
    """What modules show without a forward."""
    family.places(model.config)
    yield Check("attention_targets")
    has_bias = family.bias_export != "tensor" or bool(sites(model)[-1].biases)
    problem = "" if has_bias else "declared as 'tensor', but the block has no value per expert"
    yield Check("bias_export", problem=problem)


def watch(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Index and weights ``(T, K)`` of each layer of the stock model, run on :func:`batch`."""
    routings: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False))
        index, weights = ((named | kwargs)[f"top_k_{part}"] for part in ("index", "weights"))
        routings.append(
            (index.reshape(-1, index.shape[-1]), weights.reshape(-1, index.shape[-1]).float())
        )

    experts = [site.block.get_submodule(site.experts_name) for site in sites(model)]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    try:
        with undisturbed(model):
            model(**batch(model))
    finally:
        for hook in hooks:
            hook.remove()
    return routings


def _recorded(model: Any, family: Family) -> Iterator[Check]:
    records: list[Any] = []
    stock = watch(model)
    with undisturbed(model):
        expected = model(**batch(model)).logits
    with observed(model, lambda record, _: records.append(record)):
        actual = model(**batch(model)).logits
    yield Check("logits", _difference(expected, actual), RECORDED)
    text, layers = model.config.get_text_config(), moe_layers(model)
    worst, selection = {"experts' weights": 0.0, "score, renormalize, scaling": 0.0}, ""
    for layer, (index_TK, weights_TK), record in zip(layers, stock, records, strict=True):
        if record.index_TK.shape[1] != family.top_k(text):
            yield Check("top_k", problem=f"the class selects {record.index_TK.shape[1]}")
            return
        if not torch.equal(index_TK, record.index_TK):
            yield Check("experts' index", problem="the record has others than the class used")
            return
        pairs = {"experts' weights": (weights_TK, record.weights_TK.float())}
        if family.own_weights is None:
            by_rule = record.probs_TE.gather(-1, record.index_TK)
            if family.renormalize(text):
                by_rule = by_rule / by_rule.sum(-1, keepdim=True)
            by_rule = by_rule * family.scaling(text)
            pairs["score, renormalize, scaling"] = (weights_TK, by_rule)
            if layer.index not in family.fixed_layers(text):
                reselected_TK = _selected(family, text, layer.block, record)
                if not torch.equal(reselected_TK, record.index_TK.sort(-1).values):
                    selection = "scores, groups and bias select other experts than the class"
        worst |= {name: max(worst[name], _difference(*pair)) for name, pair in pairs.items()}
    yield from (Check(name, difference, RECORDED) for name, difference in worst.items())
    yield Check("groups, bias", problem=selection)


def _selected(family: Family, text: Any, block: nn.Module, record: Any) -> Tensor:
    """Index (T, K), ascending, of the selection by scores, bias and groups."""
    choice_TE = record.logits_TE.float()
    if not family.bias_on_logits:
        choice_TE = scores_of(choice_TE, family.score)
    if (bias_E := correction_bias(block)) is not None:
        choice_TE = choice_TE + bias_E.float()
    count, top_groups = family.groups(text)
    if count > 1:
        grouped = choice_TE.unflatten(-1, (count, -1))
        # Softmax routers take a group by its best expert, others by the two best.
        best_TG = grouped.topk(1 if family.score == "softmax" else 2, dim=-1).values.sum(-1)
        keep_TG = torch.zeros_like(best_TG).scatter(1, best_TG.topk(top_groups).indices, 1).bool()
        choice_TE = grouped.masked_fill(~keep_TG.unsqueeze(-1), float("-inf")).flatten(1)
    return choice_TE.topk(record.index_TK.shape[1], dim=-1).indices.sort(-1).values


def _gradients(model: nn.Module, family: Family) -> Iterator[Check]:
    places = family.places(model.config)
    model = adapted(model)
    stock = _run(model)
    with Recorder(model):
        actual = _run(model)
    needed = {"attention", "router", "routed experts"}
    needed |= {"shared experts"} if places.shared else set()
    groups: dict[str, list[str]] = {}
    for name in stock:
        groups.setdefault(group_of(name, places), []).append(name)
    for group in sorted(needed - groups.keys()):
        yield Check(f"gradients, {group}", problem="LoRA reaches none of its modules")
    for group, names in sorted(groups.items()):
        pairs = (
            torch.cat([gradients[n].flatten() for n in names]) for gradients in (stock, actual)
        )
        yield Check(f"gradients, {group}", _difference(*pairs), GRADIENTS)


def _merged(stock: Any, family: Family) -> Iterator[Check]:
    tokens = batch(stock)
    quiet = contextlib.redirect_stderr(io.StringIO())  # progress bars of one file
    with torch.no_grad(), tempfile.TemporaryDirectory() as name, quiet:
        base, adapter, merged = (Path(name, part) for part in ("base", "adapter", "merged"))
        untouched = stock(**tokens).logits
        stock.save_pretrained(base)
        model: Any = adapted(stock)
        model.save_pretrained(adapter, save_embedding_layers=False)
        merge_adapter(base, adapter, merged)
        load = partial(class_of(stock.config).from_pretrained, dtype=torch.float32)
        expected, actual = model(**tokens).logits, load(merged).eval()(**tokens).logits
    problem = ""
    if _difference(expected, untouched) < 100 * MERGED:
        problem = "the adapter has no effect; check LoRA's targets"
    yield Check("merged = base + adapter", _difference(expected, actual), MERGED, problem)


def _packed(model: Any, family: Family) -> Iterator[Check]:
    difference = packed_difference(model)
    problem = ""
    if difference > PACKED:
        problem = (
            f"sequences of a row see each other ({difference:.1e}); see rows.per_sequence and "
            "rows.masks_by_position"
        )
    yield Check("packed rows = rows alone", difference, PACKED, problem)


FIVE: dict[str, Comparison] = {
    "facts": _facts,
    "record": _recorded,
    "gradients": _gradients,
    "merged = base + adapter": _merged,
    "packed rows = rows alone": _packed,
}


def batch(model: Any) -> dict[str, Any]:
    """Random tokens as a training batch of text."""
    most = min(260, model.config.get_text_config().vocab_size)
    ids = torch.randint(4, most, (3, 17), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def adapted(model: nn.Module) -> nn.Module:
    """Add LoRA with random factors to everything that a recipe can target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = add_lora(model, LoraSection(rank=4, alpha=12.0), "lora")
    return random_factors(peft_model)


def random_factors(model: nn.Module) -> nn.Module:
    """``model`` with LoRA factors that do something."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    return model


def _run(model: nn.Module) -> Gradients:
    model.zero_grad()
    model(**batch(model)).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differences(expected: Gradients, actual: Gradients, places: Places) -> dict[str, float]:
    """The relative difference of each part's gradients, taken as one vector."""
    sums: dict[str, list[float]] = {}
    for name in expected.keys() | actual.keys():
        one, other = (gradients.get(name, torch.zeros(())) for gradients in (expected, actual))
        part = sums.setdefault(group_of(name, places), [0.0, 0.0])
        part[0] += float((one.double() - other.double()).square().sum())
        part[1] += float(one.double().square().sum())
    return {part: (error / (size + 1e-24)) ** 0.5 for part, (error, size) in sorted(sums.items())}


def _difference(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max()) / (float(expected.abs().max()) + 1e-12)
