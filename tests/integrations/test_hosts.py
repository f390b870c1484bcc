"""Hosts train a tiny Qwen3-MoE by their own commands, without and with the method.

``make test-integrations`` installs each host's pinned versions below ``build/integrations`` and
runs these tests; without that they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from moe_finetune import cli
from tests import tiny
from tests.conftest import ROOT
from tests.integrations.driver import ACCUMULATION, TERMS

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
RANK, ALPHA, STEPS = 3, 12, 3
EXACT = ("axolotl", "swift")


@dataclass
class Trained:
    """What a host's training left."""

    losses: list[float]
    gradients: dict
    reference: dict
    adapter: Path
    run: Path


def axolotl(base, data, folder, section):
    config = {
        "base_model": str(base),
        "datasets": [
            {"path": str(data / "rows.jsonl"), "ds_type": "json", "type": "chat_template"}
        ],
        "chat_template": "tokenizer_default",
        "adapter": "lora",
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": EXPERTS,
        "sequence_len": 96,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "learning_rate": 0.001,
        "seed": 42,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
    }
    if section is not None:
        config["plugins"] = ["moe_finetune.integrations.axolotl.SpecializationPlugin"]
        config["specialization"] = section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["axolotl.cli.main", "train", str(path), "--launcher", "python"], {}, "out"


def llamafactory(base, data, folder, section):
    config = {
        "model_name_or_path": str(base),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target": "q_proj,v_proj",
        "additional_target": "gate",
        "dataset": "rows",
        "dataset_dir": str(data),
        "template": "empty",
        "cutoff_len": 64,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "disable_gradient_checkpointing": True,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.001,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
    }
    path = folder / "config.yaml"
    if section is None:
        path.write_text(yaml.safe_dump(config))
        return ["llamafactory.cli", "train", str(path)], {}, "out"
    path.write_text(yaml.safe_dump({**config, "specialization": section}))
    return ["moe_finetune.integrations.llamafactory", str(path)], {}, "out"


def swift(base, data, folder, section):
    options = {
        "model": base,
        "model_type": "qwen3_moe",
        "template": "qwen3",
        "dataset": data / "rows.jsonl",
        "split_dataset_ratio": 0,
        "tuner_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0,
        "torch_dtype": "float32",
        "fp16": "false",
        "bf16": "false",
        "max_length": 96,
        "attn_impl": "sdpa",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_checkpointing": "false",
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.001,
        "report_to": "none",
        "use_cpu": "true",
        "add_version": "false",
        "dataloader_num_workers": 0,
        "output_dir": folder / "out",
    }
    command = [f"--{name}={value}" for name, value in options.items()]
    command += ["--target_modules", "q_proj", "v_proj", "--target_parameters", *EXPERTS]
    environment = {}
    if section is not None:
        plugin = ROOT / "moe_finetune" / "integrations" / "swift" / "plugin.py"
        command += ["--external_plugins", str(plugin), "--callbacks", "specialization"]
        environment["SPECIALIZATION"] = yaml.safe_dump(section)
    return ["swift.cli.sft", *command], environment, f"out/checkpoint-{STEPS}"


HOSTS = {host.__name__: host for host in (axolotl, llamafactory, swift)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    pairs = [(f"Add {i} and {i + 3}.", f"It is {2 * i + 3}." + "!" * (i % 5)) for i in range(24)]
    chat = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in pairs]
    (folder / "rows.json").write_text(json.dumps(alpaca))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "base", num_hidden_layers=2)


def environment_of(host):
    folder = Path(os.environ.get("HOSTS", ROOT / "build" / "integrations")) / host
    if not folder.is_dir():
        pytest.skip(f"{host} is not installed; run make test-integrations")
    return folder


def python(packages, arguments, folder, variables=()):
    """Python with a host's packages over the environment's, without network and GPU."""
    environment = os.environ | dict(variables)
    environment |= {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    environment |= {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )


def train(host, base, data, folder, section):
    packages = environment_of(host)
    folder.mkdir()
    command, variables, adapter = HOSTS[host](base, data, folder, section)
    command = ["-m", "tests.integrations.driver", str(folder / "noted"), *command]
    done = python(packages, command, folder, variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    noted = folder / "noted"
    return Trained(
        json.loads((noted / "losses.json").read_text()),
        load_file(noted / "gradients.safetensors"),
        load_file(noted / "reference.safetensors"),
        folder / adapter,
        folder / "run",
    )


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_trains_with_the_method(host, base, data, tmp_path, capsys):
    plain = train(host, base, data, tmp_path / "plain", None)
    none = train(host, base, data, tmp_path / "none", "none")
    assert len(plain.losses) == STEPS
    # LLaMA-Factory's transformers sums over experts in another order: the last bit differs.
    assert none.losses == pytest.approx(plain.losses, rel=0 if host in EXACT else 3e-7, abs=0)
    away = max(abs(a - b) for a, b in zip(none.losses, plain.losses, strict=True))

    section = {"terms": TERMS, "output": str(tmp_path / "terms" / "run")}
    terms = train(host, base, data, tmp_path / "terms", section)
    assert terms.gradients.keys() == plain.gradients.keys() and len(terms.gradients) >= 10
    largest = 0.0
    for name, gradient in terms.gradients.items():
        wanted = plain.gradients[name]
        if name in terms.reference:
            wanted = wanted + terms.reference[name]
        error = (gradient - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)
        largest = max(largest, float(error))
        assert error < 1e-4, (name, float(error))
    assert terms.losses[1:] != plain.losses[1:]

    for adapter in (terms.adapter, terms.run):
        merged = tmp_path / f"merged-{adapter.name}"
        arguments = [str(adapter), "--base", str(base), "--output", str(merged), "--verify"]
        assert cli.main(["merge", *arguments]) == 0
        assert "verified: " in capsys.readouterr().out
    page = tmp_path / "page"
    assert cli.main(["report", str(terms.run), "--output", str(page)]) == 0
    with capsys.disabled():
        print(f"\n{host}: none differs by {away:.1e}, gradient by {largest:.1e}, merged")


KERNELS = {
    "liger_kernel.transformers.swiglu.LigerExperts": """
from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe
apply_liger_kernel_to_qwen3_moe(
    rope=False, rms_norm=False, fused_linear_cross_entropy=False, swiglu=True, model=model)
""",
    "axolotl.integrations.kernels.libs.scattermoe_lora.experts": """
from axolotl.integrations.kernels.libs.scattermoe_lora.experts import register_scattermoe_experts
register_scattermoe_experts()
model.set_experts_implementation("scattermoe")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_of_the_host_is_refused(kernel):
    """Liger's and axolotl's own calls that put their kernels on a model; neither needs a GPU."""
    script = f"""
from moe_finetune import Specialization
from tests import tiny
model = tiny.model("qwen3_moe").train()
{KERNELS[kernel]}
Specialization(model, "aux_loss").install()
"""
    done = python(environment_of("axolotl"), ["-c", script], ROOT)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("moe_finetune.errors.ForeignKernelError: layer 0: " + kernel)
