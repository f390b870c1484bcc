"""Merge random Llama checkpoints into a Mixtral and measure time and peak memory.

The merge runs in a child process, whose peak resident memory includes everything it imports. All
files are deleted afterwards. Results go to ``eval/bench/results/upcycle.json``.

    python eval/bench/upcycle.py --experts 8 --gigabytes 1
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from merge import write_random
from saved import add_save, finish

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 5632, 32, 4, 64, 32000  # TinyLlama's
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
CHILD = """
import json, resource, sys
from moe_finetune.upcycle import merge_experts
report = merge_experts(sys.argv[2:], sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": report.seconds, "bytes": report.bytes_written, "peak_bytes": peak}))
"""


def make_dense(folder: Path, gigabytes: float, seed: int) -> int:
    """Write one checkpoint of about ``gigabytes``; return its bytes."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    of_layer = 2 * sum(_size(shape) for shape in layer.values())
    outside = 2 * sum(_size(shape) for shape in shapes.values())
    layers = max(1, round((gigabytes * 1e9 - outside) / of_layer))
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}.weight": s for name, s in layer.items()}
    folder.mkdir(parents=True)
    write_random(folder / "model.safetensors", shapes, "BF16", 0.02, seed)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return (folder / "model.safetensors").stat().st_size


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each expert")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the checkpoints")
    add_save(parser, "upcycle")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="upcycle-bench-", dir=options.folder))
    try:
        experts = [work / str(number) for number in range(options.experts)]
        sizes = [make_dense(folder, options.gigabytes, seed) for seed, folder in enumerate(experts)]
        os.sync()
        command = [sys.executable, "-c", CHILD, str(work / "moe"), *map(str, experts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = {
        "experts": options.experts,
        "expert_gb": round(sizes[0] / 1e9, 3),
        "moe_gb": round(found["bytes"] / 1e9, 3),
        "seconds": found["seconds"],
        "peak_gb": round(found["peak_bytes"] / 1e9, 3),
    }
    finish(options, result)


if __name__ == "__main__":
    main()
