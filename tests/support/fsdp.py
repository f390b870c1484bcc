"""FSDP2 on CPU ranks as ``accelerate launch`` starts it on GPUs.

Accelerate turns FSDP on for accelerators alone and falls back to DDP on a CPU without a word. Here
its state gets the plugin that it made from the launcher's environment; everything after that, the
Trainer's wrapping and ``fsdp2_prepare_model``, is accelerate's own.
"""

import os
from functools import wraps

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import distributed

from moe_finetune.training import ranks
from tests.conftest import ROOT

CONFIG = ROOT / "recipes" / "hardware" / "fsdp2_8gpu.yaml"


def use(**changes: str) -> None:
    """Let accelerators that are made from now on shard by the launch configuration of this house.

    ``changes`` are environment variables that the launcher would set.
    """
    words = ["--config_file", str(CONFIG), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    found = prepare_multi_gpu_env(arguments)
    chosen = {name: value for name, value in found.items() if "FSDP" in name}
    os.environ.update({**chosen, "ACCELERATE_MIXED_PRECISION": "no", **changes})
    begin = AcceleratorState.__init__

    @wraps(begin)
    def sharded(self, *args, fsdp_plugin=None, **kwargs):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharded


def regroup(world: int) -> None:
    """Make the first ``world`` of the processes a group of their own; the others do not call it."""
    if ranks.distributed_run():
        distributed.destroy_process_group()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    port = int(os.environ["MASTER_PORT"]) + 1
    os.environ |= {"WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    if world == 1:  # no launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    ranks.join_group()
