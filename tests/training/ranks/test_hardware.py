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


def test_one_process_trains_on_one_of_several_gpus(tmp_path, monkeypatch, caplog):
    """transformers counts the visible GPUs, and wraps the model in DataParallel from two on."""
    from trl import SFTConfig

    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.training.run.trainer import training_arguments

    start = SFTConfig.__post_init__

    def with_gpus(arguments):
        start(arguments)
        arguments._n_gpu = visible

    monkeypatch.setattr(SFTConfig, "__post_init__", with_gpus)
    recipe = Recipe.model_validate({"model": {"path": "x"}, "data": {"train": "x"}})
    for visible, warnings in ((1, 0), (3, 1)):  # noqa: B007
        arguments = training_arguments(recipe, tmp_path)
        assert arguments.n_gpu == 1 and arguments.train_batch_size == 8
        assert caplog.text.count("3 GPUs are visible, and one process trains") == warnings
