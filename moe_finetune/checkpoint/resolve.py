"""From an adapter's keys to the updates of the base's tensors.

PEFT's keys have no parameter name for fused experts. Wrappers are nested in the order in which the
module declares its parameters: of two wrappers on one experts module the inner (one more
``base_layer``) is ``gate_up_proj``, the outer ``down_proj``. A single wrapper has the bare key, and
the config's ``target_parameters`` names its parameter. The shapes are checked against the base
afterwards.

Shape legend: E routed experts, n experts with LoRA, r rank, H hidden, D expert width.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from moe_finetune.checkpoint.adapter import CONFIG, Adapter, unused
from moe_finetune.checkpoint.adapter_layout import (
    before_019,
    grouped_by_expert,
    outputs_first,
)
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.updates import LowRank, Magnitude, Replace, Update
from moe_finetune.errors import AdapterError
from moe_finetune.models.structure import pieces_on_disk, renamed_as_loaded

_LORA = re.compile(r"(?P<path>.+?)(?P<depth>(?:\.base_layer)*)\.lora_(?P<factor>[AB])\.weight")
_MAGNITUDE = ".lora_magnitude_vector"
_EMBEDDING = re.compile(r"(?P<path>.+?)\.lora_embedding_(?P<factor>[AB])")


def resolve(adapter: Adapter, base: Checkpoint) -> list[tuple[str, Update]]:
    """All updates of ``adapter`` as (base tensor name, update).

    Raises:
        AdapterError: a key matches no tensor of the base, a shape or rank does not fit, a factor
            lacks its partner, or a tensor is unused.
    """
    return list(_Resolver(adapter, base).run())


def _shares(names: list[str], sizes: list[int]) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Each tensor with its range of rows; None instead of a range for a single tensor."""
    for index, name in enumerate(names):
        first = sum(sizes[:index])
        yield name, (first, first + sizes[index]) if len(names) > 1 else None


