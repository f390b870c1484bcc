"""A tensor for each projection of all experts, as Tinker, vLLM and SGLang name them.

``experts.w1.lora_A.weight`` has (E, r, I), ``experts.w1.lora_B.weight`` (E, O, r); w1 is gate, w3
up, w2 down. A factor that all experts share has one entry, or is one matrix: of shared-outer LoRA
these are A of gate and up, and B of down. Read in tinker-cookbook (``weights/_adapter.py``), vLLM
0.32 (``lora/lora_weights.py``) and TokenSpeed's page on LoRA.
"""

from dataclasses import replace

from torch import Tensor

from moe_finetune.checkpoint.adapter_files import Adapter
from moe_finetune.checkpoint.forms.class_stacks import (
    ClassExperts,
    Vectors,
    in_class,
    read_projections,
)
from moe_finetune.checkpoint.forms.expert_keys import ExpertKey, Role, expert_keys
from moe_finetune.checkpoint.forms.form import Form
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo


def read(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with PEFT's stacks in place of its projections."""
    stored = _under_class_names(stored, base)
    experts, sides, used = ClassExperts(base), dict[tuple[int, Role, str], Vectors](), list[str]()
    for key in expert_keys(stored):
        used.append(key.key)
        info = stored.tensors[key.key]
        if 0 in info.shape and key.projection == "w3" and not base.places.gated:
            continue  # Tinker's placeholder of a projection that the model lacks
        sides[key.layer, role_of(stored, experts, key), key.side] = vectors_of(stored, key, info)
    return in_class(stored, experts, read_projections(stored, experts, sides), used)


def _under_class_names(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with the class's names where Tinker has its own, in tinker-cookbook's way."""
    paths = {name.rpartition(".")[0] for name in base.names.shapes}
    roots = base.places.backbone, base.places.backbone.replace(".language_model", "")
    tensors = {}
    for key, info in stored.tensors.items():
        name = key
        if name.startswith(f"{roots[1]}.layers.") and roots[0] != roots[1]:
            name = name.replace(roots[1], roots[0], 1)
        path = name.partition(".lora_")[0]
        if ".attn." in path and path not in paths:
            name = name.replace(".attn.", ".self_attn.", 1)
        if path.endswith("unembed_tokens"):
            name = f"lm_head{name.removeprefix(path)}"
        tensors[name] = info
    return replace(stored, tensors=tensors)


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


FORM = Form(
    programs="Tinker, vLLM and SGLang for shared-outer LoRA, TokenSpeed",
    kinds=frozenset({"stacked"}),
    read=read,
)
