"""Stages beyond supervised fine-tuning: each through a whole run, with a method, and resumed."""

import asyncio
import json
import shutil
from functools import partial

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from moe_finetune.data.preference_and_prompt_forms import StageFormer
from moe_finetune.errors import DataError, RecipeError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.metrics.words import word
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import RewardSection
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import plan_run, run_recipe
from moe_finetune.training.memory.plan import plan_recipe
from moe_finetune.training.run.checkpoint_and_rows import open_start
from moe_finetune.training.run.train import reference_model, trainable_model
from moe_finetune.training.run.trainer import build_trainer
from moe_finetune.training.save_and_resume.training_state import checkpoints
from moe_finetune.training.stages.rewards import REWARDS, reward_functions
from tests.support import tiny

PAIRS = [
    {"prompt": f"Say {i}: ", "chosen": f"yes {i * i}", "rejected": f"no {7 - i}"} for i in range(9)
]
ROWS = {
    "sft": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS],
    "pretrain": [{"text": f"once upon a time there were {i} trees" * 4} for i in range(9)],
    "dpo": PAIRS,
    "grpo": [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(9)],
}
OWN = {
    "grpo": {"trainer": {"num_generations": 5, "max_completion_length": 11}},
}


def letters(completions, **_):
    return [sum(c.isascii() and c.isalpha() for c in text) / 12 for text in completions]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """A reward as a plugin adds it."""
    monkeypatch.setitem(REWARDS._values, "letters", letters)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3-MoE, and its tokenizer elsewhere."""
    root = tmp_path_factory.mktemp("checkpoints")
    tiny.save("qwen3_moe", root / "model")
    tiny.tokenizer().save_pretrained(root / "tokenizer")
    return root


@pytest.fixture
def made(checkpoint, tmp_path):
    """A function that makes a stage's recipe, changed by keys."""

    def make(stage: str, steps: int = 4, rows: list | None = None, **changes):
        file = tmp_path / f"{stage}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[stage]))
        trainer = {
            "max_steps": steps,
            "per_device_train_batch_size": 5 if stage == "grpo" else 3,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "save_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "report_to": [],
            **OWN.get(stage, {}).get("trainer", {}),
            **changes.pop("trainer", {}),
        }
        tree = {
            "stage": stage,
            "model": {"path": str(checkpoint / "model"), "dtype": "float32"},
            "method": {"terms": {"load_balance": {"weight": 1e-3}, "variance": {"weight": 1e-3}}},
            "lora": {"rank": 4, "alpha": 8, "dropout": 0.0},
            "data": {"train": str(file), "max_length": 96},
            "trainer": trainer,
            "export": {"verify": False},  # a merge is the same whatever trained the adapter
            **({"rewards": ["letters"]} if stage == "grpo" else {}),
        }
        return recipe_from_tree(Tree({**tree, **changes}))

    return make


def logged(output, name):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize(
    ("stage", "metric", "sign", "steps"),
    [
        ("pretrain", "loss", -1, 6),
        ("dpo", "rewards/margins", 1, 6),
        ("grpo", "reward", 1, 14),
    ],
)
def test_a_stage_trains_its_objective_improves_and_it_resumes_exactly(
    made, tmp_path, stage, metric, sign, steps
):
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join(json.dumps(row) + "\n" for row in ROWS[stage][:5]))
    data = {"train": str(tmp_path / f"{stage}.jsonl"), "max_length": 96}
    data["validation"] = str(validation)
    output = run_recipe(made(stage, steps, data=data), tmp_path / "run")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    snapshot = json.loads((output / "routing" / "after.json").read_text())
    keys = {key for row in rows for key in row} | {f"routing/{key}" for key in snapshot["metrics"]}
    assert len(keys) > 40 and [key for key in sorted(keys) if not word(key).meaning] == []
    evaluated = [row["step"] for row in rows if f"eval_{metric}" in row]
    assert evaluated == [0, steps]
    values = logged(output, metric)
    first, last = sum(values[:2]), sum(values[-2:])
    assert sign * last > sign * first
    assert len(logged(output, "losses/load_balance")) == steps
    assert all(value > 0 for value in logged(output, "losses/load_balance"))
    assert (output / "merged" / "config.json").is_file()
    assert json.loads((output / "routing" / "after.json").read_text())
    assert not [name for name in load_file(output / "adapter" / "adapter_model.safetensors")
                if ".ref." in name]  # fmt: skip
    assert f"stage: {stage}" in (output / "recipe.yaml").read_text()
    assert (output / "report" / "index.html").is_file()
    half = tmp_path / "half"
    shutil.copytree(output, half)
    for name in ("adapter", "merged", f"checkpoints/checkpoint-{steps}", "report", "summary.json"):
        target = half / name
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    run_recipe(made(stage, steps, data=data), half, resume=True)
    name = "adapter/adapter_model.safetensors"
    assert logged(half, "loss") == logged(output, "loss")
    assert (half / name).read_bytes() == (output / name).read_bytes()


