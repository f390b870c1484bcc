"""``place --bench``: samples/s in vLLM under expert parallelism, as compared in P1's Table 17.

Arms: a checkpoint with its experts in round robin (the baseline), the same checkpoint placed by the
plan of its trace, and another checkpoint placed by its own plan. Every placement is applied to the
checkpoint's order of experts, because vLLM silently falls back to index order if it cannot place in
round robin. Each arm is served with the ranks in data and expert parallelism (with tensor
parallelism only, there is no all-to-all to save) and measured by ``vllm bench serve``. The warm-up
and every repetition use different prompts, and prefix caching is off: a repeated prompt would skip
its prefill and the prefill's all-to-all.

vLLM's own balancer chooses the rank of a request. The gain of bucketing (P1 app. D) is computed
from the trace's held-out sequences and reported with the speeds; the requests themselves are not
bucketed.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import DependencyError, EvaluationError, RecipeError
from moe_finetune.io import check_output, write_atomic
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import checkpoint_name
from moe_finetune.placement.baselines import baseline_placements
from moe_finetune.placement.held_out import plan_trace
from moe_finetune.placement.plan import PlacementPlan
from moe_finetune.placement.prompts import write_prompts

if TYPE_CHECKING:
    from moe_finetune.routing.trace import RoutingTrace

PORT = 8017
READY_SECONDS = 3600
SET_BY_BENCH = ("--host", "--port", "--served-model-name", "--data-parallel-size", "-dp")
"""Options of the server that clients and results depend on."""


@dataclass(frozen=True)
class Bench:
    """What to measure; ``extra`` is passed to ``vllm serve`` unchanged."""

    ranks: int
    rows: Path
    output: Path
    max_imbalance: float = 1.3
    groups: int = 1
    samples: int = 512
    output_tokens: int = 128
    repeat: int = 3
    port: int = PORT
    extra: tuple[str, ...] = ()

    def prompts(self) -> dict[Path, int]:
        """The files of prompts and their sizes: the warm-up's, then one per repetition."""
        sizes = [min(self.samples, 2 * self.ranks), *[self.samples] * self.repeat]
        return {self.output / "prompts" / f"{turn}.jsonl": n for turn, n in enumerate(sizes)}


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: a checkpoint with its experts in the order of ``placement``."""

    number: int
    name: str
    placement: str
    base: Path
    folder: Path
    trace: RoutingTrace

    def result(self, output: Path, turn: int) -> Path:
        """File for the client's results of repetition ``turn``; 0 is the warm-up."""
        return output / "results" / f"arm-{self.number}-{turn}.json"


def run_bench(bench: Bench, traces: Sequence[RoutingTrace], dry_run: bool = False) -> str:
    """Measure the arms and return the table; with ``dry_run`` return what would be started.

    Writes into ``bench.output``: ``prompts/``, ``plans/`` and ``checkpoints/`` (a copy of a
    checkpoint for each arm), ``logs/``, the client's ``results/`` and ``bench.json``.

    Raises:
        OutputExistsError: the output folder is not empty.
        DependencyError: fewer GPUs than ranks, or no vLLM.
        DataError, CheckpointError, TraceError, RecipeError: rows, checkpoints or traces cannot be
            used.
        EvaluationError: a server or client failed.
    """
    check_output(bench.output)
    check_server_options(bench.extra)
    arms = make_arms(bench, traces)
    if dry_run:
        return describe(bench, arms)
    require_gpus(bench.ranks)
    write_prompts(bench.rows, arms[0].base, bench.prompts())
    placed = [place_arm(bench, arm) for arm in arms]
    results = []
    for arm, metrics in zip(arms, placed, strict=True):
        speeds = measure(bench, arm)
        results.append({"arm": arm.name, "placement": arm.placement, **metrics, "speeds": speeds})
        write_results(bench, results)
    return table(results)


def make_arms(bench: Bench, traces: Sequence[RoutingTrace]) -> list[Arm]:
    """Round robin and plan for the first trace's checkpoint, plan for every other's."""
    from moe_finetune.vllm.serve import open_merged

    arms: list[Arm] = []
    for trace in traces:
        base = open_merged(trace.info.checkpoint).folder
        name = checkpoint_name(trace.info.checkpoint)
        for placement in ("round robin", "planned")[bool(arms) :]:
            folder = bench.output / "checkpoints" / f"{len(arms)}-{placement.replace(' ', '-')}"
            arms.append(Arm(len(arms), name, placement, base, folder, trace))
    return arms


