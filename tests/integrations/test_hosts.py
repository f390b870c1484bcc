"""Hosts train a tiny Qwen3-MoE by their own commands, without and with the method.

``make test-integrations`` installs each host's pinned versions below ``build/integrations`` and
runs these tests; without that they are skipped.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from moe_finetune import cli
from tests.conftest import ROOT
from tests.integrations.driver import ACCUMULATION, TERMS
from tests.integrations.environments import environment_of, python
from tests.support import tiny

PAGE = (ROOT / "docs" / "other-trainers.md").read_text(encoding="utf-8")
STEPS = 3
TRAINED = {"axolotl": 28, "llamafactory": 18, "swift": 28}
"""Tensors that the page's configs train in two layers: 4 attention modules, experts, router."""


def on_page(heading: str, language: str) -> str:
    """The code block of this language below a heading of docs/other-trainers.md."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return block


@dataclass
class Trained:
    """What a host's training left."""

    losses: list[float]
    gradients: dict
    reference: dict
    adapter: Path
    run: Path


# Each function takes the page's config and replaces what names the model and the data, the number
# of steps, and what needs a GPU.


def axolotl(base, data, folder, section):
    config = yaml.safe_load(on_page("axolotl", "yml"))
    config["base_model"] = str(base)
    config["datasets"][0]["path"] = str(data / "rows.jsonl")
    config["specialization"] = section
    config |= {
        "chat_template": "tokenizer_default",
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "logging_steps": 1,
        "bf16": False,
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
    }
    if section is None:
        del config["plugins"], config["specialization"]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["axolotl.cli.main", "train", str(path), "--launcher", "python"], {}, "out"


def llamafactory(base, data, folder, section):
    config = yaml.safe_load(on_page("LLaMA-Factory", "yml"))
    config |= {
        "specialization": section,
        "model_name_or_path": str(base),
        "dataset_dir": str(data),
        "output_dir": str(folder / "out"),
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "logging_steps": 1,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    path = folder / "config.yaml"
    if section is None:
        del config["specialization"]
    path.write_text(yaml.safe_dump(config))
    if section is None:
        return ["llamafactory.cli", "train", str(path)], {}, "out"
    return ["moe_finetune.integrations.llamafactory", str(path)], {}, "out"


def swift(base, data, folder, section):
    script = on_page("ms-swift", "bash").replace("\\\n", " ")
    plugin = ROOT / "moe_finetune" / "integrations" / "swift" / "plugin.py"
    (program,) = re.findall(r"\$\(python -c '(.*?)'\)", script)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    command = shlex.split(re.sub(r"\$\(.*?\)(?=/swift)", printed.stdout.strip(), script))
    command = command[command.index("sft") + 1 :]
    assert str(plugin) in command
    for option, value in (("--model", base), ("--dataset", data / "rows.jsonl")):
        command[command.index(option) + 1] = str(value)
    options = {
        "model_type": "qwen3_moe",
        "template": "qwen3",
        "split_dataset_ratio": 0,
        "lora_dropout": 0,
        "torch_dtype": "float32",
        "bf16": "false",
        "fp16": "false",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": "true",
        "add_version": "false",
        "dataloader_num_workers": 0,
        "output_dir": folder / "out",
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    if section is None:
        command[command.index("--callbacks") : command.index("--callbacks") + 2] = []
    return (
        ["swift.cli.sft", *command],
        {"SPECIALIZATION": yaml.safe_dump(section)},
        f"out/checkpoint-{STEPS}",
    )


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
    (folder / "dataset_info.json").write_text(json.dumps({"my_rows": {"file_name": "rows.json"}}))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "base", num_hidden_layers=2)


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


def furthest(gradients, expected):
    """The largest difference of a tensor over the tensor's largest value."""
    assert gradients.keys() == expected.keys()
    return max(
        float((gradient - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-6))
        for name, gradient in gradients.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_a_host_trains_with_the_method(host, base, data, tmp_path, capsys):
    plain = train(host, base, data, tmp_path / "plain", None)
    none = train(host, base, data, tmp_path / "none", "none")
    assert len(plain.losses) == STEPS and len(plain.gradients) == TRAINED[host]
    # Before any weight has moved, the forward is the same to the last bit. After that, gradients
    # that were summed in another order may turn the last bit of a loss.
    assert none.losses[0] == plain.losses[0]
    ulps = [
        abs(a - b) / float(np.spacing(np.float32(b)))
        for a, b in zip(none.losses, plain.losses, strict=True)
    ]
    assert max(ulps) <= 1
    rounding = furthest(none.gradients, plain.gradients)
    assert rounding < 1e-6

    section = {"terms": TERMS, "output": str(tmp_path / "terms" / "run")}
    terms = train(host, base, data, tmp_path / "terms", section)
    expected = dict(plain.gradients)
    for name, gradient in terms.reference.items():
        expected[name] = expected[name] + gradient
    largest = furthest(terms.gradients, expected)
    assert largest < 1e-4
    assert terms.losses[1:] != plain.losses[1:]

    for adapter in (terms.adapter, terms.run):
        merged = tmp_path / f"merged-{adapter.name}"
        arguments = [str(adapter), "--base", str(base), "--output", str(merged), "--verify"]
        assert cli.main(["merge", *arguments]) == 0
        assert "verified: " in capsys.readouterr().out
    page = tmp_path / "page"
    assert cli.main(["report", str(terms.run), "--output", str(page)]) == 0
    with capsys.disabled():
        print(
            f"\n{host}: none differs by {max(ulps):g} ulp, its gradient by {rounding:.1e}; with "
            f"terms the gradient differs by {largest:.1e}; merged"
        )


@pytest.mark.slow
@pytest.mark.parametrize("host", ["llamafactory", "swift"])
def test_a_hosts_reentrant_checkpointing_is_refused(host, base, data, tmp_path):
    """Their default on one process, which their checkpoint functions' arguments do not show."""
    section = {"preset": "specialization_coupling"}
    command, variables, _ = HOSTS[host](base, data, tmp_path, section)
    if host == "swift":
        at = command.index("--gradient_checkpointing_kwargs")
        del command[at : at + 2]
    else:
        config = yaml.safe_load(Path(command[1]).read_text())
        del config["use_reentrant_gc"]
        Path(command[1]).write_text(yaml.safe_dump(config))
    done = python(environment_of(host), ["-m", *command], tmp_path, variables)
    assert done.returncode != 0
    assert "reentrant gradient checkpointing gives wrong gradients" in done.stderr


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
from tests.support import tiny
model = tiny.model("qwen3_moe").train()
{KERNELS[kernel]}
Specialization(model, "aux_loss").install()
"""
    done = python(environment_of("axolotl"), ["-c", script], ROOT)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("moe_finetune.errors.ForeignKernelError: layer 0: " + kernel)
