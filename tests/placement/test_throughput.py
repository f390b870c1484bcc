"""``place``: the plan and its judgement, and the benchmark up to the GPUs that it needs."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_finetune import cli
from moe_finetune.errors import DataError, EvaluationError, RecipeError, TraceError
from moe_finetune.metrics import placement_metrics
from moe_finetune.models.loading import load_tokenizer
from moe_finetune.placement.baselines import baseline_placements
from moe_finetune.placement.bucketing import bucket_sequences
from moe_finetune.placement.held_out import plan_trace
from moe_finetune.placement.plan import PlacementPlan
from moe_finetune.placement.prompts import prompt_of, write_prompts
from moe_finetune.placement.throughput import (
    Bench,
    client_command,
    make_arms,
    measure,
    place_arm,
    read_speed,
    server_command,
    table,
)
from moe_finetune.routing.trace import RoutingTrace, TraceWriter
from tests.placement.traces import topical
from tests.processes import ended
from tests.vllm_server import ROOT, needs_vllm

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": "?"}]}
    for n in range(21)
]


def write_trace(folder, checkpoint, tokens: int = 600, seed: int = 0):
    ids, seq = topical(tokens, layers=3, seed=seed)
    facts = {"model_type": "qwen3_moe", "checkpoint": str(checkpoint), "layers": range(3)}
    with TraceWriter(folder, **facts, num_experts=12, top_k=3) as writer:
        writer.append(ids, None, seq)
    return folder


@pytest.fixture()
def inputs(tmp_path, tiny_checkpoint):
    """A trace, another one with a checkpoint of its own, and rows."""
    from tests import tiny

    other = tiny.save("qwen3_moe", tmp_path / "coupling" / "merged", seed=5)
    aux = write_trace(tmp_path / "aux", tiny_checkpoint("qwen3_moe"))
    coupling = write_trace(tmp_path / "trace", other, seed=1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return aux, coupling, rows


def test_place_plans_on_one_half_and_judges_on_the_other(inputs, tmp_path, capsys):
    aux, _, _ = inputs
    plan = tmp_path / "plan.json"
    assert cli.main(["place", str(aux), "--ranks", "4", "-o", str(plan)]) == 0
    out = capsys.readouterr().out
    trace = RoutingTrace.open(aux)
    found = plan_trace(trace, 4)
    held = trace.load("ids")[trace.load("seq") > np.median(trace.load("seq"))]
    ranks_LE = PlacementPlan.read(plan).ranks_LE
    assert found.metrics["planned"] == placement_metrics(held, ranks_LE)
    simple = baseline_placements(3, 12, 4)
    for name in ("index_order", "round_robin"):
        assert found.metrics[name.replace("_", " ")] == placement_metrics(held, simple[name])
    for metrics in found.metrics.values():
        assert f"cross_rank_share {metrics['cross_rank_share']:.3f}" in out
    buckets = bucket_sequences(held, held_seq(trace), ranks_LE)
    assert found.buckets.share_after == buckets.share_after > buckets.share_before
    assert f"{buckets.share_after:.3f} of dispatches stay on that rank; assigned in turn" in out
    with pytest.raises(TraceError, match="one sequence"):
        plan_trace(RoutingTrace.open(write_trace(tmp_path / "short", "x", 17)), 4)
    other = str(tmp_path / "six.json")
    assert cli.main(["place", str(aux), "--ranks", "6", "--groups", "6", "-o", other]) == 0
    assert cli.main(["place", str(aux), "--ranks", "4", "--groups", "6", "-o", other + "x"]) == 2
    assert cli.main(["place", str(aux), "--ranks", "4", "--dry-run", "-o", other + "x"]) == 2


def test_every_domain_is_planned_for_and_judged(tmp_path):
    """A trace of one domain after another, as `analyze --domain` records it."""
    facts = {"model_type": "olmoe", "checkpoint": "x", "layers": range(3), "domains": ("a", "b")}
    ids, seq = topical(1200, layers=3)
    other = (topical(1000, layers=3, seed=1)[0] + 5) % 12
    with TraceWriter(tmp_path / "two", **facts, num_experts=12, top_k=3) as writer:
        writer.append(ids, None, seq, domain="a")
        writer.append(other, None, 1000 + seq[:1000], domain="b")
    found = plan_trace(RoutingTrace.open(tmp_path / "two"), 4)
    halves = [seq <= np.median(seq), seq[:1000] <= np.median(seq[:1000])]
    held = np.concatenate([ids[~halves[0]], other[~halves[1]]])
    assert found.metrics["planned"] == placement_metrics(held, found.plan.ranks_LE)
    simple = found.metrics["index order"]
    assert found.metrics["planned"]["rank_imbalance"] <= 1.3 < simple["rank_imbalance"]
    assert found.metrics["planned"]["cross_rank_share"] < simple["cross_rank_share"]


def held_seq(trace):
    seq = trace.load("seq")
    return seq[seq > np.median(seq)]


def bench_arguments(inputs, output):
    aux, coupling, rows = inputs
    ranks = ["--ranks", "4", "--samples", "6", "--output-tokens", "9"]
    return ["place", str(aux), "--against", str(coupling), *ranks, "--bench", str(rows),
            "-o", str(output)]  # fmt: skip


def test_the_three_arms_are_told_without_gpus(inputs, tmp_path, capsys, tiny_checkpoint):
    extra = ["--dry-run", "--", "--max-model-len", "512"]
    assert cli.main([*bench_arguments(inputs, tmp_path / "b"), *extra]) == 0
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if line.startswith("arm ")]
    assert heads == [
        "arm 0: qwen3_moe, round robin",
        "arm 1: qwen3_moe, planned",
        "arm 2: coupling, planned",
    ]
    servers = [line.split() for line in out.splitlines() if line.startswith("  serve ")]
    assert len(servers) == 3
    for number, words in enumerate(servers):
        assert words[words.index("--data-parallel-size") + 1] == "4"
        assert "--enable-expert-parallel" in words and words[-2:] == ["--max-model-len", "512"]
        assert f"/checkpoints/{number}-" in words[words.index("serve", 1) + 1]
    clients = [line.split() for line in out.splitlines() if line.startswith("  measure ")]
    assert all("--ignore-eos" in words and words[words.index("--num-prompts") + 1] == "6"
               for words in clients) and len(clients) == 3  # fmt: skip
    assert str(tiny_checkpoint("qwen3_moe")) in out and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "option", ["--port=9", "--served_model_name", "-dp", "--data-parallel-size", "--host"]
)
def test_options_that_would_serve_something_else_are_refused(inputs, tmp_path, capsys, option):
    extra = ["--dry-run", "--", option, "2"]
    assert cli.main([*bench_arguments(inputs, tmp_path / "b"), *extra]) == 2
    name = option.partition("=")[0].replace("_", "-")
    assert f"--bench: {name} is already set; leave it out" in capsys.readouterr().err


def test_another_server_is_not_measured(inputs, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        bench = Bench(ranks=3, rows=inputs[2], output=tmp_path / "b", port=other.getsockname()[1])
        (arm, *_) = make_arms(bench, [RoutingTrace.open(inputs[0])])
        with pytest.raises(RecipeError, match="another server uses this port"):
            measure(bench, arm)
    assert not (tmp_path / "b").exists(), "nothing was started"


KILLED_BENCH = """
import sys
from pathlib import Path
from moe_finetune.placement import throughput
sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
throughput.server_command = throughput.client_command = lambda *_: [sys.executable, "-c", sleep]
rows, output, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
bench = throughput.Bench(ranks=3, rows=rows, output=output, port=port)
throughput.measure(bench, throughput.Arm(0, "base", "planned", output, output, None))
"""


def test_a_killed_bench_leaves_no_server(inputs, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [KILLED_BENCH, str(inputs[2]), str(tmp_path / "b"), str(port)]
    bench = subprocess.Popen([sys.executable, "-c", *arguments], cwd=ROOT)
    logs = [tmp_path / "b" / "logs" / f"arm-0-{name}.log" for name in ("server", "client")]
    try:
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
            assert bench.poll() is None
            time.sleep(0.05)
    finally:
        bench.kill()
    assert bench.wait() == -signal.SIGKILL
    assert all(ended(int(log.read_text())) for log in logs)


def test_without_gpus_nothing_is_started(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert cli.main(bench_arguments(inputs, tmp_path / "b")) == 2
    err = capsys.readouterr().err
    assert "4 ranks need 4 GPUs, but this machine has 3" in err and "--dry-run" in err
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    assert cli.main(bench_arguments(inputs, tmp_path / "b")) == 2
    assert "is not empty" in capsys.readouterr().err


def test_prompts_end_where_the_answer_begins(inputs, tmp_path, tiny_checkpoint):
    base = tiny_checkpoint("qwen3_moe")
    tokenizer = load_tokenizer(base)
    assert prompt_of({"prompt": "a", "completion": "b"}, tokenizer) == "a"
    assert prompt_of({"text": "all of it"}, tokenizer) == "all of it"
    bench = Bench(ranks=3, rows=inputs[2], output=tmp_path / "b", samples=7, repeat=2)
    write_prompts(bench.rows, base, bench.prompts())
    sets = [
        [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
        for file in sorted((tmp_path / "b" / "prompts").iterdir())
    ]
    assert [len(prompts) for prompts in sets] == [6, 7, 7]
    assert [prompt for prompts in sets for prompt in prompts] == [
        f"<|im_start|>user\n{n} + 1<|im_end|><|im_start|>assistant\n" for n in range(20)
    ]
    twice = tmp_path / "twice.jsonl"
    twice.write_text(inputs[2].read_text() * 2)
    for rows, held in ((inputs[2], 21), (twice, 21)):
        bench = Bench(ranks=3, rows=rows, output=tmp_path / "c", samples=6, repeat=3)
        with pytest.raises(DataError, match=f"{held} different prompts, but --bench needs 24"):
            write_prompts(bench.rows, base, bench.prompts())
    assert not (tmp_path / "c").exists()


def test_no_turn_finds_its_prompts_in_the_cache(inputs, tmp_path):
    bench = Bench(ranks=3, rows=inputs[2], output=tmp_path / "b", samples=7, repeat=2)
    (arm, *_) = make_arms(bench, [RoutingTrace.open(inputs[0])])
    clients = [client_command(bench, arm, turn) for turn in range(3)]
    asked = [words[words.index("--dataset-path") + 1] for words in clients]
    assert asked == [str(file) for file in bench.prompts()] and len(set(asked)) == 3
    assert [words[words.index("--num-prompts") + 1] for words in clients] == ["6", "7", "7"]
    assert all(words[words.index("--num-warmups") + 1] == "0" for words in clients)
    assert "--no-enable-prefix-caching" in server_command(bench, arm)
    kept = replace(bench, extra=("--enable-prefix-caching",))
    assert "--no-enable-prefix-caching" not in server_command(kept, arm)


def test_an_arm_computes_what_its_base_does(inputs, tmp_path):
    from moe_finetune.checkpoint.loading import load_model
    from tests import tiny

    bench = Bench(ranks=4, rows=inputs[2], output=tmp_path / "b")
    arms = make_arms(bench, [RoutingTrace.open(path) for path in inputs[:2]])
    batch = tiny.batch()
    for arm in arms:
        metrics = place_arm(bench, arm)
        plan = PlacementPlan.read(bench.output / "plans" / f"{arm.folder.name}.json")
        round_robin = (plan.ranks_LE == np.arange(12) % 4).all()
        assert round_robin == (arm.placement == "round robin")
        assert 1 <= metrics["ranks_per_token"] <= 3
        with torch.no_grad():
            wanted, found = (load_model(f)(**batch).logits for f in (arm.base, arm.folder))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        first = load_model(arm.base).model.layers[1].mlp.gate.weight
        assert not torch.equal(load_model(arm.folder).model.layers[1].mlp.gate.weight, first)


def test_speeds_are_read_and_compared(tmp_path):
    result = tmp_path / "r.json"
    result.write_text(json.dumps({"completed": 6, "request_throughput": 2.5}))
    assert read_speed(result, 6) == 2.5
    with pytest.raises(EvaluationError, match="6 of 7 samples"):
        read_speed(result, 7)
    rows = [
        {"arm": "aux", "placement": "round robin", "cross_rank_share": 0.875, "speeds": [4, 6]},
        {"arm": "ours", "placement": "planned", "cross_rank_share": 0.5, "speeds": [6, 7]},
    ]
    lines = table(rows).splitlines()
    assert "5.00" in lines[1] and "+0.0%" in lines[1]
    assert "6.50" in lines[2] and "+30.0%" in lines[2] and lines[2].endswith("0.500")
    assert len(lines) == 3
    rows[1] |= {"home_share_in_turn": 0.125, "home_share_bucketed": 0.25}
    assert table(rows).splitlines()[:3] == lines
    assert re.search("^ours: .* 0.250 of .* in turn 0.125 ", table(rows).splitlines()[3])


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_an_arm_is_served_and_measured(warm_vllm, inputs, tmp_path, monkeypatch):
    """One rank on the CPU build: all but the number of ranks is as on GPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bench = Bench(
        ranks=1,
        rows=inputs[2],
        output=tmp_path / "b",
        samples=6,
        output_tokens=9,
        repeat=1,
        port=port,
        extra=("--max-model-len", "256"),
    )
    arm = make_arms(bench, [RoutingTrace.open(inputs[0])])[1]
    write_prompts(bench.rows, arm.base, bench.prompts())
    place_arm(bench, arm)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    speeds = measure(bench, arm)
    assert len(speeds) == 1 and min(speeds) > 0, "the first turn is not counted"
    answered = json.loads(arm.result(bench.output, 1).read_text())
    assert answered["completed"] == 6 and answered["total_output_tokens"] == 6 * 9
    with socket.socket() as probe:  # the server is gone
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