def check_server_options(extra: Sequence[str]) -> None:
    """Raise RecipeError for an option that would serve something else than is measured."""
    for word in extra:
        option = word.partition("=")[0].replace("_", "-")
        if option in SET_BY_BENCH:
            raise RecipeError(f"--bench: {option} is already set; leave it out")


def server_command(bench: Bench, arm: Arm) -> list[str]:
    """Arguments of ``vllm serve``."""
    from moe_finetune.vllm.install import is_cpu_build
    from moe_finetune.vllm.serve import serve_command

    options = ["--port", str(bench.port), "--data-parallel-size", str(bench.ranks)]
    options.append("--enable-expert-parallel")
    if not any(word.endswith("enable-prefix-caching") for word in bench.extra):
        options.append("--no-enable-prefix-caching")
    return serve_command(arm.folder, "arm", is_cpu_build(), [*options, *bench.extra])


def client_command(bench: Bench, arm: Arm, turn: int) -> list[str]:
    """Arguments of ``vllm bench serve``: all samples at once, answers of equal length.

    Its own warm-up and its wait for the server send the first measured prompt in advance. So the
    warm-up is off, and only our warm-up waits.
    """
    file, count = list(bench.prompts().items())[turn]
    result = arm.result(bench.output, turn)
    options = {
        "--backend": "openai",
        "--base-url": f"http://127.0.0.1:{bench.port}",
        "--model": "arm",
        "--tokenizer": str(arm.folder),
        "--dataset-name": "custom",
        "--dataset-path": str(file),
        "--num-prompts": str(count),
        "--custom-output-len": str(bench.output_tokens),
        "--num-warmups": "0",
        "--ready-check-timeout-sec": str(0 if turn else READY_SECONDS),
        "--temperature": "0",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
    }
    flags = ["--skip-chat-template", "--ignore-eos", "--save-result", "--disable-tqdm"]
    head = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    return [*head, *(part for pair in options.items() for part in pair), *flags]


def describe(bench: Bench, arms: Sequence[Arm]) -> str:
    """What would be written and started, for a reader."""
    lines = [
        f"{bench.samples} rows of {bench.rows}, {bench.output_tokens} tokens each, {bench.repeat} "
        f"times, on {bench.ranks} GPUs; needs room for {len(arms)} copies of checkpoints",
    ]
    for arm in arms:
        server = server_command(bench, arm)
        client = client_command(bench, arm, 1)
        lines += [
            "",
            f"arm {arm.number}: {arm.name}, {arm.placement}",
            f"  permute {arm.base} -> {arm.folder}",
            f"  serve   {shlex.join(server)}",
            f"  measure {shlex.join(client)}",
        ]
    return "\n".join(lines)


def require_gpus(ranks: int) -> None:
    """Raise DependencyError unless there are as many GPUs as ranks and a GPU build of vLLM."""
    import torch

    from moe_finetune.vllm.install import is_cpu_build, require_vllm

    gpus = torch.cuda.device_count()
    if gpus < ranks:
        raise DependencyError(
            f"--bench: {ranks} ranks need {ranks} GPUs, but this machine has {gpus}; add "
            "--dry-run to see what would be started, or leave --bench out to plan and simulate"
        )
    require_vllm()
    if is_cpu_build():
        raise DependencyError("--bench: this is vLLM's CPU build; install moe-finetune[vllm]")