def test_a_preference_without_an_adapter_has_a_model_of_its_own_to_measure_from(made, tmp_path):
    recipe = made("dpo", 3, lora=None, router={"train": "full"}, trainer={"learning_rate": 1e-4})
    output = run_recipe(recipe, tmp_path / "run")
    margins = logged(output, "rewards/margins")
    assert margins[0] == 0 and margins[-1] > 0


@pytest.mark.parametrize("targets", [[], ["attention"]])
@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_routers_that_alone_train_are_measured_from_the_same_routers(
    made, tiny_checkpoint, tmp_path, stage, targets
):
    """TRL would read them from the files, in bfloat16, and they would select other experts."""
    model = {"path": str(tiny_checkpoint("olmoe")), "dtype": "bfloat16"}
    lora = {"rank": 3, "targets": targets}
    recipe = made(stage, 1, model=model, lora=lora, router={"train": "full"}, trainer={"beta": 0.3})
    start = open_start(recipe)
    rows, reference = Dataset.from_list(ROWS[stage]), partial(reference_model, start)
    policy = trainable_model(start)
    trainer, _ = build_trainer(
        recipe, tmp_path / "run", policy, start.tokenizer, rows, None, reference
    )
    if targets:
        assert trainer.ref_model is None
        return
    weights = dict(policy.named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.float32, torch.bfloat16}
    for name, p in trainer.ref_model.named_parameters():
        assert torch.equal(p, weights.pop(name)) and p.dtype == policy.get_parameter(name).dtype
    assert not weights
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(None, "float32"), (None, "bfloat16"), ({"rank": 3, "targets": []}, "bfloat16")],
)
def test_the_plan_counts_the_bytes_of_the_reference(made, tiny_checkpoint, lora, dtype):
    """Without LoRA a bfloat16 run trains, and is measured from, float32 weights."""
    model = {"path": str(tiny_checkpoint("olmoe")), "dtype": dtype}
    recipe = made("dpo", 1, model=model, lora=lora, router={"train": "full"})
    start = open_start(recipe)
    stored = sum(parameter.nbytes for parameter in reference_model(start).parameters())
    planned = plan_recipe(start.config, recipe).stored.reference
    assert planned == pytest.approx(stored, rel=0.02)  # routers that alone train are in float32


