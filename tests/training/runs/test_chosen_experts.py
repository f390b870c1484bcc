"""``lora.experts: {top: ...}``: the run measures which experts its rows use, once."""

import json
import math
import shutil

import pytest
import torch

from moe_finetune import cli
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.experts.lora_on_chosen import selected_experts
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.run import plan_run, run_recipe
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.memory.plan import plan_recipe
from moe_finetune.training.run import chosen_experts as measuring
from moe_finetune.training.run.train import KeepSteps
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("warm")
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    """A recipe file, of other rows a stage."""

    def make(stage="sft", **experts):
        rows = {
            "sft": [{"prompt": f"{n} and", "completion": f" then {n * n}."} for n in range(23)],
            "dpo": [
                {"prompt": f"{n}?", "chosen": f" {n * n}", "rejected": " no"} for n in range(9)
            ],
            "grpo": [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(9)],
        }[stage]
        data = tmp_path / f"{stage}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        document = {
            "stage": stage,
            "model": {"path": str(tiny_checkpoint("qwen3_moe")), "dtype": "float32"},
            "method": "none",
            "lora": {"rank": 4, "alpha": 8, "experts": experts},
            "data": {"train": str(data), "max_length": 60},
            "trainer": {
                "max_steps": 4,
                "save_steps": 2,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-2,
                "report_to": "none",
                **({"num_generations": 2, "max_completion_length": 8} if stage == "grpo" else {}),
            },
            **({"rewards": ["exact_match"]} if stage == "grpo" else {}),
        }
        file = tmp_path / f"{stage}.yaml"
        file.write_text(json.dumps(document))
        return file

    return make


def counted(folder, rows):
    """Tokens of each expert, and their weight, by layer: one row at a time, transformers alone."""
    model = load_model(folder, dtype="float32")
    layers = open_checkpoint(folder).places.moe_layers
    counts, weights = torch.zeros(2, len(layers), 12, dtype=torch.float64)
    seen = []
    hooks = [
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _, __, output: seen.append(output[1:])
        )
        for layer in layers
    ]
    for ids in rows:
        seen.clear()
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
        for row, (weights_TK, index_TK) in enumerate(seen):
            counts[row] += torch.bincount(index_TK.flatten(), minlength=12)
            weights[row] += torch.bincount(
                index_TK.flatten(), weights_TK.flatten().double(), minlength=12
            )
    for hook in hooks:
        hook.remove()
    return counts, weights


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
def test_the_most_used_experts_of_the_training_rows_are_chosen(stage, recipe, tiny_checkpoint):
    """Of preferences prompt and chosen answer count, of prompts themselves."""
    inputs = prepare(load_recipe(recipe(stage, top=0.3)))
    rows = [row["input_ids"] for row in measuring.training_rows(inputs)]
    tokenizer = inputs.start.tokenizer
    texts = sorted(tokenizer.decode(ids) for ids in rows)
    assert len(rows) == len(inputs.train)
    if stage == "grpo":
        assert texts[0] == "0 + 1 ="
    elif stage == "dpo":
        assert texts[2].startswith("2? 4") and not any("no" in text for text in texts)
    folder = tiny_checkpoint("qwen3_moe")
    model = load_model(folder, dtype="float32")
    selection = measuring.measure(model, inputs, inputs.start.recipe.lora.experts)
    counts, weights = counted(folder, rows)
    expected = counts.sort(dim=1, descending=True, stable=True).indices[:, : math.ceil(0.3 * 12)]
    assert [ids for _, ids in sorted(selection.experts.items())] == expected.tolist()
    share = (weights.gather(1, expected).sum(1) / weights.sum(1)).mean()
    assert selection.weight_share == pytest.approx(float(share), rel=1e-5)
    assert 0.3 < selection.weight_share < 0.95
    assert selection.tokens == sum(map(len, rows))