def place_arm(bench: Bench, arm: Arm) -> dict[str, Any]:
    """Write an arm's plan and checkpoint; return its placement metrics on held-out tokens."""
    from moe_finetune.checkpoint.permute import permute_experts

    held_out = plan_trace(arm.trace, bench.ranks, bench.max_imbalance, bench.groups)
    plan, info = held_out.plan, arm.trace.info
    if arm.placement == "round robin":
        ranks_LE = baseline_placements(len(info.layers), info.num_experts, bench.ranks)[
            "round_robin"
        ]
        plan = PlacementPlan.of(info.model_type, info.layers, bench.ranks, ranks_LE)
    plans = bench.output / "plans"
    plans.mkdir(parents=True, exist_ok=True)
    plan.write(plans / f"{arm.folder.name}.json")
    arm.folder.parent.mkdir(parents=True, exist_ok=True)
    orders = plan.permutation_LE().tolist()
    permute_experts(arm.base, dict(zip(plan.layers, orders, strict=True)), arm.folder)
    metrics: dict[str, Any] = dict(held_out.metrics[arm.placement])
    if arm.placement == "planned":
        metrics["home_share_in_turn"] = held_out.buckets.share_before
        metrics["home_share_bucketed"] = held_out.buckets.share_after
    return metrics


def measure(bench: Bench, arm: Arm) -> list[float]:
    """Serve an arm and return its samples/s, once for each repetition.

    The output of server and client goes to ``logs/`` in the output folder.

    Raises:
        EvaluationError: the server or a client failed.
        RecipeError: another server has the port.
        KeyboardInterrupt: SIGINT or SIGTERM, after both have ended.
    """
    from moe_finetune.io.children import children, failure
    from moe_finetune.vllm.serve import refuse_used_port

    refuse_used_port("127.0.0.1", bench.port)
    speeds: list[float] = []
    logs = {
        name: bench.output / "logs" / f"arm-{arm.number}-{name}.log"
        for name in ("server", "client")
    }
    with children(servers=True) as group:
        starts = {"server": group.start("server", server_command(bench, arm), logs["server"])}
        for turn, count in enumerate(bench.prompts().values()):
            result = arm.result(bench.output, turn)
            result.parent.mkdir(parents=True, exist_ok=True)
            client = client_command(bench, arm, turn)
            starts["client"] = group.start("client", client, logs["client"])
            while "client" in group.running:
                if group.asked:
                    return []
                for name, code in group.ended():
                    if name == "server" or code:
                        reason = failure(logs[name], starts[name], code)
                        raise EvaluationError(f"arm {arm.number}: the {name} failed: {reason}")
                time.sleep(0.1)
            speed = read_speed(result, count)
            if turn:
                speeds.append(speed)
    return speeds


def read_speed(result: Path, samples: int) -> float:
    """Samples/s from the client's result.

    Raises:
        EvaluationError: not all samples were answered.
    """
    content = read_object(result, EvaluationError, "measure again")
    if content.get("completed") != samples:
        raise EvaluationError(
            f"{result}: {content.get('completed')} of {samples} samples were answered; see the "
            "server's log, and compare the rows' lengths with --max-model-len"
        )
    return float(content["request_throughput"])


def write_results(bench: Bench, results: Sequence[dict[str, Any]]) -> None:
    """Write ``bench.json`` with what has been measured so far."""
    from moe_finetune.io.environment import describe_environment

    document = {
        "ranks": bench.ranks,
        "samples": bench.samples,
        "output_tokens": bench.output_tokens,
        "serve": list(bench.extra),
        "arms": list(results),
        "date": datetime.date.today().isoformat(),
        "environment": describe_environment(),
    }
    write_atomic(bench.output / "bench.json", json.dumps(document, indent=1) + "\n")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Samples/s of every arm and its gain over the first, for a reader."""
    base = fmean(results[0]["speeds"])
    lines = [f"{'arm':<28}{'placement':<14}{'samples/s':>10}{'±':>8}{'gain':>9}  cross-rank"]
    for row in results:
        speeds = row["speeds"]
        spread = stdev(speeds) if len(speeds) > 1 else 0.0
        lines.append(
            f"{row['arm']:<28}{row['placement']:<14}{fmean(speeds):>10.2f}{spread:>8.2f}"
            f"{100 * (fmean(speeds) / base - 1):>+8.1f}%  {row['cross_rank_share']:.3f}"
        )
    lines += [
        f"{row['arm']}: sequences sent to the rank of their first layer's experts would have "
        f"{row['home_share_bucketed']:.3f} of their dispatches there, in turn "
        f"{row['home_share_in_turn']:.3f} (from the trace, not measured)"
        for row in results
        if "home_share_bucketed" in row
    ]
    return "\n".join(lines)
