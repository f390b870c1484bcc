"""What an adapter of any maker changes: which tensors of the base, with which factors, and how.

PEFT's own modules say it: PEFT wraps a model without weights as the adapter's config demands, and
its modules have the names, ranks and scalings. What the adapter lacks, or has besides, is refused.
The model that PEFT wraps is the one that the adapter was trained on: transformers' class; the same
without its stacks of experts, in which PEFT before 0.19 found no matrices; or a module for each
tensor of the files, as in transformers 4.

Shape legend: E experts, n those with factors, r rank, O rows and I columns of a matrix.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_finetune.checkpoint.adapter import CONFIG, PREFIX, WEIGHTS, Adapter
from moe_finetune.checkpoint.adapter_layout import (
    OLD_EXPERT,
    before_019,
    grouped_by_expert,
    lacks_experts,
    names_experts,
    outputs_first,
    stacks_of_files,
)
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.names import Place, on_meta
from moe_finetune.checkpoint.peft_model import modules_for, modules_of, wrap
from moe_finetune.errors import AdapterError, did_you_mean

# A router's buffer is saved only where the router trains.
_MAY_LACK = "e_score_correction_bias"
# PEFT also saves these where the vocabulary has grown or LoRA is on one of them.
_MAY_ADD = (
    "embed_tokens.weight",
    "embed_tokens.base_layer.weight",
    "lm_head.weight",
    "lm_head.base_layer.weight",
    _MAY_LACK,
)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LowRank:
    """Adds ``scale * B @ A`` to a matrix, or to each of the ``experts`` of a stack.

    Attributes:
        name: the tensor of the loaded model, or of the files, that it changes.
        a, b: the factors' keys in the adapter.
        experts: the stack's matrices that have factors, in packing order; None for a matrix.
        grouped: B has an expert's columns side by side.
        swapped: A has the outputs and B the inputs, as before PEFT 0.19.
        transposed: the product's transpose is added.
        magnitude: the key of DoRA's norms, to which the changed matrix's rows are scaled.
    """

    name: str
    a: str
    b: str
    rank: int
    scale: float
    experts: tuple[int, ...] | None = None
    grouped: bool = False
    swapped: bool = False
    transposed: bool = False
    magnitude: str | None = None


@dataclass(frozen=True)
class Replace:
    """Replaces the tensor ``name`` by one that trained in full, the adapter's ``key``."""

    name: str
    key: str


@dataclass(frozen=True)
class Updates:
    """All updates of an adapter.

    Attributes:
        of_files: names are those in the base's files; otherwise those of the loaded model.
        as_loaded: the adapter's modules are those of transformers' class.
        attention_only: its config names matrices of experts, of which PEFT found none.
    """

    of_files: bool
    as_loaded: bool
    attention_only: bool
    low_rank: list[LowRank] = field(default_factory=list)
    replaced: list[Replace] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """An update's part in one tensor of the files, or in one matrix of a stack there.

    Attributes:
        slot: which of the update's experts.
        first: index of the part's first element in a saved tensor.
    """

    update: LowRank | Replace
    place: Place
    slot: int = 0
    first: int = 0


def read_updates(adapter: Adapter, base: Checkpoint) -> Updates:
    """All updates of ``adapter`` to ``base``.

    Raises:
        AdapterError: names the tensor that is missing, does not belong to the base or its config,
            or does not have the shape of the base's tensor.
    """
    old = any(map(OLD_EXPERT.fullmatch, adapter.tensors)) or stacks_of_files(adapter, base)
    bare = not old and lacks_experts(adapter, base)
    if old:
        trained = {n: i.shape for n, i in base.tensors.items() if n not in base.untrained}
    else:
        trained = base.names.shapes
    attention_only = bare and names_experts(adapter)
    if attention_only:
        stacks = f".{base.family.experts_path}."
        trained = {name: shape for name, shape in trained.items() if stacks not in name}
    alike = _alike(trained, adapter) if old else {}
    with torch.device("meta"):
        if old:
            model = modules_for({first: trained[names[0]] for first, names in alike.items()})
        elif trained is base.names.shapes:
            model = on_meta(base.model_config)
        else:
            model = modules_for(trained)
        wrapped = wrap(model, adapter)
    reader = _Reader(adapter, base, trained)
    _check_biases(adapter)
    reader.check_keys(_expected(wrapped, alike))
    updates = Updates(old, not old and not bare, attention_only)
    for module in modules_of(wrapped):
        for name in alike.get(module.loaded, [module.loaded]):
            path = name.removesuffix(".weight") if alike else module.path
            if (update := reader.low_rank(path, name, module.module)) is not None:
                updates.low_rank.append(update)
    for key, info in adapter.tensors.items():
        if ".lora_" not in key:
            name = key.replace(".base_layer.", ".")
            reader.check_shape(key, info.shape, trained[name], name)
            updates.replaced.append(Replace(name, key))
    reader.check_version()
    return updates