class _Resolver:
    def __init__(self, adapter: Adapter, base: Checkpoint):
        self.adapter, self.base = adapter, base
        self.parameters = base.family.expert_parameters
        family = base.family
        layers = re.escape(f"{family.backbone}.layers.")
        self.experts = re.compile(rf"{layers}(\d+)\.{re.escape(family.experts_path)}")
        self.head = self.base.name_in_files("lm_head.weight")
        self.embedding = self.base.name_in_files(f"{family.backbone}.embed_tokens.weight")
        self.used: list[str] = []
        self.swapped: set[bool] = set()

    def run(self) -> Iterator[tuple[str, Update]]:
        pairs: dict[tuple[str, int], dict[str, str]] = {}
        embeddings: dict[str, dict[str, str]] = {}
        plain: list[str] = []
        magnitudes: list[str] = []
        # Keys by kind: pairs of factors by module and nesting, embeddings' pairs, DoRA's
        # norms, and tensors that trained in full.
        for key in self.adapter.tensors:
            if match := _LORA.fullmatch(key):
                depth = match["depth"].count("base_layer")
                pairs.setdefault((match["path"], depth), {})[match["factor"]] = key
            elif match := _EMBEDDING.fullmatch(key):
                embeddings.setdefault(match["path"], {})[match["factor"]] = key
            elif key.endswith(_MAGNITUDE):
                magnitudes.append(key)
            elif ".lora_" not in key:
                plain.append(key)
        for (path, depth), pair in pairs.items():
            a, b = self._both(path, pair)
            if (layer := self._experts_layer(path)) is not None:
                depths = sorted(depth for other, depth in pairs if other == path)
                yield from self._fused(path, layer, self._parameter(path, depth, depths), a, b)
            elif depth:
                self._check_root(a)
                raise self._error(a, "nested factors are supported only for fused experts")
            else:
                yield from self._linear(path, a, b)
        for path, pair in embeddings.items():
            yield self._embedding(path, *self._both(path, pair))
        for key in magnitudes:
            yield from self._magnitude(key)
        for key in plain:
            yield from self._saved(key)
        if len(self.swapped) > 1:  # square matrices were read by the version, others by their shape
            raise AdapterError(
                f"{self.adapter.folder / CONFIG}: peft_version "
                f"{self.adapter.config.get('peft_version')!r} contradicts the tensors: the shapes "
                "of the experts' factors are those of "
                + ("PEFT 0.19 or newer" if before_019(self.adapter.config) else "PEFT before 0.19")
                + ". Correct the version: it decides how square matrices are read"
            )
        self._check_selection()
        unused(self.adapter, self.used)

    # Names

    def _experts_layer(self, path: str) -> int | None:
        match = self.experts.fullmatch(path)
        return int(match[1]) if match else None

    def _target(self, name: str, key: str) -> str:
        """The base tensor that ``key`` changes; it must exist and not be tied to another."""
        disk = self.base.name_in_files(name)
        tied = self.base.config.get("tie_word_embeddings") or self.head not in self.base.tensors
        if tied and disk in (self.head, self.embedding):
            raise self._error(
                key,
                "the base ties lm_head and embed_tokens, and a merge would change both; untie "
                "them first",
            )
        if disk not in self.base.tensors:
            self._check_root(key)
            raise self._error(
                key,
                f"the base {self.base.folder} has no tensor '{disk}'; "
                "the adapter was trained on another base",
            )
        return disk

    def _check_root(self, key: str) -> None:
        """Refuse keys of another class of the same checkpoint: with or without the vision part."""
        root, backbone = key.partition(".layers.")[0], self.base.family.backbone
        if root != backbone and {root, backbone} == {"model", "model.language_model"}:
            raise self._error(
                key,
                f"the base's layers are '{backbone}.layers', and the adapter's '{root}.layers': it "
                "was trained on another class of the checkpoint (with or without its vision part); "
                "train on the class of load_model, or rename the adapter's tensors",
            )

    # Updates

    def _linear(self, path: str, a: str, b: str) -> Iterator[tuple[str, Update]]:
        parameter = f"{path}.weight"
        rule = parameter if self.adapter.targets_parameter(parameter) else path
        names = self._linear_names(parameter, a)
        if len(self.base.tensors[names[0]].shape) == 3:
            yield from self._stack_of_files(names[0], a, b)
            return
        rank = self._rank(rule, a, 1)
        sizes = [self._matrix(name)[0] for name in names]
        self._shape(a, (rank, self._matrix(names[0])[1]), names[0])
        if sum(sizes) != self.adapter.tensors[b].shape[0] and self._is_split(parameter):
            raise self._error(
                b,
                f"the files have this matrix and others in one tensor, '{names[0]}', into which "
                "it cannot be merged; train without it",
            )
        self._shape(b, (sum(sizes), rank), names[0])
        update = LowRank(a, b, rank, self.adapter.scaling(rule))
        for name, rows in _shares(names, sizes):
            yield name, replace(update, rows=rows)

    def _is_split(self, parameter: str) -> bool:
        """Return whether loading splits the stored tensor of ``parameter`` into several."""
        loaded = renamed_as_loaded(self.base.model_config, parameter)
        return len(self.base.names.siblings(loaded)) > 1

    def _stack_of_files(self, name: str, a: str, b: str) -> Iterator[tuple[str, Update]]:
        """Factors of a whole stack under its name in the files, as GraniteMoE's before 5."""
        experts, out_size, in_size = self.base.tensors[name].shape
        rank = self._rank(name, a, experts)
        a_shape, b_shape = (self.adapter.tensors[key].shape for key in (a, b))
        config_file = self.adapter.folder / CONFIG
        swapped = outputs_first(
            self.adapter.config, a_shape, b_shape, out_size, in_size, config_file
        )
        ends = (in_size, out_size) if swapped else (out_size, in_size)
        self._shape(a, (experts * rank, ends[1]), name)
        self._shape(b, (ends[0], rank * experts), name)
        update = LowRank(a, b, rank, self.adapter.scaling(name), 0, experts, outputs_first=swapped)
        for expert in range(experts):
            yield name, replace(update, slot=expert, expert=expert)

    def _linear_names(self, parameter: str, key: str) -> list[str]:
        """Tensors in the files that make up a linear layer's weight, stacked by rows."""
        pieces = [self.base.name_in_files(parameter)]
        if pieces == [parameter] and parameter not in self.base.tensors:
            # Such as the two halves of a gate_up_proj, stacked by rows.
            spelling = self.base.family.disk.spelling
            pieces = list(pieces_on_disk(self.base.config, parameter, spelling)) or pieces
        return [self._target(piece, key) for piece in pieces]

    def _magnitude(self, key: str) -> Iterator[tuple[str, Update]]:
        """DoRA's norms of the rows of a linear layer's weight."""
        self.used.append(key)
        names = self._linear_names(f"{key.removesuffix(_MAGNITUDE)}.weight", key)
        sizes = [self._matrix(name)[0] for name in names]
        self._shape(key, (sum(sizes),), names[0])
        for name, rows in _shares(names, sizes):
            yield name, Magnitude(key, rows)

    def _embedding(self, path: str, a: str, b: str) -> tuple[str, Update]:
        name = self._target(f"{path}.weight", a)
        rank = self._rank(path, a, 1)
        tokens, width = self._matrix(name)
        self._shape(a, (rank, tokens), name)
        self._shape(b, (width, rank), name)
        scale = self.adapter.scaling(path)
        return name, LowRank(a, b, rank, scale, transposed=True)

    def _parameter(self, path: str, depth: int, depths: list[int]) -> str:
        """Name of the fused parameter that the wrapper at ``depth`` adapts."""
        named = [p for p in self.parameters if self.adapter.targets_parameter(f"{path}.{p}")]
        if depths != list(range(len(named))):
            raise AdapterError(
                f"{self.adapter.folder}: '{path}' has {len(depths)} pairs of factors, but "
                f"target_parameters in adapter_config.json name {named or 'none of its parameters'}"
            )
        return named[len(named) - 1 - depth]

    def _fused(
        self, path: str, layer: int, parameter: str, a: str, b: str
    ) -> Iterator[tuple[str, Update]]:
        disk, total = self.base.family.disk, self.base.experts.get(layer)
        if total is None:
            raise self._no_experts(a, layer)
        chosen = self._chosen(layer, total, a)
        rule = f"{path}.{parameter}"
        rank = self._rank(rule, a, len(chosen))
        scale = self.adapter.scaling(rule)
        parts = disk.parts(parameter)
        # (O, I) of one part of an expert; the model's matrix stacks the parts by rows.
        if disk.fused:
            name = disk.name(parts[0], layer)
            sizes = self.base.tensors[name].shape[1:]
            out_size, in_size = reversed(sizes) if disk.transposed else sizes
        else:
            name = rule
            out_size, in_size = self._matrix(disk.name(parts[0], layer, chosen[0]))
        ends = len(parts) * out_size, in_size
        grouped, swapped = self._packing(parameter, a, b, ends)
        ends = ends[::-1] if swapped else ends
        # A (n·r, I) has the n experts in blocks of rows, B (O, r·n) has their columns interleaved.
        self._shape(a, (len(chosen) * rank, ends[1]), name)
        self._shape(b, (ends[0], rank * len(chosen)), name)
        stack_update = LowRank(
            a, b, rank, scale, 0, len(chosen), grouped=grouped, outputs_first=swapped
        )
        # In the files: a slice of the stack for each expert, or a tensor for each expert and part,
        # whose rows of B are its share of the model's matrix.
        for slot, expert in enumerate(chosen):
            update = replace(stack_update, slot=slot)
            if disk.fused:
                in_turn = disk.interleaved and name.endswith(f".{disk.gate_up}")
                yield (
                    name,
                    replace(update, transposed=disk.transposed, expert=expert, interleaved=in_turn),
                )
                continue
            for half, part in enumerate(parts):
                rows = (half * out_size, (half + 1) * out_size) if len(parts) > 1 else None
                yield disk.name(part, layer, expert), replace(update, rows=rows)

    def _packing(self, parameter: str, a: str, b: str, sizes: tuple[int, int]) -> tuple[bool, bool]:
        """LowRank's ``grouped`` and ``outputs_first`` for a stack of matrices (O, I)."""
        disk, config = self.base.family.disk, self.adapter.config
        if self.adapter.metadata.experts is not None:
            return False, False  # written by this toolkit
        config_file = self.adapter.folder / CONFIG
        a_shape, b_shape = (self.adapter.tensors[key].shape for key in (a, b))
        # Where the class has (E, I, O), every version of PEFT has the inputs in A.
        class_transposed = disk.transposed and not disk.either
        grouped = grouped_by_expert(config, parameter, config_file)
        if class_transposed:
            return grouped, False
        swapped = outputs_first(config, a_shape, b_shape, *sizes, config_file)
        self.swapped.add(swapped)
        return grouped, swapped

    def _saved(self, key: str) -> Iterator[tuple[str, Update]]:
        name = key.replace(".base_layer.", ".")
        path, _, parameter = name.rpartition(".")
        self.used.append(key)
        if parameter in self.parameters and (layer := self._experts_layer(path)) is not None:
            yield from self._saved_experts(key, layer, parameter)
            return
        target = self._target(name, key)
        self._shape(key, self.base.tensors[target].shape, target)
        yield target, Replace(key)

    def _saved_experts(self, key: str, layer: int, parameter: str) -> Iterator[tuple[str, Update]]:
        disk, total = self.base.family.disk, self.base.experts.get(layer)
        if total is None:
            raise self._no_experts(key, layer)
        parts = disk.parts(parameter)
        if disk.fused:
            name = disk.name(parts[0], layer)
            if disk.interleaved or (disk.either and disk.transposed):
                raise self._error(
                    key,
                    f"the base stores '{name}' in another order than the model, and fully "
                    "trained experts cannot be merged into that; train them with LoRA",
                )
            self._shape(key, self.base.tensors[name].shape, name)
            yield name, Replace(key, stacked=True)
            return
        out_size, in_size = self._matrix(disk.name(parts[0], layer, 0))
        self._shape(key, (total, len(parts) * out_size, in_size), parameter)
        for index in range(total * len(parts)):
            expert, half = divmod(index, len(parts))
            name = disk.name(parts[half], layer, expert)
            yield name, Replace(key, index * out_size * in_size)

    # Checks

    def _chosen(self, layer: int, total: int, key: str) -> tuple[int, ...]:
        selection = self.adapter.metadata.experts
        if selection is None:
            return tuple(range(total))
        if layer not in selection:
            raise self._error(key, f"moe_finetune.json lists no experts for layer {layer}")
        if max(selection[layer]) >= total:
            raise self._error(
                key,
                f"moe_finetune.json lists expert {max(selection[layer])} of layer {layer}, but "
                f"the base has {total}",
            )
        return selection[layer]

    def _check_selection(self) -> None:
        with_factors = {
            layer
            for key in self.used
            if (lora := _LORA.fullmatch(key))
            and (layer := self._experts_layer(lora["path"])) is not None
        }
        bare = sorted(set(self.adapter.metadata.experts or ()) - with_factors)
        if bare:
            raise AdapterError(
                f"{self.adapter.folder}: moe_finetune.json lists experts of layer {bare[0]}, but "
                "the adapter has no factors for them"
            )

    def _both(self, path: str, pair: dict[str, str]) -> tuple[str, str]:
        if len(pair) != 2:
            ((present, key),) = pair.items()
            missing = "B" if present == "A" else "A"
            raise self._error(key, f"its partner lora_{missing} of '{path}' is missing")
        self.used += pair.values()
        return pair["A"], pair["B"]

    def _matrix(self, name: str) -> tuple[int, int]:
        info = self.base.tensors[name]
        if len(info.shape) != 2:
            raise AdapterError(
                f"{self.adapter.folder}: LoRA targets '{name}', which has shape {list(info.shape)}"
            )
        return info.shape[0], info.shape[1]

    def _rank(self, rule: str, key: str, slots: int) -> int:
        rank, rows = self.adapter.rank(rule), self.adapter.tensors[key].shape[0]
        if rows != rank * slots:
            raise self._error(
                key, f"{rows} rows, but rank {rank} for {slots} expert(s) needs {rank * slots}"
                if slots > 1 else f"{rows} rows, but adapter_config.json gives it rank {rank}"
            )  # fmt: skip
        return rank

    def _shape(self, key: str, expected: tuple[int, ...], target: str) -> None:
        shape = self.adapter.tensors[key].shape
        if shape != expected:
            raise self._error(
                key,
                f"shape {list(shape)}, but '{target}' of the base {self.base.folder} needs "
                f"{list(expected)}; the adapter was trained on another base",
            )

    def _no_experts(self, key: str, layer: int) -> AdapterError:
        return self._error(
            key,
            f"layer {layer} of the base {self.base.folder} has no experts; "
            "the adapter was trained on another base",
        )

    def _error(self, key: str, problem: str) -> AdapterError:
        return AdapterError(f"{self.adapter.folder}: adapter tensor '{key}': {problem}")
