import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune import cli
from moe_finetune.checkpoint.adapters.convert import convert_adapter
from moe_finetune.checkpoint.adapters.files import read_adapter
from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import AdapterError, CheckpointError, EvaluationError, RecipeError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.server import server_models
from moe_finetune.vllm.adapters import LORA_RANKS, serve_line
from moe_finetune.vllm.serve import open_merged, serve_command
from tests.checkpoint.helpers import EXPERTS, select
from tests.checkpoint.helpers import adapter as random_adapter
from tests.evaluation.local import write_suite
from tests.support.parity import parity
from tests.support.vllm_server import ROOT, free_port, needs_vllm

ATTENTION = {"target_parameters": None}


def pairs(command: list[str]) -> dict[str, str]:
    return dict(zip(command, [*command[1:], ""], strict=True))


def test_the_command_has_our_defaults_and_every_argument():
    folder = Path("runs/first/merged")
    plain = serve_command(folder, "first", cpu=False)
    assert (
        plain[0] == sys.executable and plain[1:2] == ["-P"] and plain[4:6] == ["serve", str(folder)]
    )
    assert pairs(plain)["--host"] == "127.0.0.1" and pairs(plain)["--served-model-name"] == "first"
    assert "--enforce-eager" not in plain and "--dtype" not in plain
    arguments = ["--host=0.0.0.0", "--served_model_name", "mine", "--dtype=bfloat16"]
    command = serve_command(folder, "first", True, arguments)
    assert command[6:] == ["--enforce-eager", *arguments]
    on_cpu = pairs(serve_command(folder, "first", cpu=True))
    assert on_cpu["--dtype"] == "float32" and on_cpu["--attention-backend"] == "CPU_MLA"


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("--trust_remote_code", "--trust-remote-code"),
        ("--trust-remote", "--trust-remote-code"),
        ('--mm-processor-kwargs={"trust_remote_code": true}', "--trust-remote-code"),
        ("--adapter=calm", "convert ADAPTER --to vllm"),
    ],
)
def test_refused_arguments(argument, option):
    with pytest.raises(RecipeError, match=option):
        serve_command(Path("base"), "base", False, [argument])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: 8123\ntrust-remote-code: true", "--trust-remote-code: code from a checkpoint"),
        ("trust_remote: yes", "--trust-remote-code: code from a checkpoint"),
        ("speculative-config: {model: x, trust_remote_code: true}", "--trust-remote-code: code"),
        ("- port", "expected options of vllm serve"),
        ("a: [", "not YAML"),
    ],
)
def test_what_a_file_of_options_may_not_contain(tmp_path, content, message):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=message):
        serve_command(Path("base"), "base", False, ["--config", str(file)])


