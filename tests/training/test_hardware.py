"""The launch configurations are ones that accelerate launches, and do what their names say."""

import pytest

from tests.conftest import ROOT

FILES = sorted((ROOT / "recipes" / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_would_launch_it(file):
    """What ``accelerate launch`` itself checks, and which of its launchers it would take."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    train = ["-m", "moe_finetune.cli", "train", "recipe.yaml", "--output", "run"]
    ranked = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"] if "2x8" in file.stem else []
    words = ["--config_file", str(file), *ranked, *train]
    arguments, _, bf16_from_file = _validate_launch_command(
        launch_command_parser().parse_args(words)
    )
    assert arguments.module and arguments.training_script == "moe_finetune.cli"
    assert arguments.training_script_args == train[2:]
    assert arguments.mixed_precision == "bf16" and bf16_from_file
    assert arguments.use_fsdp == file.stem.startswith("fsdp2")
    assert not arguments.use_deepspeed
    processes = {"one_gpu": 1, "fsdp2_2x8gpu": 16}.get(file.stem, 8)
    assert arguments.num_processes == processes
    assert arguments.num_machines == (2 if "2x8" in file.stem else 1)
    if arguments.use_fsdp:
        assert int(arguments.fsdp_version) == 2
        assert arguments.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