def test_the_choice_is_written_and_read_at_resume(recipe, tmp_path, capsys, monkeypatch):
    file, whole, halted = recipe(top=0.25), tmp_path / "whole", tmp_path / "halted"
    assert cli.main(["train", str(file), "--output", str(whole)]) == 0
    printed = capsys.readouterr()
    chosen = ExpertSelection.read(whole / "experts.json")
    assert {len(ids) for ids in chosen.experts.values()} == {3} and chosen.top == 0.25
    carried = f"they carry {chosen.weight_share:.0%} of the routing weight"
    assert "9 of 36 experts get LoRA" in printed.err + printed.out
    page = (whole / "report" / "index.html").read_text()
    assert carried in page.replace("\xa0", " ")
    metadata = json.loads((whole / "adapter" / "moe_finetune.json").read_text())
    assert metadata["chosen_experts"] == {str(k): v for k, v in chosen.experts.items()}

    class Halted(Exception):
        pass

    measured = []
    plain = measuring.measure

    def counting(*arguments):
        measured.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(measuring, "measure", counting)

    def halt(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise Halted

    monkeypatch.setattr(KeepSteps, "on_step_end", halt)
    with pytest.raises(Halted):
        run_recipe(load_recipe(file), halted)
    monkeypatch.undo()
    monkeypatch.setattr(measuring, "measure", counting)
    run_recipe(load_recipe(file), halted, resume=True)
    assert len(measured) == 1
    assert (halted / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()


def test_a_run_that_goes_on_without_its_choice_is_refused(recipe, tmp_path, capsys):
    file, run = recipe(top=0.25), tmp_path / "run"
    assert cli.main(["train", str(file), "--output", str(run)]) == 0
    (run / "experts.json").unlink()
    for part in ("adapter", "merged"):
        shutil.rmtree(run / part)
    with pytest.raises(CheckpointError, match=r"experts\.json: is missing"):
        run_recipe(load_recipe(file), run, resume=True)


def test_random_experts_are_as_many_and_others_by_seed(recipe):
    inputs = prepare(load_recipe(recipe(top=0.3, by="random")))
    model = load_model(inputs.start.folder, dtype="float32")
    options = inputs.start.recipe.lora.experts
    one = measuring.measure(model, inputs, options)
    assert one.experts == measuring.measure(model, inputs, options).experts
    assert {len(ids) for ids in one.experts.values()} == {4}
    assert one.score == "random" and one.weight_share < 0.9
    inputs.start.recipe.trainer["seed"] = 7
    assert measuring.measure(model, inputs, options).experts != one.experts


def test_the_plan_has_as_many_experts_as_the_run(recipe, tmp_path):
    """``top`` counts in the plan; ``top_p`` is all until it is measured."""
    planned, trained = {}, {}
    for name, experts in (("top", {"top": 0.25}), ("top_p", {"top_p": 0.3}), ("all", {"top": 1})):
        file = recipe(**experts)
        inputs = plan_run(load_recipe(file), tmp_path / name)
        planned[name] = inputs.memory.stored.adapter
        trained[name] = inputs.coverage.total.trained_parameters
    assert trained["top"] < trained["top_p"] == trained["all"]
    assert planned["top"] < planned["top_p"] == planned["all"]
    made = load_recipe(recipe(top_p=0.3))
    config = inputs.start.config
    chosen = {0: [1, 2], 1: [5], 2: [7, 9, 3]}
    again = plan_recipe(config, made, "cpu", chosen=chosen)
    assert again.stored.adapter < planned["top_p"]


def test_what_cannot_be_measured_is_refused(recipe, tmp_path, monkeypatch):
    for override, words in (
        ("parallel.experts=2", "select TRACE --top 25%"),
        ("model.offload=experts", "select TRACE --top 25%"),
        ("lora.experts={top: 0.2, top_p: 0.3}", "one of top, top_p and file"),
        ("lora.experts={by: random, top: null, top_p: 0.3}", "random needs top"),
        ("lora.experts={top: 1.5}", "less than or equal to 1"),
        ("lora.experts={topp: 0.5}", "topp"),
    ):
        with pytest.raises(RecipeError, match=r"lora\.experts") as refused:
            load_recipe(recipe(top=0.3), [override])
        assert words in str(refused.value)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RecipeError, match="FSDP divides"):
        plan_run(load_recipe(recipe(top=0.3)), tmp_path / "run")
    section = LoraSection(rank=4, experts={"top": 0.3})
    with pytest.raises(RecipeError, match="measured by a run only"):
        add_lora(tiny.model("qwen3_moe"), section, "frozen")
    assert LoraSection(rank=4, experts={"file": "a.json"}).experts == "a.json"
    placed = add_lora(tiny.model("qwen3_moe").to("meta"), section, "frozen")
    assert {len(ids) for ids in selected_experts(placed).values()} == {4}