def test_a_file_of_options_overrides_our_defaults(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("host: 0.0.0.0\nserved_model_name: [mine, calm]\nenforce-eager: false\n")
    arguments = ["--config", str(file), "--port", "8123"]
    options = ["--dtype", "float32", "--attention-backend", "CPU_MLA"]
    assert serve_command(Path("base"), "base", True, arguments)[6:] == [*options, *arguments]
    file.unlink()
    with pytest.raises(RecipeError, match=r"options.yaml: cannot be read"):
        serve_command(Path("base"), "base", False, arguments)


def test_what_is_served(tmp_path, tiny_checkpoint):
    base = tiny_checkpoint("qwen3_moe")
    assert open_merged(base).folder == base
    run = tmp_path / "run"
    run.mkdir()
    (run / "adapter").mkdir()
    with pytest.raises(CheckpointError, match="moe-finetune merge"):
        open_merged(run)
    (run / "merged").symlink_to(base)
    assert open_merged(run).folder == run / "merged"
    with pytest.raises(CheckpointError, match="no such folder"):
        open_merged(tmp_path / "nowhere")


@pytest.mark.parametrize("arguments", ["--port {}", "--host 0.0.0.0 --port={}"])
def test_a_used_port_is_refused_before_anything_starts(capsys, tiny_checkpoint, arguments):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        options = arguments.format(port).split()
        assert cli.main(["serve", str(tiny_checkpoint("qwen3_moe")), *options]) == 2
    assert f":{port}: another server uses this port" in capsys.readouterr().err


def converted(adapter, base, tmp_path):
    """The adapter in vLLM's form."""
    FORMS["vllm"].write(open_adapter(adapter, open_checkpoint(base)))  # refused here if it has none
    return read_adapter(convert_adapter(adapter, base, tmp_path / "converted", FORMS["vllm"]))


def test_the_printed_line_serves_a_converted_adapter(tmp_path, tiny_checkpoint, capsys):
    base = tiny_checkpoint("qwen3_moe")
    law = random_adapter(base, tmp_path / "law", r=9, target_parameters=list(EXPERTS))
    command = ["convert", str(law), "--to", "vllm", "--base", str(base), "--output"]
    assert cli.main([*command, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "vllm serve" in line)
    words = shlex.split(line.partition(": ")[2])
    assert words[:3] == ["vllm", "serve", str(base)] and "vllm#49354" in printed
    options = pairs(words)
    assert options["--max-lora-rank"] == "16" and "--enable-mixed-moe-lora-format" in words
    module = {"name": "law", "path": str(tmp_path / "out"), "is_3d_lora_weight": True}
    assert json.loads(options["--lora-modules"]) == module
    plain = random_adapter(base, tmp_path / "plain", **ATTENTION)
    words = shlex.split(serve_line(open_checkpoint(base), read_adapter(plain), "calm"))
    assert "--enable-mixed-moe-lora-format" not in words
    assert "is_3d_lora_weight" not in words[-1]


def test_the_ranks_are_those_that_vllm_accepts():
    lora = pytest.importorskip("vllm.config.lora")
    assert get_args(lora.MaxLoRARanks) == LORA_RANKS


def test_what_no_class_can_serve(tmp_path, tiny_checkpoint):
    base = tiny_checkpoint("deepseek_v2")
    options = {"target_parameters": None, "target_modules": ["kv_b_proj"]}
    with pytest.raises(AdapterError, match=r"kv_b_proj.*moe-finetune merge"):
        converted(random_adapter(base, tmp_path / "adapter", **options), base, tmp_path)


def test_chosen_experts_are_filled_up_and_a_bias_is_refused(tmp_path, tiny_checkpoint):
    base = tiny_checkpoint("qwen3_moe")
    adapter = random_adapter(base, tmp_path / "adapter", **ATTENTION)
    save_file({"bias.1": torch.zeros(12)}, adapter / "router_bias.safetensors")
    with pytest.raises(AdapterError, match="routing bias"):
        converted(adapter, base, tmp_path)
    whole = random_adapter(base, tmp_path / "whole", target_parameters=list(EXPERTS))
    chosen = select(whole, base, {1: [3, 10]}, tmp_path / "chosen")
    filled = converted(chosen, base, tmp_path)
    stacks = [key for key in filled.tensors if ".experts." in key]
    assert {key.split(".")[2] for key in stacks} == {"1"}
    assert filled.folder != chosen and filled.metadata.experts is None


def test_patterns_of_parameters_name_modules_for_vllm(tmp_path, tiny_checkpoint):
    """vLLM would give a router's or shared expert's factors the rank of all others."""
    base = tiny_checkpoint("qwen3_moe")
    options = {"rank_pattern": {r"mlp\.gate\.weight": 2}, "alpha_pattern": {"gate.weight": 9}}
    adapter = random_adapter(
        base, tmp_path / "adapter", **options, target_parameters=["gate.weight"]
    )
    found = converted(adapter, base, tmp_path)
    assert found.config["rank_pattern"] == {r"mlp\.gate": 2}
    assert found.config["alpha_pattern"] == {"gate": 9}


ENGINE = """
import multiprocessing, os, sys, threading, time
from moe_finetune.vllm.plugin import die_with_parent

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once, since others write there, too

def worker(deeper):
    die_with_parent()
    die_with_parent()
    if deeper:
        context.Process(target=worker, args=(deeper - 1,)).start()
    say(f"process {os.getpid()} {threading.active_count()}")
    time.sleep(600)

context = multiprocessing.get_context(sys.argv[1])
if __name__ == "__main__":
    die_with_parent()
    # The thread that starts an engine may end before it does.
    thread = threading.Thread(target=lambda: context.Process(target=worker, args=(1,)).start())
    thread.start()
    thread.join()
    say(f"started {threading.active_count()}")
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_engines_end_with_a_killed_parent(tmp_path, method):
    (tmp_path / "engine.py").write_text(ENGINE)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "engine.py"), method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said = [process.stdout.readline().split() for _ in range(3)]
    assert ["started", "1"] in said  # no watcher in who has no such parent
    engines = [int(words[1]) for words in said if words[0] == "process"]
    assert len(engines) == 2 and all(words[2] == "2" for words in said if words[0] == "process")
    time.sleep(0.5)
    assert all(alive(pid) for pid in engines)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(map(alive, engines)):
        time.sleep(0.05)
    assert not any(map(alive, engines))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_wrong_source_is_exit_code_2(capsys, tmp_path):
    assert cli.main(["serve", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert cli.main(["serve", "--port", "8123", str(tmp_path)]) == 2
    assert "--port: give the run or checkpoint before vLLM's options" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_real_server_gives_the_answers_of_transformers_and_stops(warm_vllm, checkpoint, tmp_path):
    port = free_port()
    arguments = ["--port", str(port), "--served-model-name", "tiny", "--max-num-seqs", "16"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_finetune.cli", "serve", str(checkpoint), *arguments],
            stdout=log, stderr=log, cwd=ROOT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    try:
        while process.poll() is None:
            with suppress(EvaluationError):
                assert list(server_models(url)) == ["tiny"]
                break
            time.sleep(0.2)
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        suite = write_suite(tmp_path / "data", items=30)
        with open_backend(checkpoint, "server", base_url=url) as opened:
            found = parity(checkpoint, ("hf", "server"), suite, tmp_path / "out", 30,
                           opened={"server": opened})  # fmt: skip
        assert [result.holds for result in found] == [True, True], found
        children = descendants(process.pid)
        assert len(children) > 1
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(map(alive, children)):
        time.sleep(0.05)
    assert not any(map(alive, children))


def descendants(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    return children + [pid for child in children for pid in descendants(child)]


@pytest.mark.vllm
@needs_vllm
def test_vllm_knows_every_option(tmp_path, tiny_checkpoint):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    base = tiny_checkpoint("qwen3_moe")
    parser = make_arg_parser(FlexibleArgumentParser())
    found = parser.parse_args(serve_command(base, "base", False)[5:])
    assert found.model_tag == str(base) and found.host == "127.0.0.1"
    assert found.served_model_name == ["base"]
    law = random_adapter(base, tmp_path / "law", r=9, target_parameters=list(EXPERTS))
    line = serve_line(open_checkpoint(base), read_adapter(law), "law")
    found = parser.parse_args(shlex.split(line)[2:])
    assert found.enable_lora and found.enable_mixed_moe_lora_format and found.max_lora_rank == 16
    assert [(m.name, m.is_3d_lora_weight) for m in found.lora_modules] == [("law", True)]
    on_cpu = parser.parse_args(serve_command(base, "base", cpu=True)[5:])
    assert on_cpu.enforce_eager and on_cpu.dtype == "float32"


@pytest.mark.vllm
@needs_vllm
def test_vllm_reads_our_ranks_and_scalings(tmp_path, tiny_checkpoint):
    """vLLM's own loader, on an adapter with rsLoRA and a rank for each part, router included."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    base = tiny_checkpoint("qwen3_moe")
    adapter = random_adapter(
        base,
        tmp_path / "adapter",
        use_rslora=True,
        target_parameters=[*EXPERTS, "mlp.gate.weight"],
        rank_pattern={"mlp.gate.weight": 2, "mlp.experts.gate_up_proj": 6, "o_proj": 3},
        alpha_pattern={"mlp.gate.weight": 5, "mlp.experts.down_proj": 7},
    )
    served = converted(adapter, base, tmp_path)
    helper = PEFTHelper.from_local_dir(str(served.folder), None)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts"}
    loras = LoRAModel.from_local_checkpoint(
        str(served.folder), names, helper, device="cpu", dtype=torch.float32
    ).loras
    layer = "model.layers.1"
    wanted = {
        f"{layer}.self_attn.q_proj": (4, 12 / 4**0.5),
        f"{layer}.self_attn.o_proj": (3, 12 / 3**0.5),
        f"{layer}.mlp.gate": (2, 5 / 2**0.5),
        f"{layer}.mlp.experts.base_layer": (6, 12 / 6**0.5),
        f"{layer}.mlp.experts": (4, 7 / 4**0.5),
    }
    for name, (rank, scaling) in wanted.items():
        assert (loras[name].rank, loras[name].scaling) == (rank, pytest.approx(scaling))


@pytest.mark.vllm
@needs_vllm
def test_vllm_reads_a_converted_adapter(tmp_path, tiny_checkpoint):
    """From a pair for each expert's matrices, as PEFT made with transformers 4, to stacks."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    base = tiny_checkpoint("qwen3_moe")
    adapter = random_adapter(base, tmp_path / "adapter", target_parameters=list(EXPERTS))
    split = convert_adapter(adapter, base, tmp_path / "split", FORMS["per-expert"])
    out = convert_adapter(split, base, tmp_path / "vllm", FORMS["vllm"])
    helper = PEFTHelper.from_local_dir(str(out), None)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "experts"}
    loras = LoRAModel.from_local_checkpoint(
        str(out), names, helper, device="cpu", dtype=torch.float32
    ).loras
    ours = read_adapter(out).tensors
    assert len(loras) == len(ours) / 2
    for name, lora in loras.items():
        assert tuple(lora.lora_a.shape) == ours[f"{name}.lora_A.weight"].shape
        assert tuple(lora.lora_b.shape) == ours[f"{name}.lora_B.weight"].shape
    # Gate and up had a pair of rank 4 each.
    assert loras["model.layers.1.mlp.experts.base_layer"].rank == 8
