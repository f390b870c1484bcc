"""All checks that need a GPU, and one file to send in: ``make gpu-check``.

The file is readable and has JSON in its last block. A failed check does not stop the others.

    python eval/bench/gpu_check.py --output gpu-check.md
    python eval/bench/gpu_check.py --device cpu --tiny    # what a CPU can run of it
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from geometries import GEOMETRIES

from moe_finetune.io.environment import describe_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTHS = ("qwen3_30b_a3b", "deepseek_moe_16b", "deepseek_v2_lite", "moonlight_16b_a3b")
METHOD = {
    "terms": {
        "orthogonality": {"weight": 0.3},
        "variance": {"weight": 0.3},
        "coupling": {"weight": 0.3},
        "erc": {"weight": 0.3, "noise": False},
    },
    "strength": {"first": False},
}


class NotRun(Exception):
    """A check cannot run here, for the reason given."""


def gpu_tests(arguments) -> dict[str, Any]:
    """Run the tests marked ``gpu``; without a GPU, count them."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += map(str, sorted(files))
    if arguments.device == "cpu":
        command.append("--collect-only")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = done.stdout.strip().splitlines()[-25:]
    if done.returncode:
        raise RuntimeError("\n".join([*output, done.stderr[-2000:]]))
    return {"result": output[-1]}


def adapted(geometry: str, dtype: torch.dtype, device: str):
    """A small model of a geometry's family with LoRA everywhere; the same weights in any dtype."""
    from transformers import AutoModelForCausalLM

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.recipe.sections import LoraSection

    config = GEOMETRIES[geometry][0]()
    config.num_hidden_layers = 3
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = add_lora(model.to(dtype), LoraSection(rank=8, alpha=16.0), "full").train()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model.to(device)


def gradients(model, kernel: str, device: str) -> torch.Tensor:
    """All gradients of a step under four losses, as one vector in float32."""
    from moe_finetune import Specialization

    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator).to(device)
    model.zero_grad()
    with Specialization(model, METHOD, kernel=kernel):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).cpu()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance relative to the norm of the reference."""
    return float((found - wanted).norm() / wanted.norm())


def grouped_is_loop(arguments) -> dict[str, Any]:
    """Compare the GPU's kernel with one product per expert, in both dtypes."""
    found = {}
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        model = adapted("tiny", dtype, arguments.device)
        off = apart(*(gradients(model, kernel, arguments.device) for kernel in ("grouped", "loop")))
        name = str(dtype).removeprefix("torch.")
        found[name] = off
        assert off < bound, f"{name}: grouped and loop are {off:.1e} apart, allowed {bound:.0e}"
    return found


def bfloat16_is_float32(arguments) -> dict[str, Any]:
    """Compare gradients in bfloat16 and float32, with the same weights."""
    dtypes = (torch.bfloat16, torch.float32)
    models = (adapted("tiny", dtype, arguments.device) for dtype in dtypes)
    off = apart(*(gradients(model, "grouped", arguments.device) for model in models))
    assert off < 0.35, f"gradients in bfloat16 are {off:.2f} from float32's, allowed 0.35"
    return {"distance": off}


def step_benchmark(arguments) -> dict[str, Any]:
    """Run ``step.py`` at the widths of the four checkpoints."""
    rows = {}
    for geometry in ("tiny",) if arguments.tiny else WIDTHS:
        options = {"--geometry": geometry, "--device": arguments.device, "--dtype": "bfloat16"}
        if arguments.tiny:
            options |= {"--rounds": "1", "--warmup": "0", "--tokens": "64", "--length": "32"}
        else:
            options |= {"--layers": "4", "--tokens": "8192", "--length": "2048", "--rounds": "6"}
        found = script("step.py", options, ["--no-memory"] if arguments.tiny else [])
        rows[geometry] = {"rows": found["rows"], "ratios": found["ratios"]}
    return rows


