"""Merge a random adapter into a random checkpoint with Qwen3-30B-A3B's names and widths.

Measures wall time and peak memory (of a child process) of ``merge_adapter``, interleaved wall time
of ``cp -r`` of the same folder, and on request wall time of PEFT's ``merge_and_unload`` followed by
``save_pretrained``. All files are deleted afterwards. Results go to
``eval/bench/results/merge.json``.

    python eval/bench/merge.py --gigabytes 8 --repeat 3 --peft
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from saved import add_save, finish

from moe_finetune.io.safetensors_header import build_header

HIDDEN, WIDTH, EXPERTS, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 768, 128, 32, 4, 128, 151936
RANK, ALPHA, SHARD = 32, 128, 2_000_000_000
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": 6144,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ATTENTION = {
    "q_proj": (HEADS * HEAD, HIDDEN),
    "k_proj": (KV_HEADS * HEAD, HIDDEN),
    "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD),
}


def layer_shapes(layer: int, experts: int) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {f"{at}.input_layernorm.weight": (HIDDEN,)}
    for expert in range(experts):
        shapes[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, WIDTH)
        shapes[f"{at}.mlp.experts.{expert}.gate_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"{at}.mlp.experts.{expert}.up_proj.weight"] = (WIDTH, HIDDEN)
    shapes[f"{at}.mlp.gate.weight"] = (experts, HIDDEN)
    shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    for name, shape in ATTENTION.items():
        shapes[f"{at}.self_attn.{name}.weight"] = shape
    shapes[f"{at}.self_attn.q_norm.weight"] = (HEAD,)
    shapes[f"{at}.self_attn.k_norm.weight"] = (HEAD,)
    return shapes


def make_base(
    folder: Path,
    gigabytes: float,
    experts: int = EXPERTS,
    vocabulary: int = VOCABULARY,
    shard_bytes: int = SHARD,
) -> int:
    """Write the checkpoint in shards of about ``shard_bytes``; return its number of layers."""
    ends = {
        "lm_head.weight": (vocabulary, HIDDEN),
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    layer_bytes = 2 * sum(torch.Size(s).numel() for s in layer_shapes(0, experts).values())
    end_bytes = 2 * sum(torch.Size(s).numel() for s in ends.values())
    layers = max(1, round((gigabytes * 1e9 - end_bytes) / layer_bytes))
    shapes = dict(ends)
    for layer in range(layers):
        shapes |= layer_shapes(layer, experts)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    folder.mkdir()
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_random(file, shard, "BF16", 0.02, seed=number)
        weight_map |= dict.fromkeys(shard, file.name)
    index = {"metadata": {"total_size": layers * layer_bytes + end_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    return layers


def make_adapter(folder: Path, layers: int, experts: int = EXPERTS) -> None:
    """Write a rank-32 adapter in PEFT's format on attention, routed experts and router."""
    shapes: dict[str, tuple[int, ...]] = {}

    def pair(path: str, out_size: int, in_size: int, slots: int = 1) -> None:
        shapes[f"base_model.model.{path}.lora_A.weight"] = (RANK * slots, in_size)
        shapes[f"base_model.model.{path}.lora_B.weight"] = (out_size, RANK * slots)

    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, shape in ATTENTION.items():
            pair(f"{at}.self_attn.{name}", *shape)
        pair(f"{at}.mlp.gate", experts, HIDDEN)
        pair(f"{at}.mlp.experts.base_layer", 2 * WIDTH, HIDDEN, experts)
        pair(f"{at}.mlp.experts", HIDDEN, WIDTH, experts)
    folder.mkdir()
    write_random(folder / "adapter_model.safetensors", shapes, "F32", 0.01, seed=99)
    from peft import LoraConfig

    LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(ATTENTION),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        task_type="CAUSAL_LM",
    ).save_pretrained(str(folder))


def write_random(file: Path, shapes: dict, dtype: str, deviation: float, seed: int) -> None:
    """Write random values, tensor by tensor, each a different part of one random pool."""
    generator = torch.Generator().manual_seed(seed)
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    pool = (torch.randn(1 << 23, generator=generator) * deviation).to(kind)
    header = build_header(file, [(name, dtype, shape) for name, shape in shapes.items()])
    with file.open("wb") as stream:
        stream.write(header.raw)
        for number, info in enumerate(header.tensors.values()):
            left = info.size // pool.element_size()
            start = (number * 7919) % (1 << 22)
            while left:
                part = pool[start : start + left]
                stream.write(part.view(torch.uint8).numpy().data)
                left, start = left - len(part), 0


def child(code: str, *arguments: str) -> dict:
    """Run ``code`` in a new interpreter; return its wall time, peak memory and report."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300] if done.stderr else "killed"}
    return {"process_seconds": time.perf_counter() - started, **json.loads(done.stdout)}


_REPORT = """
import json, resource
print(json.dumps({"seconds": round(seconds, 3),
    "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}))
"""
MERGE = (
    """
import sys
from moe_finetune.checkpoint import merge_adapter
seconds = merge_adapter(sys.argv[1], sys.argv[2], sys.argv[3]).seconds
"""
    + _REPORT
)
PEFT = (
    """
import sys, time
started = time.perf_counter()
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload()
model.save_pretrained(sys.argv[3])
seconds = time.perf_counter() - started
"""
    + _REPORT
)


def timed_copy(base: Path, target: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(base), str(target)], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peft", action="store_true", help="measure PEFT's merge too")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the checkpoints")
    add_save(parser, "merge")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="merge-bench-", dir=options.folder))
    try:
        base, adapter, target = work / "base", work / "adapter", work / "out"
        layers = make_base(base, options.gigabytes)
        make_adapter(adapter, layers)
        size = sum(file.stat().st_size for file in base.iterdir())
        os.sync()
        merges, copies, syncs = [], [], []
        for _ in range(options.repeat):
            copies.append(timed_copy(base, target))
            started = time.perf_counter()
            os.sync()
            syncs.append(time.perf_counter() - started)
            shutil.rmtree(target)
            merges.append(child(MERGE, str(base), str(adapter), str(target)))
            shutil.rmtree(target, ignore_errors=True)
            print(f"cp {copies[-1]:.1f} + sync {syncs[-1]:.1f} s, merge {merges[-1]}", flush=True)
        peft = child(PEFT, str(base), str(adapter), str(target)) if options.peft else None
        wall = [merge["process_seconds"] for merge in merges]
        result = {
            "checkpoint_gb": round(size / 1e9, 3),
            "layers": layers,
            "adapter_gb": round((adapter / "adapter_model.safetensors").stat().st_size / 1e9, 3),
            "rank": RANK,
            "merge": merges,
            "cp_seconds": [round(value, 3) for value in copies],
            "sync_after_cp_seconds": [round(value, 3) for value in syncs],
            "wall_over_cp": round(min(wall) / min(copies), 3),
            "wall_over_cp_each": [round(m / c, 3) for m, c in zip(wall, copies, strict=True)],
            "peak_gb": max(merge["peak_gb"] for merge in merges),
            "peft_merge_and_save": peft,
        }
        finish(options, result)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
