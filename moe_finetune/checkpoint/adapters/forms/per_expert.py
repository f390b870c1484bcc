"""A pair of factors for each matrix of each expert, under the names in the base's files."""

import re
from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from moe_finetune.checkpoint.adapters.factor_layout import vectors_of_b
from moe_finetune.checkpoint.adapters.forms.class_stacks import ClassExperts, ranks_of
from moe_finetune.checkpoint.adapters.forms.expert_keys import Role
from moe_finetune.checkpoint.adapters.forms.form import Form, Written
from moe_finetune.checkpoint.adapters.in_peft import (
    OF_PACKING,
    OF_TARGETS,
    below_factors,
    modules_to_save,
    peft_form,
)
from moe_finetune.checkpoint.adapters.updates import Factors, OpenAdapter, Replace, parts_in_files
from moe_finetune.checkpoint.weight_files import DTYPES, in_memory, read_tensor
from moe_finetune.errors import AdapterError


@torch.no_grad()
def write(adapter: OpenAdapter) -> Written:
    """A pair for each matrix of each expert, under the names in the base's files."""
    form, base = peft_form(adapter), adapter.base
    factors = Factors(form)
    parts = parts_in_files(form)
    experts = ClassExperts(base)
    roles: tuple[Role, ...] = ("gate", "up") if base.places.gated else ()
    rows = {role: experts.rows(role).rows for role in roles}

    @lru_cache(1)
    def vectors_of(key: str) -> Tensor:
        return vectors_of_b(read_tensor(form.tensors[key]), experts.total)

    tensors: dict[str, Tensor] = {}
    scales: dict[str, tuple[int, float]] = {}
    saved: dict[str, Tensor] = {}
    for name, part in [(name, part) for name, some in parts.items() for part in some]:
        update, path = part.update, name.removesuffix(".weight")
        if isinstance(update, Replace):
            saved[name] = read_tensor(form.tensors[update.key])
            if saved[name].shape != base.tensors[name].shape:
                raise AdapterError(
                    f"{adapter.folder}: '{update.key}' has no tensor of its own there"
                )
            continue
        if path == name or part.place.expert is not None:
            raise AdapterError(
                f"{adapter.folder}: the base's files have '{name}', so that no program has a "
                f"module for each matrix of '{update.name}'; convert --to peft instead"
            )
        left_Or, right_rI = factors.matrices(update, part.slot)
        fused = update.name.endswith(f".{experts.first}") and not update.transposed
        of_rows = part.place.rows if fused else None
        role = next((r for r in rows if isinstance(of_rows, slice) and of_rows == rows[r]), None)
        if role is not None:
            ranks = ranks_of(role, vectors_of(update.b), rows)
            left_Or, right_rI = left_Or[:, ranks], right_rI[ranks]
        scales[path] = len(right_rI), update.scale
        pair = {"A.weight": right_rI, "B.weight": left_Or[part.place.rows]}
        if "lora_embedding" in update.a:
            pair = {"embedding_A": left_Or.T, "embedding_B": right_rI.T}
        # Gate and up share their A; in a file each has its own.
        dtype = DTYPES[form.tensors[update.a].dtype]
        tensors |= {
            f"{path}.lora_{key}": factor.to(dtype, copy=True) for key, factor in pair.items()
        }
        if update.magnitude:
            norms_O = read_tensor(form.tensors[update.magnitude]).float()
            tensors[f"{path}.lora_magnitude_vector"] = norms_O[part.place.rows].clone()
    tensors |= {below_factors(name, tensors): value for name, value in saved.items()}
    in_files = base.names.files
    tensors |= {in_files[key][0]: read_tensor(table) for key, table in form.tables.items()}
    trained = base.tensors.keys() - base.untrained
    root = 0.5 if adapter.config.get("use_rslora") else 1
    (rank, scale), _ = Counter(scales.values()).most_common(1)[0]
    others = {_kind(path): value for path, value in scales.items() if value != (rank, scale)}
    config = {
        **{k: value for k, value in form.config.items() if k not in OF_PACKING + OF_TARGETS},
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": scale * float(rank) ** root,
        "target_modules": _pattern(list(scales)),
        "target_parameters": None,
        "modules_to_save": modules_to_save(form, in_files, trained),
        "rank_pattern": {kind: r for kind, (r, _) in others.items()},
        "alpha_pattern": {kind: s * float(r) ** root for kind, (r, s) in others.items()},
    }
    return config, {key: in_memory(key, tensor) for key, tensor in tensors.items()}


def _kind(path: str) -> str:
    """A regular expression for the module ``path``, the same for all experts of its layer."""
    return re.sub(r"experts\\\.\d+\\\.", r"experts\\.\\d+\\.", re.escape(path))


def _pattern(paths: list[str]) -> str:
    """A regular expression for exactly these modules."""
    layers: dict[str, set[str]] = {}
    for path in paths:
        first = re.search(r"\\\.(\d+)\\\.", _kind(path))
        kind = _kind(path) if first is None else _kind(path).replace(first[0], r"\.LAYER\.", 1)
        layers.setdefault(kind, set()).update([first[1]] if first else [])
    return "|".join(
        kind.replace("LAYER", f"(?:{'|'.join(sorted(numbers, key=int))})")
        for kind, numbers in layers.items()
    )


FORM = Form(
    programs="PEFT with transformers 4, Automodel, Megatron-Bridge, SGLang",
    loses="nothing; gate and up of a stack get a copy each of their common A",
    write=write,
)