def _alike(names: Iterable[str], adapter: Adapter) -> dict[str, list[str]]:
    """One name for all experts of a layer -> their names; a config can tell experts apart.

    PEFT takes a millisecond for a module, and a model may have a hundred thousand.
    """
    keys = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters",
            "rank_pattern", "alpha_pattern")  # fmt: skip
    rules = [adapter.config.get(key) or () for key in keys]
    patterns = "\n".join(r if isinstance(r, str) else "\n".join(map(str, r)) for r in rules)
    others = re.sub(r"\\d|\bw[123]\b|layers\W+[\d|]*", "", patterns)
    numbered = re.search(r"\d", others) is not None
    alike: dict[str, list[str]] = {}
    for name in names:
        first = name if numbered else re.sub(r"\.experts\.\d+\.", ".experts.0.", name)
        alike.setdefault(first, []).append(name)
    return alike


def _expected(wrapped: object, alike: Mapping[str, list[str]]) -> set[str]:
    """The keys that PEFT would save."""
    from peft import get_peft_model_state_dict

    keys = set()
    for key in get_peft_model_state_dict(wrapped, save_embedding_layers=False):
        path, lora, factor = key.removeprefix(PREFIX).partition(".lora_")
        names = alike.get(f"{path}.weight" if lora else path, [f"{path}.weight" if lora else path])
        keys |= {f"{n.removesuffix('.weight')}{lora}{factor}" if lora else n for n in names}
    return keys


def parts_in_files(updates: Updates, base: Checkpoint, adapter: Adapter) -> dict[str, list[Part]]:
    """The parts of each tensor in the files that changes, in the order in which they apply."""
    parts: dict[str, list[Part]] = {}
    for replaced in updates.replaced:
        for part in _of_saved(replaced, base, adapter, updates.of_files):
            parts.setdefault(part.place.name, []).append(part)
    for update in updates.low_rank:
        places = _places(update.name, update.a, base, adapter, updates.of_files)
        for slot, expert in enumerate(update.experts or [0]):
            for place in places[expert]:
                parts.setdefault(place.name, []).append(Part(update, place, slot))
    return parts


def _places(
    name: str, key: str, base: Checkpoint, adapter: Adapter, of_files: bool
) -> list[list[Place]]:
    if not of_files:
        if name in base.names.split:
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}': the files have this matrix and others "
                f"in one tensor, '{base.names.files[name][0]}', into which it cannot be merged; "
                "train without it"
            )
        return base.names.places(name)
    shape = base.tensors[name].shape
    experts = range(shape[0]) if len(shape) == 3 else [None]
    return [[Place(name, expert)] for expert in experts]


def _of_saved(
    replaced: Replace, base: Checkpoint, adapter: Adapter, of_files: bool
) -> Iterator[Part]:
    """The parts of a tensor that trained in full: whole rows, in the loaded model's order."""
    name, info = replaced.name, adapter.tensors[replaced.key]
    places = _places(name, replaced.key, base, adapter, of_files)
    columns = info.shape[-1] if len(info.shape) > 1 else 1
    matrix = torch.Size(info.shape).numel() // len(places)
    for expert, of_expert in enumerate(places):
        for place in of_expert:
            if place.transposed or not isinstance(place.rows, slice):
                raise AdapterError(
                    f"{adapter.folder}: adapter tensor '{replaced.key}': the base stores "
                    f"'{place.name}' in another order than the model, and fully trained experts "
                    "cannot be merged into that; train them with LoRA"
                )
            yield Part(replaced, place, 0, expert * matrix + (place.rows.start or 0) * columns)


