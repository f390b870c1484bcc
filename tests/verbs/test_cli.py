import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from moe_finetune import cli
from moe_finetune.cli.doctor import Check
from moe_finetune.integrations import llamafactory
from tests.checkpoint.helpers import adapter as random_adapter
from tests.support import tiny

VERBS = sorted(command.name or command.callback.__name__ for command in cli.app.registered_commands)


def run(capsys, *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example_that_parses(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    example = " ".join(out.partition("Example: ")[2].partition("\n\n")[0].split())
    assert example.startswith(f"moe-finetune {verb} ")
    for option in [word for word in example.split() if word.startswith("--")]:
        assert out.count(option) >= 2, f"{option} of the example is not an option of {verb}"


def test_every_option_says_what_it_is():
    commands = typer.main.get_command(cli.app).commands
    assert sorted(commands) == VERBS
    for verb, command in commands.items():
        assert all(parameter.help for parameter in command.params), verb


@pytest.mark.parametrize("verb", ["merge", "study"])
def test_several_processes_do_not_do_the_work_of_one(capsys, monkeypatch, tmp_path, verb):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = run(capsys, "--quiet", verb, "x", "--output", tmp_path / "made")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith(f"error: {verb}: was started as one of 2 processes")
    assert run(capsys, verb, "--help")[0] == 0


def test_help_lists_the_verbs_and_imports_nothing_heavy():
    heavy = ["torch", "transformers", "peft", "trl", "vllm", "lm_eval", "datasets", "pydantic"]
    code = (
        "import sys; from moe_finetune.cli import main; main(['--help']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == "[]"
    for verb in VERBS:
        assert f"\n  {verb} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "Did you mean 'train'"),
        (["train"], "Missing argument"),
        (["train", "x.yaml"], "--output"),
        (["train", "x.yaml", "--output", "o", "--resum"], "--resum"),
        (["eval", "m", "--suite", "s", "--output", "o", "--backend", "vlm"], "vlm"),
        (["train", "nowhere.yaml", "--output", "o"], "error: there is no recipe file nowhere.yaml"),
        (["inspect", "./nowhere"], "nowhere"),
        (
            ["select", "nowhere", "--output", "o.json"],
            "nowhere: no trace found; give a trace folder or an",
        ),
        (["select", "nowhere", "--top-p", "1.5", "--output", "o.json"], "--top-p 1.5: must be"),
        (["report", "nowhere"], "nowhere"),
        (["merge", "nowhere", "--output", "o"], "nowhere"),
        (["convert", "./nowhere", "--output", "o"], "nowhere"),
    ],
)
def test_wrong_input_is_exit_code_2_with_a_message(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2, err
    assert said in err and "Traceback" not in err and not out
    assert not list(tmp_path.iterdir()), "nothing may be written"


def test_version(capsys):
    import importlib.metadata

    code, out, _ = run(capsys, "--version")
    assert code == 0 and out == f"moe-finetune {importlib.metadata.version('moe-finetune')}\n"


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "moe_finetune", "eval", "--no-such-option"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "--no-such-option" in result.stderr


def test_debug_shows_where_it_was_raised(capsys):
    with pytest.raises(cli.MoeFinetuneError):
        cli.main(["train", "nowhere.yaml", "--output", "o", "--debug"])


def in_folder_with_inputs(monkeypatch, folder):
    """Work in ``folder``, where the checkpoint ``m`` and the rows ``d.jsonl`` exist."""
    (folder / "m").mkdir()
    (folder / "d.jsonl").write_text('{"text": "a b"}\n')
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 1)],
)
def test_interruption_and_failures_of_the_machine(capsys, monkeypatch, tmp_path, raised, code):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\ndata: {train: d.jsonl}\n")
    in_folder_with_inputs(monkeypatch, tmp_path)

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("moe_finetune.run.run_recipe", fail)
    found, _, err = run(capsys, "train", recipe, "--output", tmp_path / "o")
    assert found == code and "Traceback" not in err
    assert err.count("interrupted") == (code == 130)
    assert "nothing was written; repeat the command" in err
    assert ("free some space" in err) == (code == 1)


