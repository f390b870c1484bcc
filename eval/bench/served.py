"""Does `verify --served` tell the trained model from others? Each is served once by real vLLM.

For each family: the merge, its base, another adapter's merge, the merge with one expert's down
projection swapped with its neighbor's, with routers rounded to 8 bits, with another chat template.
Prompts are drawn 50 times, and each draw is judged.

    python eval/bench/served.py --save
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eval.bench.saved import add_save, finish
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import EvaluationError
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.served.check import Sources, ask, measure
from moe_finetune.served.client import Served
from moe_finetune.served.prompts import fixed_prompts
from moe_finetune.served.rendering import compare_rendering
from moe_finetune.served.verdict import FLOORS
from tests.checkpoint.helpers import EXPERTS, adapter
from tests.support import tiny
from tests.support.vllm_server import free_port

FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe", "mixtral")
DRAWS = 50
SECONDS = 900
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def changed(folder: Path, output: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint of one shard with other tensors."""
    shutil.copytree(folder, output)
    (file,) = output.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return output


def swap_down(tensors: dict[str, torch.Tensor]) -> None:
    """Exchange the down projections of experts 3 and 4 in the last MoE layer."""
    down = r"(.*\.experts\.)3(\.(?:down_proj|w2)\.weight)"
    first = sorted(name for name in tensors if re.fullmatch(down, name))[-1]
    second = re.sub(down, r"\g<1>4\2", first)
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


def round_routers(tensors: dict[str, torch.Tensor]) -> None:
    """Round each router's rows to 8 bits."""
    for name, weight_EH in tensors.items():
        if name.endswith(".gate.weight"):
            step_E1 = weight_EH.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight_EH / step_E1).round() * step_E1


def other_template(folder: Path, output: Path) -> Path:
    shutil.copytree(folder, output)
    (output / "chat_template.jinja").write_text(TEMPLATE)
    file = output / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))
    return output


def make(family: str, folder: Path, dtype: torch.dtype) -> tuple[Path, dict[str, Path]]:
    """The base, and everything that is served, by name; ``right`` is the trained model."""
    base = tiny.save(family, folder / "base", dtype=dtype)
    made = {"base": base}
    for name, seed in (("right", 3), ("another run", 4)):
        trained = adapter(base, folder / f"{seed}", seed, r=5, target_parameters=list(EXPERTS))
        merge_adapter(base, trained, folder / f"merged{seed}")
        made[name] = folder / f"merged{seed}"
    made["swapped down projection"] = changed(made["right"], folder / "swapped", swap_down)
    made["routers in 8 bits"] = changed(made["right"], folder / "rounded", round_routers)
    made["another template"] = other_template(made["right"], folder / "template")
    return base, made


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[Served]:
    """The checkpoint behind a real server."""
    port = free_port()
    command = [sys.executable, "-m", "moe_finetune.cli", "serve", str(folder), "--port", str(port)]
    options = ["--served-model-name", "served", "--max-model-len", "256", "--max-num-seqs", "4"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen([*command, *options], stdout=file, stderr=file, env=environment)
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                served = Served(f"http://127.0.0.1:{port}")
                break
            except EvaluationError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(log.read_text()[-3000:]) from None
                time.sleep(0.5)
        yield served
    finally:
        process.terminate()
        process.wait()


def judge(served: Served, base: Path, right: Path) -> dict[str, Any]:
    """The verdicts of one server over all draws, and how far it is from the trained model."""
    tokenizer = load_tokenizer(right)
    answers = ask(served, fixed_prompts(tokenizer))
    rendering, _ = compare_rendering(served, tokenizer)
    measurement, _ = measure(Sources(right, base=base), answers)
    verdicts: Counter[str] = Counter()
    for seed in range(DRAWS):
        drawn = np.random.default_rng(seed).integers(len(answers), size=len(answers))
        verdict = measurement.of(drawn.tolist()).judged().verdict
        if rendering == "another" and verdict == "the trained model":
            verdict = "another chat template"
        verdicts[verdict] += 1
    whole = measurement.judged()
    return {
        "verdicts": dict(verdicts),
        "served_minus_trained": {"mean": whole.tuned.mean, "p99": whole.tuned.p99},
        "limit": {"mean": FLOORS * whole.floor.mean, "p99": FLOORS * whole.floor.p99},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    add_save(parser, "served")
    arguments = parser.parse_args()
    rows = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / family
            base, made = make(family, folder, getattr(torch, arguments.dtype))
            for served_as, checkpoint in made.items():
                with serving(checkpoint, folder / "log") as served:
                    row = {"family": family, "served": served_as}
                    rows.append({**row, **judge(served, base, made["right"])})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finish(arguments, {"draws": DRAWS, "rows": rows})


if __name__ == "__main__":
    main()