def memory_plan(arguments) -> dict[str, Any]:
    """Compare the memory plan with the allocator's peak."""
    if arguments.tiny:
        from memory import SETTINGS, recipe_of

        from moe_finetune.training.memory.verdict import plan_recipe

        config, *how = SETTINGS["qwen3, checkpointing"]
        config.num_hidden_layers = 2
        return {"predicted, not measured": plan_recipe(config, recipe_of(*how), "cpu").total}
    rows = script("memory.py", {"--device": arguments.device, "--dtype": "bfloat16"})["rows"]
    worst = max(abs(row["predicted / measured"] - 1) for row in rows.values())
    assert worst < 0.1, f"the plan is off by {worst:.0%}: {rows}"
    return rows


def vllm_experts(arguments) -> dict[str, Any]:
    """Compare greedy tokens of a small checkpoint in expert-parallel vLLM and in transformers."""
    from transformers import AutoModelForCausalLM

    config = GEOMETRIES["tiny"][0]()
    config.num_hidden_layers, config.architectures = 2, ["Qwen3MoeForCausalLM"]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(folder)
        ids = torch.arange(7, 19).unsqueeze(0)
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        wanted = out[0, ids.shape[1] :].tolist()
        if arguments.device == "cpu":
            raise NotRun("vLLM's expert parallelism needs GPUs; the checkpoint was written")
        ranks = 2 if torch.cuda.device_count() > 1 else 1
        job = {"folder": folder, "ids": ids[0].tolist(), "ranks": ranks}
        command = [sys.executable, str(HERE / "gpu_vllm.py"), json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        got = json.loads(done.stdout.strip().splitlines()[-1])
    same = sum(a == b for a, b in zip(got, wanted, strict=True))
    assert same == len(wanted), f"{same} of {len(wanted)} tokens are equal: {got} and {wanted}"
    return {"ranks": ranks, "equal tokens": same}


CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tests marked gpu": gpu_tests,
    "grouped = loop": grouped_is_loop,
    "bfloat16 = float32": bfloat16_is_float32,
    "step benchmark": step_benchmark,
    "memory plan": memory_plan,
    "vLLM, expert parallel": vllm_experts,
}


def script(name: str, options: dict[str, str], flags: list[str] | None = None) -> dict[str, Any]:
    """Run another benchmark in a separate process; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        given = [part for pair in options.items() for part in pair]
        command = [sys.executable, "-W", "ignore", str(HERE / name), *given, *(flags or [])]
        command += ["--write", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(given)} failed:\n{done.stderr[-3000:]}")
        return json.loads(target.read_text(encoding="utf-8"))


def run(arguments) -> dict[str, dict[str, Any]]:
    """Run every check: ok, failed or not run, with seconds and figures or the reason."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name in arguments.only or CHECKS:
        print(f"{name} ...", flush=True)
        started, row = time.perf_counter(), {}
        try:
            row = {"outcome": "ok", "figures": CHECKS[name](arguments)}
        except NotRun as reason:
            row = {"outcome": "not run", "reason": str(reason)}
        except Exception as error:  # one check's failure is a result
            reason = "".join(traceback.format_exception(error))
            row = {"outcome": "failed", "reason": reason[-6000:]}
        outcomes[name] = {**row, "seconds": round(time.perf_counter() - started, 1)}
        print(f"  {row['outcome']} in {outcomes[name]['seconds']} s", flush=True)
    return outcomes


def page(result: dict[str, Any]) -> str:
    """The text of the file to send in."""
    lines = ["# GPU check", "", f"device: {result['device']}", ""]
    lines += ["| check | outcome | seconds |", "| --- | --- | ---: |"]
    for name, row in result["checks"].items():
        lines.append(f"| {name} | {row['outcome']} | {row['seconds']} |")
    for name, row in result["checks"].items():
        if "reason" in row:
            lines += ["", f"## {name}: {row['outcome']}", "```", row["reason"].rstrip(), "```"]
    body = json.dumps(result, indent=2, default=str)
    return "\n".join([*lines, "", "## JSON", "```json", body, "```", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and a minute")
    parser.add_argument("--only", nargs="*", choices=CHECKS, metavar="CHECK")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny runs what a CPU can")
    name = "CPU"
    if arguments.device == "cuda":
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    result = {
        "device": name,
        "environment": describe_environment(),
        "checks": run(arguments),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(result), encoding="utf-8")
    print(f"result: {arguments.output}")
    return int(any(row["outcome"] == "failed" for row in result["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
