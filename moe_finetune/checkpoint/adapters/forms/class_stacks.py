"""The stacks of transformers' class that factors of other programs' forms make, as PEFT packs them.

Where gate and up have an A each and the class fuses them, the stack has both ranks: B is block
diagonal, and the scaling stays. Factors that all experts share are repeated.

Shape legend: E experts, n = E, or 1 for a shared factor; r rank, I inputs, O outputs, R the rank of
a stack, Z inputs or outputs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import as_a, as_b
from moe_finetune.checkpoint.adapters.files import CONFIG, Adapter
from moe_finetune.checkpoint.adapters.forms.expert_keys import ROLES, WITHOUT_GATE, Role
from moe_finetune.checkpoint.adapters.forms.stack_config import (
    check_config,
    check_one_pattern,
    chosen_layers,
    pattern_of,
    scale_of,
    tensor_error,
)
from moe_finetune.checkpoint.adapters.in_peft import config_for_peft, takes_parameter
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import computed
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.models.class_structure import meta_model
from moe_finetune.moe.layers import is_concatenated

GATE_UP_ROWS = "gate_up_rows"
"""Key of the config: ``halves`` or ``alternating`` rows of gate and up in a maker's stacks."""
_LAYER = re.compile(r"(.*\.layers\.)(\d+)\.(.+)")


@dataclass(frozen=True)
class Vectors:
    """One side of a projection of a layer's experts: ``read`` gives the vectors (n, r, Z)."""

    key: str
    dtype: str
    shape: tuple[int, int, int]
    read: Callable[[], Tensor]

    def same_as(self, other: "Vectors") -> bool:
        return self.shape == other.shape and torch.equal(self.read(), other.read())


@dataclass(frozen=True)
class Projection:
    """A projection's factors in one layer: A's vectors (n, r, I), B's (n, r, O)."""

    layer: int
    role: Role
    a: Vectors
    b: Vectors


class _Rows(NamedTuple):
    """Which rows of a class's stack a role has, and their number."""

    parameter: str
    rows: slice
    size: int


Place = tuple[int, Role, str]
"""Layer, role, and "A" or "B"."""


class Sides(dict[Place, Vectors]):
    """The factors of a file by place; one place under two names is refused with both."""

    def __init__(self, stored: Adapter):
        super().__init__()
        self._stored = stored

    def __setitem__(self, place: Place, vectors: Vectors) -> None:
        if place in self:
            raise tensor_error(
                self._stored,
                vectors.key,
                f"the file also has '{self[place].key}' for the same projection; use one of them",
            )
        super().__setitem__(place, vectors)


class ClassExperts:
    """The routed experts of a base's class: paths, sizes, and where gate and up lie."""

    def __init__(self, base: Checkpoint):
        places = base.places
        self.base, self.total, self.layers = base, places.num_experts, places.moe_layers
        self.first, self.down = places.expert_parameters
        self.roles = ROLES if places.gated else WITHOUT_GATE
        self._model = meta_model(base.model_config)
        self._experts = self._model.get_submodule(self.path(self.layers[0]))
        self.inputs_first = bool(getattr(self._experts, "is_transposed", False))
        self._in_files = {
            re.sub(r"\.experts\..*", ".experts", name)
            for names in base.names.files.values()
            for name in names
            if ".experts." in name
        }

    @property
    def concatenated(self) -> bool:
        return not self.base.places.gated or is_concatenated(self._experts)

    def path(self, layer: int) -> str:
        places = self.base.places
        return f"{places.backbone}.layers.{layer}.{places.experts_path}"

    def is_experts(self, path: str, layer: int) -> bool:
        """Whether ``path`` is the module of the layer's experts, in the class or the files."""
        return layer in self.layers and (path == self.path(layer) or path in self._in_files)

    def takes_parameter(self, path: str) -> bool:
        return takes_parameter(self._model, path)

    def sizes(self, parameter: str) -> tuple[int, int]:
        """Rows and columns of a matrix of the stack, whichever way the class stores it."""
        _, *sizes = self.base.names.shapes[f"{self.path(self.layers[0])}.{parameter}"]
        rows, columns = reversed(sizes) if self.inputs_first else sizes
        return rows, columns

    def rows(self, role: Role) -> _Rows:
        parameter = self.down if role == "down" else self.first
        total, _ = self.sizes(parameter)
        if role in ("down", "gate and up") or not self.base.places.gated:
            return _Rows(parameter, slice(0, total), total)
        half, second = total // 2, role == "up"
        if self.concatenated:
            return _Rows(parameter, slice(half * second, half * (1 + second)), half)
        return _Rows(parameter, slice(int(second), None, 2), half)


