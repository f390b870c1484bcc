"""Open an adapter of any maker over its base, or say why it does not fit.

PEFT says it for transformers' class, and PEFT's rules for names that no class has: those of the
files, with transformers 4, and today's without the stacks, in which PEFT before 0.19 found no
matrices. What the adapter lacks, or has besides, is refused. Factors of stacks are read as PEFT
packs them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import (
    as_a,
    as_b,
    before_019,
    grouped_by_expert,
    lacks_experts,
    names_files,
    of_all_experts,
    outputs_first,
    vectors_of_a,
    vectors_of_b,
)
from moe_finetune.checkpoint.adapters.files import (
    CONFIG,
    WEIGHTS,
    Adapter,
    check_belongs,
    read_adapter,
    read_bias,
)
from moe_finetune.checkpoint.adapters.forms import in_class
from moe_finetune.checkpoint.adapters.peft_model import (
    MAY_LACK,
    Target,
    targets_by_name,
    targets_in_class,
)
from moe_finetune.checkpoint.adapters.updates import LowRank, OpenAdapter, Replace
from moe_finetune.checkpoint.exported_bias import check_bias
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import Computed, computed, read_tensor
from moe_finetune.errors import AdapterError, did_you_mean
from moe_finetune.io.checkpoint_files import PRUNED

# PEFT also saves these where the vocabulary has grown or LoRA is on one of them.
_MAY_ADD = (
    "embed_tokens.weight",
    "embed_tokens.base_layer.weight",
    "lm_head.weight",
    "lm_head.base_layer.weight",
    MAY_LACK,
)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_model.model")
"""Prefixes of torch.compile, activation checkpointing, FSDP, and of PEFT a second time."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def check_adapter(path: str | Path, base: Checkpoint) -> OpenAdapter:
    """Open an adapter to use unmerged with ``base``, with all checks of a merge."""
    adapter = open_adapter(path, base)
    check_bias(base, read_bias(adapter.folder) or {})
    return adapter


def open_adapter(path: str | Path, base: Checkpoint, values: bool = True) -> OpenAdapter:
    """An adapter of any maker over ``base``; refused unless it fits.

    ``values``: also check that its values are finite, and its base's fingerprint.
    """
    as_saved = read_adapter(path)
    stored = in_class(as_saved, base)
    _check_targets(stored)
    of_files = names_files(stored, base)
    attention_only = not of_files and lacks_experts(stored, base)
    if of_files:
        trained = {n: i.shape for n, i in base.tensors.items() if n not in base.untrained}
    else:
        stacks = f".{base.places.experts_path}."
        shapes = base.names.shapes
        trained = {n: s for n, s in shapes.items() if not (attention_only and stacks in n)}
    if of_files or attention_only:
        targets, expected = targets_by_name(stored, trained)
    else:
        targets, expected = targets_in_class(stored, base.model_config)
    reader = _Reader(stored, base, trained)
    _check_biases(stored, expected)
    reader.check_keys(expected)
    low_rank = [update for target in targets if (update := reader.low_rank(target)) is not None]
    reader.check_version()
    replaced = []
    for key, info in stored.tensors.items():
        if ".lora_" not in key:
            name = key.replace(".base_layer.", ".")
            reader.check_shape(key, info.shape, trained[name], name)
            replaced.append(Replace(name, key))
    if values:
        check_belongs(as_saved, base)
    return OpenAdapter(
        stored.folder,
        stored.config,
        {**stored.tensors, **reader.repacked},
        stored.metadata,
        stored.tables,
        base=base,
        low_rank=low_rank,
        replaced=replaced,
        of_files=of_files,
        attention_only=attention_only,
    )