@pytest.mark.parametrize("packed", [{"shared_outer": True}, {"experts": {"top": 0.3}}])
@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_packed_factors_are_measured_from_where_they_started(made, tmp_path, stage, packed):
    lora = {"rank": 3, "alpha": 7, **packed}
    trainer = {"beta": 0.2, **OWN.get(stage, {}).get("trainer", {})}
    without = {"merge": False, "verify": False}
    if "experts" not in packed:  # which start from nothing
        first = made(stage, 2, lora=lora, trainer=trainer, export=without)
        lora["start"] = str(run_recipe(first, tmp_path / "a") / "adapter")
    recipe = made(stage, 3, lora=lora, trainer=trainer, export=without)
    output = run_recipe(recipe, tmp_path / "b")
    measured = logged(output, "rewards/margins" if stage == "dpo" else "kl")
    assert abs(measured[0]) < 1e-6 < abs(measured[-1])
    names = load_file(output / "adapter" / "adapter_model.safetensors")
    assert [name for name in names if ".ref" in name] == []
    half = tmp_path / "half"
    shutil.copytree(output, half)
    for path in (*RunFolder(half).weights, half / "checkpoints" / "checkpoint-3"):
        shutil.rmtree(path, ignore_errors=True)
    run_recipe(recipe, half, resume=True)
    name = "adapter/adapter_model.safetensors"
    assert (half / name).read_bytes() == (output / name).read_bytes()


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": []}], ids=["all", "routers"])
@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_a_reference_that_follows_the_policy_is_resumed(made, checkpoint, tmp_path, stage, lora):
    """It is neither the base nor the policy: each time it moves by a share of the difference."""
    keys = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.4}
    trainer = {"learning_rate": 1e-3, "beta": 0.2, "gradient_accumulation_steps": 1, **keys}
    recipe = made(
        stage, 5, lora=lora, router={"train": "full"}, export={"merge": False, "verify": False},
        trainer={**OWN.get(stage, {}).get("trainer", {}), **trainer},
    )  # fmt: skip
    output = run_recipe(recipe, tmp_path / "run")
    half = tmp_path / "half"
    shutil.copytree(output, half)
    newest, earlier = checkpoints(half / "checkpoints")
    assert newest.name == "checkpoint-5"
    shutil.rmtree(newest)
    reference = load_file(earlier / "trainer" / "reference.safetensors")
    base, policy = (
        load_file(folder / "model.safetensors") for folder in (checkpoint / "model", earlier)
    )
    name = "model.layers.1.mlp.gate.weight"
    for other in (base, policy):
        assert not torch.equal(reference[name], other[name])
    for path in RunFolder(half).weights:
        shutil.rmtree(path, ignore_errors=True)
    run_recipe(recipe, half, resume=True)
    for name in ("loss", "grad_norm"):
        assert len(logged(half, name)) == 5 and logged(half, name) == logged(output, name)
    one, other = (load_file(run / "merged" / "model.safetensors") for run in (output, half))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_two_conversations_share_their_prompt():
    ask, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    other = {"role": "assistant", "content": "z"}
    row = StageFormer(STAGES["dpo"])("f", {"chosen": [ask, answer], "rejected": [ask, other]})
    assert row == {"prompt": [ask], "chosen": [answer], "rejected": [other]}


def test_columns_may_exchange_two_fields():
    columns = {"chosen": "rejected", "rejected": "chosen"}
    row = {"prompt": "a", "chosen": "worse", "rejected": "better"}
    formed = StageFormer(STAGES["dpo"], columns)("f", row)
    assert formed == {"prompt": "a", "chosen": "better", "rejected": "worse"}


def test_rows_longer_than_the_limit_are_left_out_and_counted(made, tmp_path, caplog):
    long = "long " * 40
    rows = [*PAIRS, {"prompt": long, "chosen": "a", "rejected": "b"},
            {"prompt": "a", "chosen": long, "rejected": "b"}]  # fmt: skip
    dropped = "1 row is longer than data.max_length 96 and was dropped"
    cut = "1 row is longer than data.max_length 96 and was truncated by 106 tokens in total"
    with caplog.at_level("INFO", "moe_finetune"):
        plan = plan_run(made("dpo", rows=rows), tmp_path / "run")
    assert len(plan.train) == len(PAIRS) + 1
    assert dropped in caplog.text and cut in caplog.text
    caplog.clear()
    data = {"train": str(tmp_path / "dpo.jsonl"), "max_length": 96, "overlong": "drop"}
    plan = plan_run(made("dpo", rows=rows, data=data), tmp_path / "run")
    assert len(plan.train) == len(PAIRS)
    assert "2 rows are longer than data.max_length 96 and were dropped" in caplog.text
    assert "truncated" not in caplog.text
    with pytest.raises(DataError, match=r"dpo.jsonl:10: 202 tokens"):  # with the end that TRL adds
        data = {"train": str(tmp_path / "dpo.jsonl"), "max_length": 96, "overlong": "error"}
        plan_run(made("dpo", rows=rows, data=data), tmp_path / "run")