def test_an_interrupt_that_has_said_how_to_go_on_is_not_said_again(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt("saved; repeat the command")  # as training says it

    monkeypatch.setattr("moe_finetune.training.before.inspect_checkpoint.inspect_dense", stop)
    assert run(capsys, "inspect", "x") == (130, "", "")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("model: {path: m}\ndata: {train: d.jsonl}\nmethod: erc\n", "sft of m on d.jsonl with erc"),
        ("model: m\nmethod: {preset: dpp}\ntrainer: 3\n", "sft of m on no data with dpp"),
        ("stage: dpo\nmodel: m\nmethod: none\n", "dpo of m on no data with no added losses"),
        ("model: m\nmethod: {terms: {erc: {}}}\n", "sft of m on no data with its own terms"),
    ],
)
def test_a_run_says_what_it_is_before_anything_is_checked(capsys, tmp_path, recipe, said):
    file = tmp_path / "r.yaml"
    file.write_text(recipe + "nonsense: 1\n")
    code, _, err = run(capsys, "train", file, "--output", tmp_path / "o")
    first, second = err.splitlines()[:2]
    assert code == 2 and first == f"train: {said} -> {tmp_path / 'o'}"
    assert second.startswith("error: ")


def test_train_hands_over_the_merged_recipe(capsys, monkeypatch, tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b=c.yaml"
    first.write_text("model: {path: m}\ndata: {train: d.jsonl}\n")
    second.write_text("method: erc\n")
    in_folder_with_inputs(monkeypatch, tmp_path)
    (tmp_path / "o").mkdir()
    seen = {}

    def keep(recipe, output, resume=False, ignore_memory=False):
        seen.update(recipe=recipe, output=output, resume=resume)
        return output

    monkeypatch.setattr("moe_finetune.run.run_recipe", keep)
    monkeypatch.setattr(
        "moe_finetune.report.end_of_run.end_run", lambda *ended: seen.update(ended=ended)
    )
    arguments = [first, second, "trainer.max_steps=5", "--output", tmp_path / "o", "--resume"]
    assert run(capsys, "train", *arguments)[0] == 0
    assert seen["recipe"].method.preset == "erc" and seen["recipe"].trainer == {"max_steps": 5}
    assert seen["resume"] is True and seen["output"] == tmp_path / "o"
    assert seen["ended"][0] == {"after": tmp_path / "o"}


# -- merge, permute ---------------------------------------------------------------------------


@pytest.fixture
def adapter(tiny_checkpoint, tmp_path) -> Path:
    return random_adapter(tiny_checkpoint("olmoe"), tmp_path / "run" / "adapter")


def test_merge_takes_a_run_or_an_adapter(capsys, adapter, tmp_path):
    code, out, err = run(capsys, "merge", adapter.parent, "--output", tmp_path / "a", "--verify")
    assert code == 0, err
    assert "tensors changed" in out and "verified: " in out
    code, _, err = run(capsys, "merge", adapter, "--output", tmp_path / "b")
    assert code == 0, err
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    code, _, err = run(capsys, "merge", adapter, "--output", tmp_path / "b")
    assert code == 2 and str(tmp_path / "b") in err
    # One that was interrupted while it was verified can be verified.
    code, out, err = run(capsys, "merge", adapter, "--output", tmp_path / "b", "--verify")
    assert code == 0 and "is verified, and not written again" in out and "verified: " in out
    # A check that fails is not wrong input.
    weights = tmp_path / "b" / name
    weights.write_bytes(weights.read_bytes()[:-8] + (tmp_path / "a" / name).read_bytes()[-16:-8])
    code, _, err = run(capsys, "merge", adapter, "--output", tmp_path / "b", "--verify")
    assert code == 1 and "error: " in err
    code, out, _ = run(capsys, "merge", adapter, "--output", tmp_path / "c", "--dry-run")
    assert code == 0 and "q_proj" in out and not (tmp_path / "c").exists()


def test_merge_names_the_base_that_is_missing(capsys, adapter, tmp_path):
    config = adapter / "adapter_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"base_model_name_or_path": None}))
    code, _, err = run(capsys, "merge", adapter, "--output", tmp_path / "o")
    assert code == 2 and "--base" in err
    config.write_text(json.dumps(content))
    code, _, err = run(capsys, "merge", adapter, "--base", tmp_path / "gone", "--output", "o")
    assert code == 2 and "gone" in err


# -- inspect ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_inspect_states_the_facts_of_a_checkpoint(capsys, tiny_checkpoint, family):
    folder = tiny_checkpoint(family)
    code, out, err = run(capsys, "inspect", folder, "--json")
    assert code == 0, err
    facts = json.loads(out)
    config = tiny.config(family)
    dense = getattr(config, "first_k_dense_replace", 0)
    assert facts["family"] == family and facts["model_type"] == config.model_type
    assert facts["moe_layers"] == list(range(dense, 3))
    assert (facts["experts"], facts["top_k"], facts["hidden"], facts["expert_width"]) == (
        12,
        3,
        192,
        48,
    )
    assert facts["shared_experts"] == (3 if dense else 0)
    model = tiny.model(family)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    idle = (3 - dense) * (12 - 3) * 3 * 48 * 192
    assert facts["active_parameters"] == facts["parameters"] - idle
    assert facts["stored_dtypes"] == ["F32"]
    buffers = sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    assert facts["stored_bytes"] == 4 * (facts["parameters"] + buffers)
    assert facts["memory"] is None and facts["coverage"]["total"]["trained_tensors"] == 0


def test_inspect_with_a_recipe_shows_coverage_and_memory(capsys, tiny_checkpoint, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {path: m, dtype: float32}\nlora: {rank: 4, alpha: 8}\nrouter: {train: frozen}\n"
        "data: {train: d.jsonl, max_length: 100}\n"
        "trainer: {per_device_train_batch_size: 3, gradient_checkpointing: false}\n"
    )
    folder = tiny_checkpoint("qwen3_moe")
    code, out, _ = run(capsys, "inspect", folder, "--recipe", recipe, "--json")
    facts = json.loads(out)
    total, memory = facts["coverage"]["total"], facts["memory"]
    assert code == 0 and total["trained_tensors"] == 2 * (12 + 6)
    assert memory["weights"] == 4 * facts["parameters"]
    assert memory["adapter"] == 4 * total["trained_parameters"]
    assert memory["all_states"] == 2 * memory["all_gradients"] == 8 * total["trained_parameters"]
    assert memory["tokens"] == 300
    # Each of three layers keeps at least gate, up and output rows of 3 experts a token.
    assert memory["activations"] > 3 * 300 * 3 * (2 * 48 + 192) * 4
    parts = ("weights", "second", "adapter", "optimizer", "step")
    assert memory["total"] == sum(memory[part] for part in parts)
    code, out, _ = run(capsys, "inspect", folder, "--recipe", recipe)
    assert "routed experts" in out and "memory on one GPU" in out and "300 tokens" in out


# -- select -----------------------------------------------------------------------------------


def test_select_writes_a_selection_file(capsys, tmp_path):
    generator = np.random.default_rng(0)
    ids = generator.permuted(np.tile(np.arange(8, dtype=np.int16), (50, 2, 1)), axis=-1)[..., :3]
    weights = generator.random(ids.shape, dtype=np.float32)
    trace = tmp_path / "trace.npz"
    np.savez(trace, ids=ids, weights=weights, seq=np.zeros(50, np.int64))
    code, out, err = run(capsys, "select", trace, "--output", tmp_path / "s.json", "--top-p", "0.3")
    assert code == 0, err
    chosen = json.loads((tmp_path / "s.json").read_text())["experts"]
    assert sorted(chosen) == ["1", "2"] and "2 layers" in out and out.startswith("domains: ")
    counts = np.bincount(ids[:, 0].ravel(), minlength=8)
    assert counts[chosen["1"]].min() >= np.delete(counts, chosen["1"]).max()


# -- compare --------------------------------------------------------------------------------


def test_an_output_that_is_a_file_is_called_one(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\ndata: {train: d.jsonl}\n")
    code, _, err = run(capsys, "train", recipe, "--dry-run", "--output", recipe)
    assert code == 2 and f"error: {recipe}: is a file, not a folder; choose another" in err


def test_compare_refuses_one_result_and_odd_names(capsys, tmp_path):
    code, _, err = run(capsys, "compare", tmp_path)
    assert code == 2 and "at least two" in err
    code, _, err = run(capsys, "compare", tmp_path, tmp_path, "--output", tmp_path / "c.pdf")
    assert code == 2 and ".html or .json" in err


# -- doctor -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_doctor_says_what_is_there_and_what_to_do(capsys, monkeypatch, state, code):
    checks = [Check("a", "ok", "fine"), Check("bcd", state, "found", "mend it")]
    monkeypatch.setattr("moe_finetune.cli.doctor.examine", lambda fix: checks)
    found, out, _ = run(capsys, "doctor")
    assert found == code and ("PROBLEM  bcd" in out) == (code == 1) and "-> mend it" in out
    assert json.loads(run(capsys, "doctor", "--json")[1])["healthy"] == (code == 0)


@pytest.mark.slow
def test_doctor_runs_where_transformers_cannot_be_imported(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    result = subprocess.run(
        [sys.executable, "-m", "moe_finetune.cli", "doctor", "--json"],
        capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert "torchvision::nms" in checks["import transformers"]["found"]
    assert "doctor --fix" in checks["import transformers"]["remedy"]
    assert checks["torch"]["state"] == "ok"


def test_report_draws_runs_under_labels(capsys, tmp_path):
    from tests.report.folders import write_run

    runs = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    code, _, err = run(capsys, "report", *runs, "--labels", "one", "-o", tmp_path / "page")
    assert code == 2 and "1 label for 2 runs" in err
    code, _, _ = run(capsys, "report", *runs, "--labels", "x,y", "-o", tmp_path / "page.html")
    assert code == 0 and "y against x" in (tmp_path / "page.html").read_text()


def test_merge_writes_the_bias_that_was_trained(capsys, tmp_path, tiny_checkpoint):
    import torch
    from safetensors.torch import load_file

    from moe_finetune.checkpoint.adapters.files import BIAS_FILE
    from moe_finetune.training.save_and_resume.state_files import save_state

    bias = {f"bias.{layer}": torch.rand(12) for layer in (1, 2)}
    folders = {}
    for family in ("deepseek_v3", "olmoe"):
        folders[family] = random_adapter(tiny_checkpoint(family), tmp_path / family)
        save_state(folders[family] / BIAS_FILE, bias)
    code, out, err = run(
        capsys, "merge", folders["deepseek_v3"], "--output", tmp_path / "m", "--verify"
    )
    assert code == 0 and "verified" in out, err
    merged = load_file(tmp_path / "m" / "model.safetensors")
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        torch.testing.assert_close(merged[name], bias[f"bias.{layer}"])
    code, _, err = run(capsys, "merge", folders["olmoe"], "--output", tmp_path / "o")
    assert code == 2 and "cannot store a routing bias; leave it out" in err
    code, _, _ = run(capsys, "merge", folders["olmoe"], "--output", tmp_path / "o", "--drop-bias")
    assert code == 0


def test_secrets_among_overrides_are_not_repeated(tmp_path, capsys):
    argv = ["train", "recipes/methods/erc.yaml", "-o", str(tmp_path / "out")]
    token = "hf_" + "ABCDEFGHIJKLMNOPQ" * 2
    assert cli.main([*argv, "model.hf_token=abcdefghij", f"lora.rank={token}"]) == 2
    printed = "".join(capsys.readouterr())
    assert "override 'model.hf_token=***': model.hf_token: unknown key" in printed
    assert "abcdefghij" not in printed and "ABCDEFGHIJKL" not in printed


def test_an_error_repeats_paths_that_look_a_little_like_secrets(tmp_path, capsys):
    """``hf_models`` and ``sk-learn-mix`` are folders, and ``tokenizer`` is no token."""
    checkpoint = tmp_path / "hf_models" / "sk-learn-mix"
    assert cli.main(["inspect", str(checkpoint)]) == 2
    assert f"no checkpoint folder {checkpoint}\n" in capsys.readouterr().err
    argv = ["train", "recipes/methods/erc.yaml", "-o", str(tmp_path / "out")]
    assert cli.main([*argv, "data.tokenizer=hf_models/x"]) == 2
    assert "override 'data.tokenizer=hf_models/x': " in capsys.readouterr().err


@pytest.mark.parametrize("streams", ["out", "both"])
def test_a_closed_pipe_does_not_end_the_work(tmp_path, streams):
    """``train ... | head -1``, and with ``2>&1``: the work goes on."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from moe_finetune.cli.pipes import outlive_readers\n"
        "outlive_readers()\n"
        "for step in range(20000):\n"
        "    print('step', step)\n"
        "    print('log', step, file=sys.stderr) if 'both' in sys.argv else None\n"
        "Path(sys.argv[1]).write_text('whole')\n"
    )
    file = tmp_path / "result"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file), streams],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if streams == "both" else subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() in ("step 0\n", "log 0\n")
    process.stdout.close()
    said = process.stderr.read() if streams == "out" else ""
    assert process.wait(60) == 0 and file.read_text() == "whole" and said == ""


def test_llama_factorys_program_without_a_config_says_how_it_is_called(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llamafactory"])
    assert llamafactory.main() == 2
    assert (
        "usage: python -m moe_finetune.integrations.llamafactory CONFIG" in capsys.readouterr().out
    )
