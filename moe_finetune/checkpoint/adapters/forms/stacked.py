"""A tensor for each projection of all experts, as Tinker, vLLM and SGLang name them.

``experts.w1.lora_A.weight`` has (E, r, I), ``experts.w1.lora_B.weight`` (E, O, r); w1 is gate, w3
up, w2 down. A factor that all experts share has one entry, or is one matrix: of shared-outer LoRA
these are A of gate and up, and B of down. Read in tinker-cookbook (``weights/_adapter.py``), vLLM
0.32 (``lora/lora_weights.py``) and TokenSpeed's page on LoRA.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import vectors_of_a, vectors_of_b
from moe_finetune.checkpoint.adapters.files import BIAS_FILE, Adapter
from moe_finetune.checkpoint.adapters.forms.class_stacks import (
    ClassExperts,
    Sides,
    Vectors,
    in_class,
    layers_in_base,
    layers_of_parts,
    ranks_of,
    read_projections,
)
from moe_finetune.checkpoint.adapters.forms.expert_keys import ExpertKey, Role, expert_keys
from moe_finetune.checkpoint.adapters.forms.form import Form, Written
from moe_finetune.checkpoint.adapters.forms.tinker_names import has_tinker_names, in_class_names
from moe_finetune.checkpoint.adapters.in_peft import OF_PACKING, OF_TARGETS, peft_form
from moe_finetune.checkpoint.adapters.updates import LowRank, OpenAdapter
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import computed, read_tensor
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo


def read(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with PEFT's stacks in place of its projections."""
    stored = in_class_names(stored, base)
    experts = ClassExperts(base)
    sides = Sides(stored)
    used = list[str]()
    for key in expert_keys(stored):
        used.append(key.key)
        info = stored.tensors[key.key]
        if 0 in info.shape and key.projection == "w3" and not base.places.gated:
            continue  # Tinker's placeholder of a projection that the model lacks
        sides[key.layer, role_of(stored, experts, key), key.side] = vectors_of(stored, key, info)
    return in_class(stored, experts, read_projections(stored, experts, sides), used)


def role_of(stored: Adapter, experts: ClassExperts, key: ExpertKey) -> Role:
    """What a key's projection is in the base; refused where its experts have none."""
    where = f"{stored.folder}: adapter tensor '{key.key}'"
    if not experts.is_experts(key.stack, key.layer):
        raise AdapterError(
            f"{where}: the base {experts.base.folder} has no experts at '{key.stack}'; its own are "
            f"at '{experts.path(experts.layers[0])}'; the adapter was trained on another base"
        )
    role = experts.roles.get(key.projection)
    if role is None:
        raise AdapterError(
            f"{where}: the base's experts have no '{key.projection}'; the adapter was trained on "
            "another base"
        )
    return role


def vectors_of(stored: Adapter, key: ExpertKey, info: TensorInfo) -> Vectors:
    """The vectors (n, r, Z) of a projection of all experts."""
    if len(info.shape) not in (2, 3):
        raise AdapterError(
            f"{stored.folder}: adapter tensor '{key.key}': has {len(info.shape)} dimensions; a "
            "projection of all experts has 3, or 2 if they share it"
        )
    *count, one, other = info.shape
    rank, size = (one, other) if key.side == "A" else (other, one)

    def values() -> Tensor:
        value = read_tensor(info).view(-1, one, other)
        return value if key.side == "A" else value.mT

    return Vectors(key.key, info.dtype, (count[0] if count else 1, rank, size), values)


def write(adapter: OpenAdapter, shared: bool = False) -> Written:
    """A tensor for each projection of all experts; if ``shared``, common factors once.

    Refused for what trained in full, which no program reads in this form.
    """
    _refuse_whole(adapter)
    form, experts = peft_form(adapter), ClassExperts(adapter.base)
    stacks = [update for update in form.low_rank if update.experts is not None]
    if shared:
        _check_shared(form, experts, stacks)
    used = {key for update in stacks for key in (update.a, update.b)}
    tensors = {key: info for key, info in form.tensors.items() if key not in used}
    scales = {
        update.a.partition(".lora_")[0]: (update.rank, update.scale)
        for update in form.low_rank
        if update.experts is None
    }
    for update in stacks:
        for name, a, b in _projections(form, experts, update, shared):
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            scales[name] = a.shape[1], update.scale
    return _config(form, scales), tensors


def _refuse_whole(adapter: OpenAdapter) -> None:
    saved = next((key for key in adapter.tensors if ".lora_" not in key), None)
    if (adapter.folder / BIAS_FILE).is_file():
        problem = "it has a routing bias"
    elif saved is not None:
        problem = f"'{saved}' trained in full"
    elif adapter.config.get("use_dora"):
        problem = "it has DoRA's norms"
    else:
        return
    raise AdapterError(
        f"{adapter.folder}: {problem}, which this form has no place for; convert --to peft, or "
        "merge it with 'moe-finetune merge'"
    )


def write_shared(adapter: OpenAdapter) -> Written:
    """The same where A of gate and up, and B of down, are those of all experts."""
    return write(adapter, shared=True)