def in_class(
    stored: Adapter, experts: ClassExperts, projections: list[Projection], used: Iterable[str]
) -> Adapter:
    """``stored`` with the stacks that ``projections`` make, and without the keys ``used`` for them.

    Its config names every target, so that nothing is missing when all of them have their factors.
    """
    used = set(used)
    others = {key: info for key, info in stored.tensors.items() if key not in used}
    tensors: dict[str, TensorInfo] = _under_loaded_names(others, experts.base)
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    for parts in _by_stack(projections, experts).values():
        layer, parameter = parts[0].layer, experts.rows(parts[0].role).parameter
        path = experts.path(layer)
        loaded, inner = f"{path}.{parameter}", _is_inner(parameter, layer, projections, experts)
        key = f"{path}.base_layer" if inner else path
        a, b, ranks[loaded] = _packed(parts, experts, key)
        tensors |= {a.name: a, b.name: b}
        stack_scales = {scale_of(stored, part.a.key, part.a.shape[1]) for part in parts}
        if len(stack_scales) > 1:
            raise tensor_error(stored, parts[0].a.key, "its projections have different scales")
        scales[loaded] = stack_scales.pop()
    modules, parameters = _other_targets(stored, others, experts)
    root = 0.5 if stored.config.get("use_rslora") else 1
    alphas = {re.escape(name): scales[name] * float(rank) ** root for name, rank in ranks.items()}
    config = config_for_peft(stored, {
        "target_modules": modules,
        "target_parameters": [*parameters, *ranks],
        "lora_dropout": 0.0,
        "rank_pattern": {re.escape(n): r for n, r in ranks.items()}
        | (stored.config.get("rank_pattern") or {}),
        "alpha_pattern": alphas | (stored.config.get("alpha_pattern") or {}),
    })  # fmt: skip
    return replace(stored, config=config, tensors=tensors)


def read_projections(
    stored: Adapter, experts: ClassExperts, sides: Mapping[Place, Vectors]
) -> list[Projection]:
    """The projections by layer and role, each shape checked against the base and the config."""
    check_config(stored, experts.base, {layer for layer, _, _ in sides})
    projections = []
    for layer, role in dict.fromkeys((layer, role) for layer, role, _ in sides):
        a, b = (sides.get((layer, role, side)) for side in "AB")
        fused = sides.get((layer, "gate and up", "A"))
        if role in ("gate", "up") and a is not None and fused is not None:
            problem = f"the file also has '{fused.key}' of gate and up; use one of them"
            raise tensor_error(stored, a.key, problem)
        if a is None or b is None:
            present = a or b
            assert present is not None
            raise tensor_error(
                stored, present.key, "the other factor is missing; copy the adapter again"
            )
        rows = experts.rows(role)
        _check_shape(stored, experts, a, experts.sizes(rows.parameter)[1], "inputs")
        _check_shape(stored, experts, b, rows.size, "outputs")
        _check_rank(stored, a, b)
        if role == "gate and up" and not experts.concatenated:
            b = _in_alternating_rows(stored, b)
        projections.append(Projection(layer, role, a, b))
    _check_layers(stored, experts, projections)
    return projections


def _check_shape(
    stored: Adapter, experts: ClassExperts, side: Vectors, size: int, what: str
) -> None:
    count, _, length = side.shape
    if count not in (1, experts.total):
        raise tensor_error(
            stored,
            side.key,
            f"has factors of {count} experts; the base has {experts.total}, and a shared factor "
            "has 1; it was trained on another base",
        )
    if length != size:
        raise tensor_error(
            stored,
            side.key,
            f"has {length} {what} where the base {experts.base.folder} has {size}; it was trained "
            "on another base",
        )


def _check_rank(stored: Adapter, a: Vectors, b: Vectors) -> None:
    if a.shape[1] != b.shape[1]:
        raise tensor_error(
            stored, a.key, f"has rank {a.shape[1]}, and '{b.key}' {b.shape[1]}; copy the adapter "
            "again"
        )  # fmt: skip
    check_one_pattern(stored, (a.key, b.key))
    declared = pattern_of(stored, "rank_pattern", a.key, stored.config["r"])
    if declared != a.shape[1]:
        raise tensor_error(
            stored, a.key, f"has rank {a.shape[1]}, but r of {CONFIG} is {declared}; use the "
            "config of this adapter"
        )  # fmt: skip


def _in_alternating_rows(stored: Adapter, b: Vectors) -> Vectors:
    """B's vectors in the order of a class whose rows of gate and up alternate."""
    order = stored.config.get(GATE_UP_ROWS)
    if order not in ("halves", "alternating"):
        raise tensor_error(
            stored,
            b.key,
            "rows of gate and up alternate in this family, and the file does not say in which "
            f'order it has them. Add to {CONFIG} "{GATE_UP_ROWS}": "halves" if all rows of gate '
            'come first, "alternating" if they are in the order of the model',
        )
    if order == "alternating":
        return b
    return replace(b, read=lambda: b.read().unflatten(-1, (2, -1)).mT.flatten(-2))


def _check_layers(stored: Adapter, experts: ClassExperts, projections: list[Projection]) -> None:
    """Refuse roles that some layers have and others lack."""
    expected = chosen_layers(stored, experts.layers)
    for role in dict.fromkeys(projection.role for projection in projections):
        keys = {p.layer: p.a.key for p in projections if p.role == role}
        for layer in expected:
            if layer not in keys:
                other, key = next(iter(keys.items()))
                missing = key.replace(f".layers.{other}.", f".layers.{layer}.", 1)
                raise _missing(stored, missing)


