"""Write an adapter of any program in the form that another one reads.

:mod:`moe_finetune.checkpoint.adapter_layout` says how programs pack the experts' factors. Three
forms are written: what the current PEFT reads, with a pair of factors for each stack; a pair for
each matrix of each expert, under the names in the base's files, as PEFT made with transformers 4;
and, in :mod:`moe_finetune.vllm.adapters`, what vLLM reads. The weight changes stay the same; ranks
and scalings may differ.

Shape legend: E experts, n chosen ones, R their rank in the stack, r a matrix's rank, I inputs, O
outputs.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.adapter import (
    BIAS_FILE,
    CONFIG,
    METADATA,
    PREFIX,
    WEIGHTS,
    Adapter,
    open_adapter,
    write_metadata,
)
from moe_finetune.checkpoint.compute import Factors
from moe_finetune.checkpoint.files import read_tensor
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.checkpoint.peft_model import fill, wrap
from moe_finetune.checkpoint.updates import (
    LowRank,
    Replace,
    Updates,
    check_adapter,
    parts_in_files,
    read_updates,
)
from moe_finetune.errors import AdapterError
from moe_finetune.io import check_output, one_writer, output_folder, sync
from moe_finetune.models.structure import meta_model

# PEFT 0.21 treats modules with these names as parts of the expert stacks.
_TAKEN = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_OF_OTHERS = (
    "layers_to_transform", "layers_pattern", "exclude_modules", "lora_B_layout", "peft_version",
    "unsloth_fused_expert_lora", "auto_mapping",
)  # fmt: skip


Form = Callable[[Adapter, Checkpoint, Path], Path]


@one_writer
def convert_adapter(path: str | Path, base: str | Path, output: str | Path, form: Form) -> Path:
    """Write the adapter ``path`` of ``base`` in another form to the folder ``output``."""
    output = Path(output)
    check_output(output)
    opened = open_checkpoint(base, stored=True)
    adapter = check_adapter(path, opened)
    with output_folder(output, 2 * adapter.size) as folder, TemporaryDirectory() as scratch:
        written = form(adapter, opened, Path(scratch) / "adapter")
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(written / name, folder / name)
        if (adapter.folder / BIAS_FILE).is_file():
            shutil.copyfile(adapter.folder / BIAS_FILE, folder / BIAS_FILE)
        metadata = adapter.metadata
        if (adapter.folder / METADATA).is_file():
            chosen = metadata.experts if written == adapter.folder else None
            write_metadata(folder, chosen, metadata.experts_dropout, **metadata.extra)
        for file in folder.iterdir():
            sync(file)
    return output


def as_peft(adapter: Adapter, base: Checkpoint, output: Path, rewrite: bool = False) -> Path:
    """``adapter``'s own folder if PEFT reads it correctly; else ``output`` with a rewritten one.

    With ``rewrite`` it is always written, and stacks have a scaling of 1.
    """
    updates = read_updates(adapter, base)
    if updates.for_peft and not rewrite:
        return adapter.folder
    model, factors = meta_model(base.model_config), Factors(adapter)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    modules: set[str] = set()
    by_loaded = _by_loaded(updates, base)
    for loaded, terms in by_loaded.items():
        path, _, parameter = loaded.rpartition(".")
        shape, update = base.names.shapes[loaded], terms[0].update
        matrix = len(shape) == 2
        if matrix and path.rpartition(".")[2] not in _TAKEN and _is_layer(model, path):
            modules.add(path)
        target = path if path in modules else loaded
        whole_rows = update.transposed or shape[0] == adapter.tensors[update.b].shape[0]
        if matrix and len(terms) == 1 and whole_rows:
            ranks[target], scales[target] = update.rank, update.scale
            for key in filter(None, (update.a, update.b, update.magnitude)):
                factor = key.partition(".lora_")[2]
                tensors[f"{path}.lora_{factor}"] = read_tensor(adapter.tensors[key])
            continue
        a_nI, b_On = _packed(factors, terms, (1, *shape) if matrix else shape)
        if not matrix and getattr(model.get_submodule(path), "is_transposed", False):
            a_nI, b_On = _turned(a_nI, b_On, shape[0])
        ranks[target], scales[target] = a_nI.shape[0] // (1 if matrix else shape[0]), 1.0
        inner = [n for n in base.family.expert_parameters if f"{path}.{n}" in by_loaded]
        depth = 0 if matrix else len(inner) - 1 - inner.index(parameter)
        key = path + ".base_layer" * depth
        tensors |= {f"{key}.lora_A.weight": a_nI, f"{key}.lora_B.weight": b_On}
    for replaced in updates.replaced:
        name = base.names.loaded[replaced.name] if updates.of_files else replaced.key
        if updates.of_files:
            name = _below_factors(name, tensors)
        tensors[name] = read_tensor(adapter.tensors[replaced.key])
    parameters = sorted(set(ranks) - modules)
    if adapter.config.get("use_dora") and parameters:
        raise AdapterError(
            f"{adapter.folder}: DoRA on '{parameters[0]}', which PEFT cannot represent on this "
            "model; merge it with 'moe-finetune merge' and use the merged checkpoint"
        )
    root = 0.5 if adapter.config.get("use_rslora") else 1
    changed = {
        **{key: value for key, value in adapter.config.items() if key not in _OF_OTHERS},
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "target_parameters": parameters or None,
        "lora_dropout": 0.0 if parameters else adapter.config.get("lora_dropout") or 0.0,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(n): scales[n] * float(r) ** root for n, r in ranks.items()},
        "peft_version": version("peft"),  # the packing, which a square matrix does not show
    }
    return _write(output, changed, tensors)


def _is_layer(model: Any, path: str) -> bool:
    """Return whether PEFT can adapt the module itself; of a router it adapts the parameter."""
    try:
        return type(model.get_submodule(path)) in (nn.Linear, nn.Embedding)
    except AttributeError:
        return True  # PEFT refuses it, with its name


def with_adapter(model: Any, adapter: Adapter, base: Checkpoint, partial: bool = False) -> Any:
    """``model`` with ``adapter``, of any program, in PEFT and in eval mode.

    Args:
        base: the checkpoint of ``model``.
        partial: ``model`` has only the first layers.
    """
    with TemporaryDirectory() as scratch:
        folder = as_peft(adapter, base, Path(scratch) / "adapter")
        written = adapter if folder == adapter.folder else open_adapter(folder)
        wrapped = wrap(model, written)
        fill(wrapped, written, partial)
    return wrapped.eval()


class _Term(NamedTuple):
    """Factors that add to one matrix of a tensor of the loaded model, from row ``first`` on."""

    update: LowRank
    slot: int
    expert: int
    first: int


def _by_loaded(updates: Updates, base: Checkpoint) -> dict[str, list[_Term]]:
    """All factors by the tensor of the loaded model that they change."""
    terms: dict[str, list[_Term]] = {}
    names = base.names
    rows: dict[str, tuple[str, int, int]] = {}
    if updates.of_files:
        changed = {names.loaded[update.name] for update in updates.low_rank}
        for loaded in changed:
            for expert, places in enumerate(names.places(loaded)):
                for place in places:
                    first = place.rows.start or 0 if isinstance(place.rows, slice) else 0
                    rows[place.name] = loaded, expert, first
    for update in updates.low_rank:
        loaded, own, first = rows.get(update.name, (update.name, 0, 0))
        for slot, expert in enumerate(update.experts or [own]):
            terms.setdefault(loaded, []).append(_Term(update, slot, expert, first))
    return terms


def _packed(
    factors: Factors, terms: Sequence[_Term], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """``lora_A`` (E·R, I) and ``lora_B`` (O, R·E) of one stack; a matrix's factors side by side."""
    experts, out_size, in_size = shape
    used = [0] * experts
    for term in terms:
        used[term.expert] += term.update.rank
    rank = max(used)
    a_ERI, b_EOR = torch.zeros(experts, rank, in_size), torch.zeros(experts, out_size, rank)
    used = [0] * experts
    for update, slot, expert, first in terms:
        left_Or, right_rI = factors.matrices(update, slot)
        columns = slice(used[expert], used[expert] + update.rank)
        a_ERI[expert, columns] = right_rI
        b_EOR[expert, first : first + left_Or.shape[0], columns] = left_Or * update.scale
        used[expert] = columns.stop
    return a_ERI.flatten(0, 1), b_EOR.permute(1, 2, 0).flatten(1)


