"""Files that start a run on several nodes: what they run is a launch of a recipe that can start."""

import json
import os
import subprocess

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from typer.testing import CliRunner

from moe_finetune.cli.app import app
from tests.conftest import ROOT
from tests.support import tiny

LAUNCH = ROOT / "recipes" / "launch"
# The launchers' part: of the second of two nodes.
GIVEN = {
    "slurm.sbatch": {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"},
    "skypilot.yaml": {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "n1\nn2",
    },
    "kubernetes.yaml": {"JOB_COMPLETION_INDEX": "1"},
}
STUBS = {
    "accelerate": '[ "$1" = launch ]; printf "%s\\0" "$@" > "$WORDS"',
    "scontrol": "printf 'n1\\nn2\\n'",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
}


def script_of(file) -> tuple[str, dict[str, str]]:
    """The shell script inside ``file``, and the variables that it sets for it."""
    if file.suffix == ".sbatch":
        return file.read_text(), {}
    documents = list(yaml.safe_load_all(file.read_text()))
    if file.stem == "skypilot":
        return "set -eu\n" + documents[0]["run"], documents[0]["envs"]
    container = documents[1]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:2] == ["bash", "-euc"]
    return "set -eu\n" + container["command"][2], {e["name"]: e["value"] for e in container["env"]}


def test_every_launcher_is_tried():
    one_gpu = "callback_30b.py"  # runs in tests/test_launch_script.py
    assert {file.name for file in LAUNCH.iterdir()} == {*GIVEN, one_gpu, "README.md"}


@pytest.mark.parametrize("name", GIVEN)
def test_its_command_launches_a_recipe_that_can_start(name, tmp_path):
    script, variables = script_of(LAUNCH / name)
    bin_folder, words = tmp_path / "bin", tmp_path / "words"
    bin_folder.mkdir()
    for stub, body in STUBS.items():
        (bin_folder / stub).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_folder / stub).chmod(0o755)
    tiny.save("qwen3_moe", tmp_path / "model")
    turns = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    own = {
        "MODEL": str(tmp_path / "model"),
        "DATA": str(tmp_path / "rows.jsonl"),
        "RUN": str(tmp_path / "a run"),
        "WORDS": str(words),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
    }
    subprocess.run(
        ["bash", "-c", script], cwd=ROOT, check=True, env={**variables, **GIVEN[name], **own}
    )
    launched, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(words.read_text().split("\0")[1:-1])
    )
    assert launched.use_fsdp and int(launched.fsdp_version) == 2
    assert (launched.num_machines, launched.num_processes) == (2, 16)
    assert int(launched.machine_rank) == 1
    first = {"kubernetes.yaml": "moe-finetune-0.moe-finetune"}.get(name, "n1")
    assert launched.main_process_ip == first
    assert launched.module and launched.training_script == "moe_finetune.cli"
    train = [*launched.training_script_args, "evaluation=null", "--dry-run"]
    assert (tmp_path / "a run").is_dir() and "--resume" in train
    done = CliRunner().invoke(app, train)
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "a run").iterdir())


def test_slurm_starts_one_launcher_a_node_and_warns_before_the_end():
    lines = set((LAUNCH / "slurm.sbatch").read_text().splitlines())
    assert {f"#SBATCH --{option}" for option in (
        "nodes=2", "ntasks-per-node=1", "signal=TERM@300", "requeue",
    )} <= lines  # fmt: skip