def _by_stack(
    projections: list[Projection], experts: ClassExperts
) -> dict[tuple[int, str], list[Projection]]:
    stacks: dict[tuple[int, str], list[Projection]] = {}
    for projection in projections:
        parameter = experts.rows(projection.role).parameter
        stacks.setdefault((projection.layer, parameter), []).append(projection)
    return stacks


def _is_inner(
    parameter: str, layer: int, projections: list[Projection], experts: ClassExperts
) -> bool:
    """Whether PEFT's wrapper of the stack lies inside that of the layer's other one."""
    others = {experts.rows(p.role).parameter for p in projections if p.layer == layer}
    return parameter == experts.first and experts.down in others


def _packed(
    parts: list[Projection], experts: ClassExperts, key: str
) -> tuple[TensorInfo, TensorInfo, int]:
    """PEFT's two tensors of a stack, and its rank."""
    total = experts.total
    rows = [experts.rows(part.role) for part in parts]
    outputs, inputs = experts.sizes(rows[0].parameter)
    common = len(parts) == 2 and parts[0].a.same_as(parts[1].a)
    firsts = [0, 0] if common else [0, parts[0].a.shape[1]]
    rank = firsts[len(parts) - 1] + parts[-1].a.shape[1]

    def of_a() -> Tensor:
        factors = [part.a.read().expand(total, -1, -1) for part in (parts[:1] if common else parts)]
        return torch.cat(factors, 1)

    def of_b() -> Tensor:
        values = [part.b.read() for part in parts]
        vectors_ERO = values[0].new_zeros(total, rank, outputs)
        for part_rows, first, value_nrO in zip(rows, firsts, values, strict=False):
            vectors_ERO[:, first : first + value_nrO.shape[1], part_rows.rows] = value_nrO
        return vectors_ERO

    size = total * rank
    a = computed(f"{key}.lora_A.weight", parts[0].a.dtype, (size, inputs), lambda: as_a(of_a()))
    b = computed(f"{key}.lora_B.weight", parts[0].b.dtype, (outputs, size), lambda: as_b(of_b()))
    return a, b, rank


def ranks_of(role: Role, vectors_ERO: Tensor, rows: Mapping[Role, slice]) -> slice:
    """Which of a fused stack's ranks act on the rows of ``role``: all, or half if B is diagonal.

    ``rows``: those of gate and up; ``vectors_ERO``: B's.
    """
    rank = vectors_ERO.shape[1]
    first, second = slice(0, rank // 2), slice(rank // 2, rank)
    if role not in rows or rank % 2 or not vectors_ERO.any():
        return slice(0, rank)
    crossing = vectors_ERO[:, second, rows["gate"]], vectors_ERO[:, first, rows["up"]]
    if any(part.any() for part in crossing):
        return slice(0, rank)
    return first if role == "gate" else second


def _under_loaded_names(tensors: Mapping[str, TensorInfo], base: Checkpoint) -> dict[str, Any]:
    """The other factors, under the class's names where they have those of the files."""
    named = {}
    for key, info in tensors.items():
        path, lora, end = key.partition(".lora_")
        if lora and f"{path}.weight" not in base.names.shapes:
            loaded = base.names.loaded.get(f"{path}.weight")
            path = path if loaded is None else loaded.removesuffix(".weight")
        named[f"{path}{lora}{end}"] = info
    return named


def _other_targets(
    stored: Adapter, tensors: Mapping[str, TensorInfo], experts: ClassExperts
) -> tuple[list[str], list[str]]:
    """Modules and parameters besides the experts; a layer that lacks one of them is refused."""
    shapes = experts.base.names.shapes
    paths = dict.fromkeys(
        path
        for path, lora, _ in (key.partition(".lora_") for key in tensors)
        if lora and f"{path}.weight" in shapes
    )
    for (head, end), layers in layers_of_parts(paths).items():
        for layer in chosen_layers(stored, layers_in_base(experts.base, head, end)):
            if layer not in layers:
                raise _missing(stored, f"{head}{layer}.{end}.lora_A.weight")
    parameters = [path for path in paths if experts.takes_parameter(path)]
    return [p for p in paths if p not in parameters], [f"{p}.weight" for p in parameters]


def layers_of_parts(paths: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """The layers in which each part is, by its path before and after the layer's number."""
    parts: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_LAYER.fullmatch, paths)):
        parts.setdefault((match[1], match[3]), set()).add(int(match[2]))
    return parts


def layers_in_base(base: Checkpoint, head: str, end: str) -> list[int]:
    """The layers in which the base has the weight of a part."""
    matches = map(_LAYER.fullmatch, base.names.shapes)
    return [int(m[2]) for m in matches if m and m[1] == head and m[3] == f"{end}.weight"]


def _missing(stored: Adapter, key: str) -> AdapterError:
    return tensor_error(
        stored,
        key,
        "is missing, and other layers have it; copy the adapter again, or, if only some layers "
        f'trained, add them to {CONFIG} as "layers_to_transform"',
    )