def test_a_stage_starts_from_the_merged_checkpoint_of_another(made, tmp_path):
    first = run_recipe(made("sft", 2), tmp_path / "first")
    model = {"path": str(first / "merged"), "dtype": "float32"}
    second = run_recipe(made("dpo", 3, model=model), tmp_path / "second")
    name = "model.layers.1.mlp.gate.weight"
    before, after = (load_file(run / "merged" / "model.safetensors") for run in (first, second))
    assert not torch.equal(before[name], after[name])
    assert logged(second, "rewards/margins")[0] == 0


def test_rewards_score_texts_and_chats():
    sections = [RewardSection(name=name) for name in ("exact_match", "boxed")]
    exact, boxed = reward_functions(sections, ["prompt", "answer"])
    chat = [{"role": "assistant", "content": "it is 1,200"}]
    assert exact(completions=["#### 12", chat, "no"], answer=["12", "1200", "3"]) == [1.0, 1.0, 0.0]
    assert exact(completions=["Paris ", "Rome"], answer=["Paris", "Paris"]) == [1.0, 0.0]
    texts = [r"so \boxed{\frac{1}{2}}", r"\boxed{3}", "4"]
    assert boxed(completions=texts, answer=["0.5", "4", "4"]) == [1.0, 0.0, 0.0]


def test_a_program_is_rewarded_by_its_tests():
    (code,) = reward_functions([RewardSection(name="code")], ["prompt", "tests"])
    programs = ["```python\ndef f(x):\n    return x + 2\n```", "def f(x):\n    return x"]
    assert code(completions=programs, tests=[["assert f(1) == 3"]] * 2) == [1.0, 0.0]


def test_a_reward_names_the_field_that_is_missing():
    with pytest.raises(DataError, match=r"'exact_match' reads the field 'answer'"):
        reward_functions([RewardSection(name="exact_match")], ["prompt", "solution"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('boom')", r"failed: KeyError: 'boom' \(.*mine.py:2\)"),
        ("raise SystemExit(3)", "failed: SystemExit: 3"),
        ("pass", "returned None; it must return a list of numbers"),
        ("return [0.5]", "returned 1 numbers for 2 completions; it must return one for each"),
        (
            "return [0.5, 1e308]",
            "returned 1e.308 for the completion 'two'; it must be a number from",
        ),
        ("return [float('nan'), 1]", "returned nan for the completion 'one'; it must be a number"),
    ],
)
@pytest.mark.parametrize("way", ["def", "async def"])
def test_a_fault_of_a_reward_of_ones_own_is_said_with_its_place(monkeypatch, way, body, said):
    def of_a_plugin(body):
        code = f"{way} reward(completions, **_):\n    {body}\n"
        scope: dict = {}
        exec(compile(code, "mine.py", "exec"), scope)
        monkeypatch.setitem(REWARDS._values, "mine", scope["reward"])
        return reward_functions([RewardSection(name="mine")], ["prompt"])[0]

    reward = of_a_plugin(body)

    def call():
        found = reward(completions=["one", "two"], prompts=["a", "b"])
        return asyncio.run(found) if way == "async def" else found

    with pytest.raises(RecipeError, match=rf"rewards: 'mine' {said}"):
        call()
    reward = of_a_plugin("return [None, 2]")
    assert call() == [None, 2.0] and reward.__name__ == "reward"


@pytest.mark.parametrize("reward", [None, 0.5])
def test_rewards_that_never_differ_are_told(made, tmp_path, monkeypatch, caplog, reward):
    """The policy's gradient is 0, which no loss shows."""
    same = lambda completions, **_: [reward] * len(completions)  # noqa: E731
    monkeypatch.setitem(REWARDS._values, "same", same)
    recipe = made("grpo", 11, rewards=["same"], export={"merge": False, "verify": False})
    run_recipe(recipe, tmp_path / "run")
    told = [r.getMessage() for r in caplog.records if "nothing" in r.getMessage()]
    assert [line.partition(":")[0] for line in told] == ["step 1", "step 10"], told
    assert "num_generations" in told[1]


def test_rewards_that_differ_are_not(made, tmp_path, caplog):
    recipe = made("grpo", 2, export={"merge": False, "verify": False})
    run_recipe(recipe, tmp_path / "run")
    assert not [r for r in caplog.records if "nothing is learned" in r.getMessage()]
