"""Expert kernels of other packages, as implementations for transformers' experts.

Installing one changes transformers or PEFT for the whole process, so ``gpu_step.py`` times each in
a separate process, interleaved with attention-only LoRA (and with ours, if the recorder supports
the kernel). Both need a GPU and Triton.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

GroupedGemm = Callable[..., Tensor]
GPU_STEP = Path(__file__).with_name("gpu_step.py")


def scattermoe() -> str:
    """Install axolotl's ScatterMoE with its LoRA fast path; return the implementation's name."""
    from axolotl.integrations.kernels.libs.scattermoe_lora.experts import (
        register_scattermoe_experts,
    )

    register_scattermoe_experts()
    return "scattermoe"


def unsloth() -> str:
    """Install Unsloth's grouped GEMM under PEFT's LoRA; return the implementation's name."""
    from unsloth.kernels.moe.grouped_gemm.interface import grouped_gemm

    ALL_EXPERTS_FUNCTIONS.register("unsloth_grouped_gemm", with_grouped_gemm(grouped_gemm))
    return "unsloth_grouped_gemm"


def with_grouped_gemm(grouped_gemm: GroupedGemm) -> Callable[..., Tensor]:
    """Transformers' experts function on Unsloth's ``grouped_gemm(x, w, m_sizes, topk, ...)``.

    T tokens with K experts each are S = T*K rows: the first product gathers its rows from the
    tokens in the order of experts, the second scatters its rows back to (token, choice).
    """

    def experts_forward(
        self: Any, hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        tokens, top_k = index_TK.shape
        flat_S = index_TK.reshape(-1)
        order_S = torch.argsort(flat_S, stable=True)
        sizes_E = torch.zeros(self.num_experts, dtype=torch.int64, device=flat_S.device)
        sizes_E.scatter_add_(0, flat_S, torch.ones_like(flat_S))
        shared = {
            "m_sizes": sizes_E.to(torch.int32),
            "topk": top_k,
            "gather_indices": order_S.to(torch.int32),
            "autotune": True,
        }
        rows_S2D = grouped_gemm(hidden_TH, self.gate_up_proj, permute_x=True, **shared)
        z_SD = self._apply_gate(rows_S2D)
        y_SH = grouped_gemm(z_SD, self.down_proj, permute_y=True, is_first_gemm=False, **shared)
        y_TKH = y_SH.view(tokens, top_k, -1)
        return (y_TKH * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TH.dtype)

    return experts_forward


PEERS: dict[str, tuple[str, Callable[[], str]]] = {
    "axolotl, ScatterMoE LoRA": ("axolotl", scattermoe),
    "Unsloth, grouped GEMM": ("unsloth", unsloth),
}
"""Peer -> the required package, and the function that installs the kernel."""


def left_out(name: str, device: str) -> str | None:
    """The reason why a peer cannot be timed here, or None."""
    package, _ = PEERS[name]
    if device != "cuda":
        return "left out: its kernels need a GPU"
    for needed in (package, "triton"):
        if importlib.util.find_spec(needed) is None:
            return f"left out: {needed} is not installed"
    return None


def peer_rows(arguments: argparse.Namespace, geometry: str, layers: int) -> dict[str, Any]:
    """Each peer's rows at one depth, from a separate process, or the reason for having none."""
    results: dict[str, Any] = {}
    for name in arguments.peers:
        reason = left_out(name, arguments.device)
        if reason is not None:
            results[name] = {"outcome": reason}
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = peer_command(arguments, name, file, geometry, layers)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                results[name] = json.loads(file.read_text())
            else:
                last = done.stderr.strip().splitlines()[-1:]
                results[name] = {"outcome": f"left out: {''.join(last)[:300]}"}
    return results


def peer_command(
    arguments: argparse.Namespace, name: str, file: Path, geometry: str, layers: int
) -> list[str]:
    """The command that times one peer with the settings of this process."""
    command = [sys.executable, str(GPU_STEP), "--child", name, str(file)]
    command += ["--geometry", geometry, "--layers", str(layers)]
    for option in ("tokens", "length", "rank", "dtype", "device", "rounds", "warmup"):
        command += [f"--{option}", str(getattr(arguments, option))]
    if arguments.gradient_checkpointing:
        command.append("--gradient-checkpointing")
    return command