class _Reader:
    """Checks the tensors of one adapter against the modules that PEFT makes for it."""

    def __init__(self, adapter: Adapter, base: Checkpoint, trained: Mapping[str, tuple[int, ...]]):
        self.adapter, self.base, self.trained = adapter, base, trained
        self.swapped: set[bool] = set()
        self._modules = {name.rpartition(".")[0] for name in trained} | trained.keys()
        head, files = "lm_head.weight", base.names.files
        self._tied: set[str] = set()
        if base.config.get("tie_word_embeddings") or head not in files:
            both = head, f"{base.family.backbone}.embed_tokens.weight"
            self._tied = {*both, *(name for loaded in both for name in files.get(loaded, ()))}

    def check_keys(self, expected: set[str]) -> None:
        """Check for all keys that PEFT would save for this config and model, and for no others."""
        adapter = self.adapter
        stored = adapter.tensors.keys() | adapter.tables.keys()
        extra = [key for key in stored if key not in expected and not key.endswith(_MAY_ADD)]
        for key in sorted(stored):
            self._check_target(key)
        for key in sorted(expected - stored):
            if not key.endswith(_MAY_LACK) and self._chosen(key) != ():
                raise AdapterError(
                    f"{adapter.folder}: adapter tensor '{key}' is missing, which {CONFIG} requires"
                    + (did_you_mean(key, extra) if extra else "; copy the adapter again")
                )
        if extra:
            raise AdapterError(
                f"{adapter.folder / WEIGHTS}: adapter tensor '{min(extra)}' is not among those "
                f"that target_modules, target_parameters and modules_to_save of {CONFIG} describe "
                f"({len(extra)} such tensors); use the config of this adapter"
            )

    def low_rank(self, path: str, name: str, module: Any) -> LowRank | None:
        """The update of tensor ``name`` by one of PEFT's modules; None for experts not chosen."""
        from peft.tuners.lora.layer import ParamWrapper

        shape, rank = self.trained[name], module.r["default"]
        embedding = "default" in module.lora_embedding_A
        names = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
        a, b = (f"{path}.lora_{factor}" for factor in names)
        magnitude: str | None = f"{path}.lora_magnitude_vector"
        if magnitude not in self.adapter.tensors:
            magnitude = None
        stack = isinstance(module, ParamWrapper) and len(shape) == 3
        if len(shape) != 2 and not stack:
            raise self._error(a, f"LoRA targets '{name}', which has shape {list(shape)}")
        experts, grouped, swapped, transposed = None, False, False, embedding
        if stack:
            experts = self._chosen(a)
            experts = tuple(range(shape[0])) if experts is None else experts
            if not experts:
                return None
            if max(experts) >= shape[0]:
                raise self._error(
                    a,
                    f"moe_finetune.json lists expert {max(experts)}, but the base has {shape[0]}",
                )
            transposed = getattr(module.get_base_layer(), "is_transposed", False)
            grouped, swapped = self._packing(name, a, b, transposed)
            transposed = transposed or swapped
        slots, sizes = len(experts or [0]), shape[-2:][::-1] if transposed else shape[-2:]
        self.check_shape(a, self._shape(a), (slots * rank, sizes[1]), name, rank)
        self.check_shape(b, self._shape(b), (sizes[0], rank * slots), name, rank)
        if magnitude is not None:
            self.check_shape(magnitude, self._shape(magnitude), shape[:1], name)
        scale = module.scaling["default"]
        return LowRank(name, a, b, rank, scale, experts, grouped, swapped, transposed, magnitude)

    def _packing(self, name: str, a: str, b: str, transposed: bool) -> tuple[bool, bool]:
        """Return LowRank's ``grouped`` and ``swapped`` for a stack (E, O, I)."""
        config, file = self.adapter.config, self.adapter.folder / CONFIG
        if self.adapter.metadata.experts is not None:
            return False, False  # written by this toolkit
        grouped = grouped_by_expert(config, name.rpartition(".")[2], file)
        if transposed:  # of a class with (E, I, O) every version of PEFT has the inputs in A
            return grouped, False
        _, out_size, in_size = self.trained[name]
        swapped = outputs_first(config, self._shape(a), self._shape(b), out_size, in_size, file)
        self.swapped.add(swapped)
        return grouped, swapped

    def check_version(self) -> None:
        """Refuse a version of PEFT that the shapes of some stacks contradict."""
        if len(self.swapped) > 1:  # square matrices were read by the version, others by their shape
            raise AdapterError(
                f"{self.adapter.folder / CONFIG}: peft_version "
                f"{self.adapter.config.get('peft_version')!r} contradicts the tensors: the shapes "
                "of the experts' factors are those of "
                + ("PEFT 0.19 or newer" if before_019(self.adapter.config) else "PEFT before 0.19")
                + ". Correct the version: it decides how square matrices are read"
            )

    def check_shape(
        self,
        key: str,
        shape: tuple[int, ...],
        expected: tuple[int, ...],
        name: str,
        rank: int | None = None,
    ) -> None:
        if shape != expected:
            raise self._error(
                key,
                f"shape {list(shape)}, but '{name}' of the base {self.base.folder} "
                + (f"and rank {rank} of {CONFIG} need" if rank else "needs")
                + f" {list(expected)}; the adapter was trained on another base"
                + (", or the config is another adapter's" if rank else ""),
            )

    def _chosen(self, key: str) -> tuple[int, ...] | None:
        """The experts that moe_finetune.json lists for the layer of ``key``; None without a list.

        Adapters of this toolkit until November 2026 have factors of chosen experts only.
        """
        selection, layer = self.adapter.metadata.experts, _LAYER.search(key)
        if selection is None or layer is None or f".{self.base.family.experts_path}." not in key:
            return None
        return selection.get(int(layer[1]), ())

    def _check_target(self, key: str) -> None:
        """Check that the base has what ``key`` changes, on its own, and all of its experts."""
        base = self.base
        path, lora, _ = key.replace(".base_layer", "").partition(".lora_")
        name = f"{path}.weight" if lora else path
        if self._chosen(key) == ():
            raise self._error(key, "moe_finetune.json lists no experts for its layer")
        if name in self._tied:
            raise self._error(
                key,
                "the base ties lm_head and embed_tokens, and a merge would change both; untie "
                "them first",
            )
        if (path if lora else name) in self._modules:
            return
        root, backbone = key.partition(".layers.")[0], base.family.backbone
        if root != backbone and {root, backbone} == {"model", "model.language_model"}:
            raise self._error(
                key,
                f"the base's layers are '{backbone}.layers', and the adapter's '{root}.layers': it "
                "was trained on another class of the checkpoint (with or without its vision part); "
                "train on the class of load_model, or rename the adapter's tensors",
            )
        raise self._error(
            key, f"the base {base.folder} has no '{path}'; the adapter was trained on another base"
        )

    def _shape(self, key: str) -> tuple[int, ...]:
        return self.adapter.tensors[key].shape

    def _error(self, key: str, problem: str) -> AdapterError:
        return AdapterError(f"{self.adapter.folder}: adapter tensor '{key}': {problem}")


def _check_biases(adapter: Adapter) -> None:
    """Refuse biases that trained and were not saved: PEFT forgets those of ``lora_only``."""
    if adapter.config.get("bias") != "lora_only":
        return
    if not any(key.endswith(".bias") for key in adapter.tensors):
        raise AdapterError(
            f"{adapter.folder / CONFIG}: bias is 'lora_only', but PEFT did not save the biases "
            "that trained, and without them the adapter computes something else. Train with bias "
            "'none' or 'all'; if the biases never changed, set \"bias\": \"none\" in the file"
        )