class _Reader:
    """Checks the tensors of one adapter against the modules that PEFT makes for it."""

    def __init__(self, adapter: Adapter, base: Checkpoint, trained: Mapping[str, tuple[int, ...]]):
        self.adapter, self.base, self.trained = adapter, base, trained
        self.swapped: set[bool] = set()
        self.repacked: dict[str, Computed] = {}
        self._modules = {name.rpartition(".")[0] for name in trained} | trained.keys()
        head, files = "lm_head.weight", base.names.files
        self._tied: set[str] = set()
        if base.config.get("tie_word_embeddings") or head not in files:
            both = head, f"{base.places.backbone}.embed_tokens.weight"
            self._tied = {*both, *(name for loaded in both for name in files.get(loaded, ()))}

    def check_keys(self, expected: set[str]) -> None:
        """Check for all keys that PEFT would save for this config and model, and for no others."""
        adapter = self.adapter
        stored = adapter.tensors.keys() | adapter.tables.keys()
        expected = {key for key in expected if self._chosen(key) != ()}
        extra = [key for key in stored if key not in expected and not key.endswith(_MAY_ADD)]
        for key in sorted(stored):
            self._check_target(key)
        layers = {found[0] for key in stored if (found := _LAYER.search(key))}
        for key in sorted(expected - stored):
            if key.endswith(MAY_LACK):
                continue
            found, remedy = _LAYER.search(key), "copy the adapter again"
            if found and found[0] not in layers:
                remedy = f"it has nothing of that layer; give its own base, or {remedy}"
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' is missing, which {CONFIG} requires"
                + (did_you_mean(key, extra) if extra else f"; {remedy}")
            )
        if extra:
            raise AdapterError(
                f"{adapter.folder / WEIGHTS}: adapter tensor '{min(extra)}' is not among those "
                f"that target_modules, target_parameters and modules_to_save of {CONFIG} describe "
                f"({len(extra)} such tensors); use the config of this adapter"
            )

    def low_rank(self, target: Target) -> LowRank | None:
        """The update that a target stands for; None for experts not chosen."""
        path = target.path
        name = target.name
        rank = target.rank
        shape, embedding = self.trained[name], target.embedding
        names = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
        a, b = (f"{path}.lora_{factor}" for factor in names)
        magnitude: str | None = f"{path}.lora_magnitude_vector"
        if magnitude not in self.adapter.tensors:
            magnitude = None
        if len(shape) not in (2, 3):
            raise self._error(a, f"LoRA targets '{name}', which has shape {list(shape)}")
        experts = None
        grouped = False
        swapped = False
        if len(shape) == 3:
            experts = self._chosen(a)
            experts = tuple(range(shape[0])) if experts is None else experts
            if not experts:
                return None
            if max(experts) >= shape[0]:
                raise self._error(
                    a,
                    f"moe_finetune.json lists expert {max(experts)}, but the base has {shape[0]}",
                )
            grouped, swapped = self._packing(target, a, b)
        transposed = embedding or (target.inputs_first and len(shape) == 3)  # not the biases
        slots = len(experts or [0])
        sizes = shape[-2:][::-1] if transposed or swapped else shape[-2:]
        self.check_shape(a, self._shape(a), (slots * rank, sizes[1]), name, rank)
        self.check_shape(b, self._shape(b), (sizes[0], rank * slots), name, rank)
        if magnitude is not None:
            self.check_shape(magnitude, self._shape(magnitude), shape[:1], name)
        if experts is not None and (grouped or swapped or experts != tuple(range(shape[0]))):
            self._repack(a, b, experts, shape[0], grouped, swapped)
        return LowRank(
            name=name,
            a=a,
            b=b,
            rank=rank,
            scale=target.scale,
            experts=experts,
            transposed=transposed,
            magnitude=magnitude,
        )

    def _packing(self, target: Target, a: str, b: str) -> tuple[bool, bool]:
        """Whether B of a stack is grouped by expert, and whether A has the outputs."""
        config, file = self.adapter.config, self.adapter.folder / CONFIG
        if self.adapter.metadata.experts is not None:  # written by this toolkit
            return False, False
        parameter, swapped = target.name.rpartition(".")[2], False
        if not target.inputs_first:  # where they are, every version of PEFT has the inputs in A
            _, rows, columns = self.trained[target.name]
            swapped = outputs_first(config, self._shape(a), self._shape(b), rows, columns, file)
            self.swapped.add(swapped)
        return grouped_by_expert(config, parameter, swapped, file), swapped

    def _repack(
        self, a: str, b: str, experts: tuple[int, ...], total: int, grouped: bool, swapped: bool
    ) -> None:
        """Read the factors of a stack as PEFT packs them, with zeros for experts not chosen."""
        info_a = self.adapter.tensors[a]
        info_b = self.adapter.tensors[b]
        slots = len(experts)

        def of_a() -> Tensor:
            return of_all_experts(vectors_of_a(read_tensor(info_a), slots), experts, total)

        def of_b() -> Tensor:
            vectors_nrZ = vectors_of_b(read_tensor(info_b), slots, grouped)
            return of_all_experts(vectors_nrZ, experts, total)

        sources = [(of_a, info_a.dtype, info_a.shape[1]), (of_b, info_b.dtype, info_b.shape[0])]
        if swapped:
            sources.reverse()
        (inputs, a_dtype, in_size), (outputs, b_dtype, out_size) = sources
        size = info_a.shape[0] // slots * total
        self.repacked[a] = computed(a, a_dtype, (size, in_size), lambda: as_a(inputs()))
        self.repacked[b] = computed(b, b_dtype, (out_size, size), lambda: as_b(outputs()))

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
        vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if vocabulary and rank is None and shape[1:] == expected[1:] and shape != expected:
            raise self._error(
                key,
                f"the training resized the vocabulary to {shape[0]} tokens, and the base "
                f"{self.base.folder} has {expected[0]}; resize a copy of the base with "
                f"transformers (model.resize_token_embeddings({shape[0]}), then save_pretrained "
                "of model and tokenizer), and give that as the base",
            )
        if shape != expected:
            raise self._error(
                key,
                f"shape {list(shape)}, but '{name}' of the base {self.base.folder} "
                + (f"and rank {rank} of {CONFIG} need" if rank else "needs")
                + f" {list(expected)}; the adapter was trained on another base"
                + (", or the config is another adapter's" if rank else "")
                + self._of_pruned(name),
            )

    def _chosen(self, key: str) -> tuple[int, ...] | None:
        """The experts that moe_finetune.json lists for the layer of ``key``; None without a list.

        A training's checkpoints have factors of chosen experts only.
        """
        selection, layer = self.adapter.metadata.experts, _LAYER.search(key)
        if selection is None or layer is None or f".{self.base.places.experts_path}." not in key:
            return None
        return selection.get(int(layer[1]), ())

    def _check_target(self, key: str) -> None:
        """Check that the base has what ``key`` changes, on its own, and all of its experts."""
        base = self.base
        path, lora, _ = key.replace(".base_layer", "").partition(".lora_")
        name = f"{path}.weight" if lora else path
        if name in self._tied:
            raise self._error(
                key,
                "the base ties lm_head and embed_tokens, and a merge would change both; untie "
                "them in a copy with transformers (from_pretrained(base, tie_word_embeddings="
                "False), lm_head.weight = a clone of embed_tokens.weight, save_pretrained), and "
                "give that as the base",
            )
        if (path if lora else name) in self._modules:
            return
        if wrapper := next((w for w in _WRAPPERS if f"{w}." in f".{key}"), None):
            raise self._error(
                key,
                f"its name has the prefix '{wrapper}' of a wrapper that was around the model when "
                "it was saved; rename the tensors without it, or save the unwrapped model's "
                "adapter",
            )
        root, backbone = key.partition(".layers.")[0], base.places.backbone
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

    def _of_pruned(self, name: str) -> str:
        """What to do with an adapter of the base from which some experts were dropped."""
        places = self.base.places
        paths = f".{places.experts_path}.", f".{places.router_path}."
        if not (self.base.folder / PRUNED).is_file() or not any(path in name for path in paths):
            return ""
        return (
            f", or on this one before it was pruned ({PRUNED}): then merge it into that one, and "
            "prune the merged checkpoint"
        )

    def _shape(self, key: str) -> tuple[int, ...]:
        return self.adapter.tensors[key].shape

    def _error(self, key: str, problem: str) -> AdapterError:
        return AdapterError(f"{self.adapter.folder}: adapter tensor '{key}': {problem}")


