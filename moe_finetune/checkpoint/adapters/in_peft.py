"""The form in which PEFT reads an adapter of any maker over transformers' class.

Keys that name the tensors of the files, as with transformers 4, get the names of the class; an
expert's matrices become parts of its stacks, when they are read. Modules whose names PEFT 0.21
takes for parts of the stacks are adapted as parameters.

Shape legend: E experts, R the rank of a stack, O rows and I columns of a matrix, Z one of the two.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.adapters.factor_layout import as_a, as_b
from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.peft_model import MAY_LACK, fill, is_saved, wrap
from moe_finetune.checkpoint.adapters.updates import Factors, LowRank, OpenAdapter, Replace
from moe_finetune.checkpoint.tensor_names import Place
from moe_finetune.checkpoint.weight_files import DTYPES, Computed, computed
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.models.class_structure import meta_model

# PEFT 0.21 treats modules with these names as parts of the expert stacks.
_TAKEN = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
OF_PACKING = (
    "lora_B_layout", "unsloth_fused_expert_lora", "gate_up_rows", "auto_mapping", "peft_version",
)  # fmt: skip
OF_TARGETS = ("layers_to_transform", "layers_pattern", "exclude_modules")


def peft_form(adapter: OpenAdapter) -> OpenAdapter:
    """``adapter`` with the config and the keys that PEFT reads."""
    if adapter.of_files or adapter.attention_only or adapter.metadata.experts is not None:
        return _by_class(adapter)
    if not any(isinstance(info, Computed) for info in adapter.tensors.values()):
        return adapter
    return replace(adapter, config=config_for_peft(adapter, {}, OF_PACKING))


def config_for_peft(
    adapter: Adapter, changes: dict[str, Any], dropped: tuple[str, ...] = OF_PACKING + OF_TARGETS
) -> Any:
    """The adapter's config with ``changes`` and the packing of the PEFT that is installed."""
    options = {key: value for key, value in adapter.config.items() if key not in dropped}
    # A square matrix does not show its packing.
    return options | changes | {"init_lora_weights": True, "peft_version": version("peft")}


def with_adapter(model: nn.Module, adapter: OpenAdapter, partial: bool = False) -> Any:
    """``model`` with ``adapter``, of any program, in PEFT and in eval mode.

    ``partial``: ``model`` has only the first layers.
    """
    form = peft_form(adapter)
    wrapped = wrap(model, form)
    fill(wrapped, form, partial)
    return wrapped.eval()


class _Term(NamedTuple):
    """A matrix of an update, and where ``at`` it lies in the matrix ``expert`` of the model."""

    update: LowRank
    slot: int
    expert: int
    at: Place