def _projections(
    form: OpenAdapter, experts: ClassExperts, update: LowRank, shared: bool
) -> Iterator[tuple[str, TensorInfo, TensorInfo]]:
    """The path of each projection in a stack, and its factors (n, r, I) and (n, O, r)."""
    path, _, parameter = update.name.rpartition(".")
    names = {role: name for name, role in experts.roles.items() if name in ("w1", "w2", "w3")}
    roles = [role for role in names if experts.rows(role).parameter == parameter]
    rows = {role: experts.rows(role).rows for role in roles if len(roles) > 1}
    a_info = form.tensors[update.a]
    b_info = form.tensors[update.b]
    total = experts.total
    count_a = 1 if shared and parameter == experts.first else total
    count_b = 1 if shared and parameter == experts.down else total
    vectors_ERO = vectors_of_b(read_tensor(b_info), total)
    for role in roles:
        ranks, part = ranks_of(role, vectors_ERO, rows), experts.rows(role)
        rank = ranks.stop - ranks.start

        def of_a(ranks: slice = ranks) -> Tensor:
            return vectors_of_a(read_tensor(a_info), total)[:count_a, ranks].contiguous()

        def of_b(ranks: slice = ranks, rows: slice = part.rows) -> Tensor:
            return vectors_of_b(read_tensor(b_info), total)[:count_b, ranks, rows].mT.contiguous()

        name = f"{path}.{names[role]}"
        inputs = a_info.shape[1]
        a = computed(f"{name}.lora_A", a_info.dtype, (count_a, rank, inputs), of_a)
        yield name, a, computed(f"{name}.lora_B", b_info.dtype, (count_b, part.size, rank), of_b)


def _check_shared(form: OpenAdapter, experts: ClassExperts, stacks: list[LowRank]) -> None:
    """Refuse factors that differ between the experts of a layer, with their number."""
    differing = {"A of gate and up": 0, "B of down": 0}
    for update in stacks:
        down = update.name.endswith(f".{experts.down}")
        info = form.tensors[update.b if down else update.a]
        unpack = vectors_of_b if down else vectors_of_a
        vectors = unpack(read_tensor(info), experts.total)
        others = sum(not torch.equal(one, vectors[0]) for one in vectors[1:])
        differing["B of down" if down else "A of gate and up"] += others
    if any(differing.values()):
        factors = experts.total * len(stacks)
        counts = ", ".join(f"{count} of {side}" for side, count in differing.items() if count)
        raise AdapterError(
            f"{form.folder}: of {factors} factors, {counts} differ from those of their layer's "
            "first expert, and the shared-outer form has one for all; convert --to stacked, or "
            "train with lora.shared_outer"
        )


def _config(form: OpenAdapter, scales: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """A config with the most common rank and scale, and patterns for the others."""
    root = 0.5 if form.config.get("use_rslora") else 1
    rank, scale = Counter(scales.values()).most_common(1)[0][0]
    others = {re.escape(p): pair for p, pair in scales.items() if pair != (rank, scale)}
    options = {k: v for k, v in form.config.items() if k not in OF_PACKING + OF_TARGETS}
    return options | {
        "r": rank,
        "lora_alpha": scale * float(rank) ** root,
        "target_modules": sorted({path.rpartition(".")[2] for path in scales}),
        "target_parameters": None,
        **_layers(form, scales),
        "rank_pattern": {path: r for path, (r, _) in others.items()},
        "alpha_pattern": {path: s * float(r) ** root for path, (r, s) in others.items()},
    }


def _in_base(experts: ClassExperts, head: str, end: str) -> Iterable[int]:
    stack, _, projection = end.rpartition(".")
    if projection in experts.roles and stack == experts.base.places.experts_path:
        return experts.layers
    return layers_in_base(experts.base, head, end)


def _layers(form: OpenAdapter, paths: Iterable[str]) -> dict[str, list[int]]:
    """``layers_to_transform`` where not all layers of the base have what some have."""
    experts = ClassExperts(form.base)
    parts = {
        (head, end): (layers, _in_base(experts, head, end))
        for (head, end), layers in layers_of_parts(paths).items()
    }
    if all(layers == {*in_base} for layers, in_base in parts.values()):
        return {}
    chosen = {layer for layers, _ in parts.values() for layer in layers}
    for (head, end), (layers, in_base) in parts.items():
        if layers != chosen & {*in_base}:
            raise AdapterError(
                f"{form.folder}: '{head}N.{end}' is adapted in layers {sorted(layers)}, other "
                f"parts in {sorted(chosen)}, and this form has all parts of a layer; convert "
                "--to peft"
            )
    return {"layers_to_transform": sorted(chosen)}


FORM = Form(
    programs="Tinker, vLLM and SGLang, TokenSpeed",
    loses="nothing, but a rank or scale of one part's own is read by vLLM only",
    write=write,
    kinds=frozenset({"stacked"}),
    named=has_tinker_names,
    read=read,
)
SHARED_OUTER = Form(
    programs="Tinker, vLLM (--enable-moe-shared-loras), SGLang (--experts-shared-outer-loras)",
    loses="nothing; refused where experts' outer factors differ",
    write=write_shared,
)
