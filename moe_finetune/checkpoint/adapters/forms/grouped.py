"""The factors of NeMo Automodel's grouped experts, under the names of its parameters.

``experts.lora_gate_and_up_A`` has (E, I, r), ``experts.lora_gate_and_up_B`` (E, r, O) with the rows
of gate before those of up, ``lora_down_A`` and ``lora_down_B`` the same of the down projection.
Read in Automodel (``_peft/lora_experts.py``, ``moe/state_dict_mixin.py``).
"""

from torch import Tensor

from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.forms.class_stacks import (
    ClassExperts,
    Sides,
    Vectors,
    in_class,
    read_projections,
)
from moe_finetune.checkpoint.adapters.forms.expert_keys import ExpertKey, expert_keys
from moe_finetune.checkpoint.adapters.forms.form import Form
from moe_finetune.checkpoint.adapters.forms.stacked import role_of
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo


def read(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` with PEFT's stacks in place of its grouped factors."""
    experts = ClassExperts(base)
    sides = Sides(stored)
    used = list[str]()
    for key in expert_keys(stored):
        used.append(key.key)
        vectors = _vectors(stored, key, stored.tensors[key.key])
        sides[key.layer, role_of(stored, experts, key), key.side] = vectors
    return in_class(stored, experts, read_projections(stored, experts, sides), used)


def _vectors(stored: Adapter, key: ExpertKey, info: TensorInfo) -> Vectors:
    if len(info.shape) != 3:
        raise AdapterError(
            f"{stored.folder}: adapter tensor '{key.key}': shape {list(info.shape)}; a grouped "
            "factor has one matrix for each expert"
        )
    count, one, other = info.shape
    rank, size = (other, one) if key.side == "A" else (one, other)

    def values() -> Tensor:
        return read_tensor(info).mT if key.side == "A" else read_tensor(info)

    return Vectors(key.key, info.dtype, (count, rank, size), values)


FORM = Form(programs="NeMo Automodel", kinds=frozenset({"grouped"}), read=read)
