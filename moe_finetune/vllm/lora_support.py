"""Ask vLLM, in a child process, which LoRA adapters its model class supports.

Importing a model's class may initialize a GPU, which the server that starts next must not share.
Run as a module, this file is that process: an architecture and adapters' folders in, JSON out.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DependencyError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 accepts for ``--max-lora-rank``."""


@dataclass(frozen=True)
class LoraSupport:
    """LoRA support of one of vLLM's model classes.

    Attributes:
        supported: whether vLLM has the architecture, in a class that declares ``SupportsLoRA``.
        stacked: whether its experts take factors of a whole stack (``is_3d_moe_weight``).
        gated: whether its experts have a gate projection.
        refused: why vLLM's reader of ``adapter_config.json`` refuses an adapter, by adapter.
    """

    supported: bool
    stacked: bool = False
    gated: bool = True
    refused: tuple[str | None, ...] = ()


def support_in_vllm(architecture: str, adapters: Sequence[Path]) -> LoraSupport:
    """Ask vLLM in this process, which imports it.

    Args:
        architecture: name in the ``architectures`` of ``config.json``.
    """
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture not in ModelRegistry.models:
        return LoraSupport(False)
    kind = ModelRegistry.models[architecture].load_model_cls()
    refused: list[str | None] = []
    widest: Any = LORA_RANKS[-1]
    for adapter in adapters:
        try:
            helper = PEFTHelper.from_local_dir(str(adapter), None)
            helper.validate_legal(LoRAConfig(max_lora_rank=widest))
            refused.append(None)
        except (ValueError, TypeError) as error:
            refused.append(" ".join(str(error).split()))
    return LoraSupport(
        bool(supports_lora(kind)),
        bool(getattr(kind, "is_3d_moe_weight", False)),
        not getattr(kind, "is_non_gated_moe", False),
        tuple(refused),
    )


def ask_vllm(architecture: str, adapters: Sequence[Path]) -> LoraSupport:
    """Run :func:`support_in_vllm` in a child process.

    Raises:
        DependencyError: the process failed; the message has its last lines.
    """
    command = [sys.executable, "-m", __spec__.name, architecture, *map(str, adapters)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise DependencyError(f"vLLM cannot load its class of {architecture}:\n{last}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return LoraSupport(**{**answer, "refused": tuple(answer["refused"])})


if __name__ == "__main__":
    print(json.dumps(asdict(support_in_vllm(sys.argv[1], [Path(path) for path in sys.argv[2:]]))))