def _by_class(adapter: OpenAdapter) -> OpenAdapter:
    base = adapter.base
    model, factors = meta_model(base.model_config), Factors(adapter)
    tensors: dict[str, TensorInfo] = {}
    low_rank: list[LowRank] = []
    modules: list[str] = []
    parameters: list[str] = []
    terms_of = _by_loaded(adapter)
    for loaded, terms in terms_of.items():
        path, _, parameter = loaded.rpartition(".")
        shape, first = base.names.shapes[loaded], terms[0].update
        inner = [n for n in base.places.expert_parameters if f"{path}.{n}" in terms_of]
        key, turned = path, False
        if len(shape) == 3:
            key += ".base_layer" * (len(inner) - 1 - inner.index(parameter))
            turned = getattr(model.get_submodule(path), "is_transposed", False)
        is_module = len(shape) != 3 and not takes_parameter(model, path)
        (modules if is_module else parameters).append(path if is_module else loaded)
        experts = tuple(range(shape[0])) if len(shape) == 3 else None  # zeros, if not chosen
        if _is_whole(terms, shape, adapter) and not (turned and adapter.of_files):
            factor_of = {
                old: f"{key}.lora_{old.partition('.lora_')[2]}"
                for old in (first.a, first.b, first.magnitude)
                if old is not None
            }
            tensors |= {new: adapter.tensors[old] for old, new in factor_of.items()}
            a, b = factor_of[first.a], factor_of[first.b]
            magnitude = factor_of.get(first.magnitude or "")
            renamed = replace(first, name=loaded, a=a, b=b, magnitude=magnitude)
            low_rank.append(replace(renamed, experts=experts))
            continue
        a, b = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
        stack = _Stack(factors, terms, shape, turned)
        size = stack.experts * stack.rank
        tensors[a] = computed(a, stack.dtype, (size, stack.sizes[turned]), stack.a)
        tensors[b] = computed(b, stack.dtype, (stack.sizes[not turned], size), stack.b)
        low_rank.append(
            LowRank(
                name=loaded,
                a=a,
                b=b,
                rank=stack.rank,
                scale=stack.scale,
                experts=experts,
                transposed=turned,
            )
        )
    if adapter.config.get("use_dora") and parameters:
        raise AdapterError(
            f"{adapter.folder}: DoRA on '{min(parameters)}', which PEFT cannot represent on this "
            "model; merge it with 'moe-finetune merge' and use the merged checkpoint"
        )
    in_class = {n: [loaded] for n, loaded in base.names.loaded.items() if adapter.of_files}
    replaced = []
    for update in adapter.replaced:
        (name,) = in_class.get(update.name, [update.name])
        key = below_factors(name, tensors)
        tensors[key] = adapter.tensors[update.key]
        replaced.append(Replace(name, key))
    root = 0.5 if adapter.config.get("use_rslora") else 1
    by_target = {u.name.removesuffix(".weight"): u for u in low_rank}
    targets = {name: by_target[name.removesuffix(".weight")] for name in (*modules, *parameters)}
    changes = {
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": modules_to_save(adapter, in_class, base.names.shapes),
        "lora_dropout": 0.0 if parameters else adapter.config.get("lora_dropout") or 0.0,
        "rank_pattern": {re.escape(name): u.rank for name, u in targets.items()},
        "alpha_pattern": {
            re.escape(name): u.scale * float(u.rank) ** root for name, u in targets.items()
        },
    }
    return replace(
        adapter,
        config=config_for_peft(adapter, changes),
        tensors=tensors,
        low_rank=low_rank,
        replaced=replaced,
        tables={in_class.get(k, [k])[0]: info for k, info in adapter.tables.items()},
        of_files=False,
        attention_only=False,
    )


def modules_to_save(
    adapter: OpenAdapter, renamed: Mapping[str, list[str]], tensors: Iterable[str]
) -> list[str] | None:
    """The adapter's ``modules_to_save`` where its tensors are ``renamed``, one of all ``tensors``.

    They are the shortest ends of modules' paths by which PEFT saves the same.
    """
    before, ends = adapter.config.get("modules_to_save"), list[str]()
    names = *(update.name for update in adapter.replaced), *adapter.tables
    saved = {new for n in names if is_saved(n, before) for new in renamed.get(n, [n])}
    others = [n for n in tensors if n not in saved and not n.endswith(MAY_LACK)]
    for name in sorted(saved, key=lambda name: (name.count("."), name)):  # outer modules first
        if name.endswith(MAY_LACK) or is_saved(name, ends):
            continue
        parts = name.split(".")[:-1]
        possible = (".".join(parts[first:]) for first in reversed(range(len(parts))))
        end = next((end for end in possible if not any(is_saved(o, [end]) for o in others)), None)
        if end is None:
            raise AdapterError(
                f"{adapter.folder}: '{name}' shares its module with tensors that the adapter "
                "lacks, and modules_to_save would save those, too; merge it with 'merge'"
            )
        ends.append(end)
    return ends or None


def takes_parameter(model: nn.Module, path: str) -> bool:
    """Whether PEFT has to adapt the weight of a module as a parameter.

    It takes some modules by their names for parts of the experts' stacks, and has no layer for a
    router.
    """
    return path.rpartition(".")[2] in _TAKEN or not _is_layer(model, path)