def _turned(a_nO: Tensor, b_In: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Factors for a class with stacks (E, I, O), whose A has the inputs in PEFT too."""
    a_nI = b_In.unflatten(1, (-1, experts)).permute(2, 1, 0).flatten(0, 1)
    b_On = a_nO.unflatten(0, (experts, -1)).permute(2, 1, 0).flatten(1)
    return a_nI, b_On


def _below_factors(name: str, tensors: Mapping[str, Tensor]) -> str:
    """PEFT's key for a tensor that trained in full, perhaps of a module with factors."""
    path, _, last = name.rpartition(".")
    adapted = {key.partition(".lora_")[0] for key in tensors if ".lora_" in key}
    while path in adapted:
        path += ".base_layer"
    return f"{path}.{last}"


def _write(output: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(named, output / WEIGHTS, {"format": "pt"})
    (output / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return output


@torch.no_grad()
def as_per_expert(adapter: Adapter, base: Checkpoint, output: Path) -> Path:
    """Write factors for each matrix of each expert, under the names in the base's files."""
    tensors: dict[str, Tensor] = {}
    scales: dict[str, tuple[int, float]] = {}
    with TemporaryDirectory() as scratch:
        written = open_adapter(as_peft(adapter, base, Path(scratch) / "adapter"))
        factors = Factors(written)
        parts = parts_in_files(read_updates(written, base), base, written)
        whole: dict[str, Tensor] = {}
        for name, part in [(name, part) for name, some in parts.items() for part in some]:
            update, path = part.update, name.removesuffix(".weight")
            if isinstance(update, Replace):
                whole[name] = read_tensor(written.tensors[update.key])
                if whole[name].shape != base.tensors[name].shape:
                    raise AdapterError(
                        f"{adapter.folder}: '{update.key}' has no tensor of its own there"
                    )
                continue
            if path == name or part.place.expert is not None:
                raise AdapterError(
                    f"{adapter.folder}: the base's files have '{name}', so that no program has a "
                    f"module for each matrix of '{update.name}'; convert --to peft instead"
                )
            scales[path] = update.rank, update.scale
            left_Or, right_rI = factors.matrices(update, part.slot)
            pair = {"A.weight": right_rI, "B.weight": left_Or[part.place.rows]}
            if "lora_embedding" in update.a:
                pair = {"embedding_A": left_Or.T, "embedding_B": right_rI.T}
            # Gate and up share their A; in a file each has its own.
            tensors |= {f"{path}.lora_{key}": factor.clone() for key, factor in pair.items()}
            if update.magnitude:
                norms_O = read_tensor(written.tensors[update.magnitude]).float()
                tensors[f"{path}.lora_magnitude_vector"] = norms_O[part.place.rows].clone()
    tensors |= {_below_factors(name, tensors): value for name, value in whole.items()}
    root = 0.5 if adapter.config.get("use_rslora") else 1
    (rank, scale), _ = Counter(scales.values()).most_common(1)[0]
    others = {_kind(path): value for path, value in scales.items() if value != (rank, scale)}
    config = {
        **{key: value for key, value in adapter.config.items() if key not in _OF_OTHERS},
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": scale * float(rank) ** root,
        "target_modules": _pattern(list(scales)),
        "target_parameters": None,
        "rank_pattern": {kind: r for kind, (r, _) in others.items()},
        "alpha_pattern": {kind: s * float(r) ** root for kind, (r, s) in others.items()},
    }
    return _write(output, config, tensors)


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