def _check_targets(adapter: Adapter) -> None:
    """Refuse a config that does not say what the factors change."""
    paths = (key.replace(".base_layer", "").partition(".lora_") for key in adapter.tensors)
    ends = sorted({path.rpartition(".")[2] for path, lora, _ in paths if lora})
    if ends and not any(adapter.config.get(f"target_{kind}") for kind in ("modules", "parameters")):
        raise AdapterError(
            f"{adapter.folder / CONFIG}: target_modules and target_parameters are empty; the file "
            f"has factors of {', '.join(ends)}: list the modules among them in target_modules, and "
            "the parameters of stacks of experts in target_parameters"
        )


def _check_biases(adapter: Adapter, expected: set[str]) -> None:
    """Refuse biases that trained and were not saved: some PEFTs forget those of ``lora_only``."""
    if adapter.config.get("bias") != "lora_only":
        return
    stored, trained = (
        any(key.endswith(".bias") for key in keys) for keys in (adapter.tensors, expected)
    )
    if trained and not stored:
        raise AdapterError(
            f"{adapter.folder / CONFIG}: bias is 'lora_only', but PEFT did not save the biases "
            "that trained, and without them the adapter computes something else. Train with bias "
            "'none' or 'all'; if the biases never changed, set \"bias\": \"none\" in the file"
        )