def _is_layer(model: nn.Module, path: str) -> bool:
    try:
        return type(model.get_submodule(path)) in (nn.Linear, nn.Embedding)
    except AttributeError:
        return True  # PEFT refuses it, with its name


def _is_whole(terms: list[_Term], shape: tuple[int, ...], adapter: OpenAdapter) -> bool:
    """Whether one update changes the whole loaded tensor, in its own order."""
    update, at = terms[0].update, terms[0].at
    if any(term.update is not update for term in terms) or at.transposed:
        return False
    rows = shape[-2] if update.transposed else adapter.tensors[update.b].shape[0]
    return isinstance(at.rows, slice) and rows == shape[-2]


def _by_loaded(adapter: OpenAdapter) -> dict[str, list[_Term]]:
    """All factors by the tensor of the loaded model that they change."""
    terms: dict[str, list[_Term]] = {}
    names = adapter.base.names
    where: dict[tuple[str, int | None], tuple[str, int, Place]] = {}
    if adapter.of_files:
        for loaded in {names.loaded[update.name]: None for update in adapter.low_rank}:
            for expert, places in enumerate(names.places(loaded)):
                where |= {(at.name, at.expert): (loaded, expert, at) for at in places}
    for update in adapter.low_rank:
        for slot in update.experts or [0]:
            key = update.name, slot if update.experts else None
            loaded, expert, at = where.get(key, (update.name, slot, Place(update.name)))
            terms.setdefault(loaded, []).append(_Term(update, slot, expert, at))
    return terms


class _Stack:
    """The factors of parts of a stack's matrices, or of one matrix, as one pair for PEFT.

    They keep their values if all have one scale; otherwise B takes it. ``turned``: the class has
    (E, I, O), and PEFT's A has the inputs there too.
    """

    def __init__(
        self, factors: Factors, terms: list[_Term], shape: tuple[int, ...], turned: bool
    ) -> None:
        self.factors, self.terms, self.turned = factors, terms, turned
        self.experts = shape[0] if len(shape) == 3 else 1
        self.sizes = shape[-1], shape[-2]
        scales = {term.update.scale for term in terms}
        stored = factors.adapter.tensors
        kinds = {stored[k].dtype for term in terms for k in (term.update.a, term.update.b)}
        self.scale = scales.pop() if len(scales) == 1 else 1.0
        self.dtype = kinds.pop() if len(kinds) == 1 and not scales else "F32"
        used = [0] * self.experts
        self.first: list[int] = []
        for term in terms:
            self.first.append(used[term.expert])
            used[term.expert] += term.update.rank
        self.rank = max(used)

    def a(self) -> Tensor:
        return as_a(self._vectors(of_rows=self.turned))

    def b(self) -> Tensor:
        return as_b(self._vectors(of_rows=not self.turned))

    def _vectors(self, of_rows: bool) -> Tensor:
        """The columns of the left factors, or the rows of the right ones (E, R, Z)."""
        vectors_ERZ = torch.zeros(self.experts, self.rank, self.sizes[of_rows])
        for term, first in zip(self.terms, self.first, strict=True):
            left_Or, right_rI = self.factors.matrices(term.update, term.slot)
            if term.at.transposed:
                left_Or, right_rI = right_rI.T, left_Or.T
            vectors_RZ = vectors_ERZ[term.expert, first : first + term.update.rank]
            if of_rows:
                vectors_RZ[:, term.at.rows] = left_Or.T * (term.update.scale / self.scale)
            else:
                vectors_RZ[:] = right_rI
        return vectors_ERZ.to(DTYPES[self.dtype])


def below_factors(name: str, tensors: Mapping[str, Any]) -> str:
    """PEFT's key for a tensor that trained in full, perhaps of a module with factors."""
    path, _, last = name.rpartition(".")
    adapted = {key.partition(".lora_")[0] for key in tensors if ".lora_" in key}
    while path in adapted:
        path += ".base_layer"
    return f"{path}.{last}"
