"""The FLOPs and bytes of a step, compared with the rates of the device."""

import argparse
import math
import time
from typing import Any

import torch
from geometries import config_of
from step import product_tflops, step_flops, synchronize

from moe_finetune.models import family_of
from moe_finetune.quantization.weight import resident_bytes

SHEETS = {"H100": (989.0, 3.35), "H200": (989.0, 4.8), "A100": (312.0, 2.0)}
"""Dense bfloat16 TFLOP/s and TB/s of the data sheets (SXM), by a part of the device's name."""
Limits = dict[str, tuple[float, float]]


def step_bytes(arguments: argparse.Namespace, model: Any) -> float:
    """Lower bound on the bytes that a step moves: weights once each way, and the experts' rows.

    Of each (token, expert) pair: five passes over H (x in both directions, y, dy, dx), eight over D
    (gate and up and their gradients, written and read) and four (z and its gradient). Attention,
    the head and the optimizer's states are not counted.
    """
    config = config_of(arguments)
    family = family_of(config)
    item = torch.finfo(getattr(torch, arguments.dtype)).bits // 8
    pairs = arguments.tokens * family.top_k(config) * len(family.moe_layers(config))
    elements = 5 * config.hidden_size + 12 * family.expert_width(config)
    return 2.0 * resident_bytes(model) + float(pairs * elements * item)


def copy_rate(arguments: argparse.Namespace) -> float:
    """TB/s of the fastest of some large copies, read and written bytes together."""
    size = 2**30 if arguments.device == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=arguments.device)
    target, best = torch.empty_like(source), math.inf
    for _ in range(6):
        synchronize(arguments.device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(arguments.device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best / 1e12


def device_limits(arguments: argparse.Namespace) -> Limits:
    """TFLOP/s and TB/s measured here, and those of the device's data sheet if known."""
    device = torch.cuda.get_device_name(0) if arguments.device == "cuda" else ""
    return {
        "measured here": (product_tflops(arguments), copy_rate(arguments)),
        **{f"data sheet, {n}": rates for n, rates in SHEETS.items() if n in device},
    }


def roofline(
    arguments: argparse.Namespace, model: Any, seconds: float, limits: Limits
) -> dict[str, Any]:
    """A step's counted work and the device's limits; shares are of the measured step time."""
    flops, moved = step_flops(arguments, True), step_bytes(arguments, model)
    return {
        "flops": flops,
        "bytes_at_least": moved,
        "limits": {
            name: {
                "tflops": tflops,
                "tb_per_s": bandwidth,
                "share_of_flops": flops / seconds / (tflops * 1e12),
                "share_of_bytes": moved / seconds / (bandwidth * 1e12),
                "bound_s": max(flops / (tflops * 1e12), moved / (bandwidth * 1e12)),
            }
            for name, (tflops, bandwidth) in limits.items()
        },
    }
