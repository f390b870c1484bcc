"""The folder that the callback leaves of somebody else's trainer is a run to every verb."""

import json

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from moe_finetune import SpecializationCallback, cli
from moe_finetune.errors import ObjectiveError, OutputExistsError
from tests.evaluation.local import write_suite
from tests.support import tiny
from tests.training.cases import arguments, collate, loaded, rows


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "base", num_hidden_layers=2)


def trainer_of(base, tmp_path, callback, model=None, **changes):
    data = {"train_dataset": rows(8), "eval_dataset": rows(5, seed=2)}
    return Trainer(
        loaded(base) if model is None else model,
        arguments(tmp_path / "theirs", logging_steps=1, eval_strategy="steps", eval_steps=1),
        data_collator=collate,
        callbacks=[callback],
        **{**data, **changes},
    )


def log_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_verb_takes_the_folder_of_a_plain_trainer(base, tmp_path, capsys):
    runs = [tmp_path / "runs" / name for name in ("none", "mine")]
    for run, method in zip(runs, ("none", "orthogonal_variance"), strict=True):
        callback = SpecializationCallback(method, output=run)
        trainer = trainer_of(base, tmp_path, callback)
        callback.attach(trainer)
        trainer.train()
        shown = capsys.readouterr().err
        assert f"routing: {run}; to draw it: moe-finetune report {run}" in shown
        assert (
            "routed experts: " in shown and "parameters train (LoRA), which change 100 %" in shown
        )
        before, after = (
            json.loads((run / "routing" / f"{name}.json").read_text())
            for name in ("before", "after")
        )
        assert before["data"] == after["data"] == "validation"
        assert before["tokens"] == sum(map(len, rows(5, seed=2)["input_ids"]))
        steps = (run / "routing" / "steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in steps] == [1, 2]
        kinds = [(row["kind"], row["step"]) for row in log_of(run)]
        assert {("train", 1), ("train", 2), ("eval", 1), ("eval", 2), ("end", 2)} == set(kinds)
        assert any("eval_routing/max_violation" in row for row in log_of(run))
    before, after = (
        json.loads((runs[1] / "routing" / f"{name}.json").read_text())
        for name in ("before", "after")
    )
    assert before["metrics"] != after["metrics"]
    assert any("losses/orthogonality" in row for row in log_of(runs[1]))
    recipe = yaml.safe_load((runs[1] / "recipe.yaml").read_text())
    assert recipe["method"]["preset"] == "orthogonal_variance" and "data" not in recipe
    assert recipe["lora"] == {"rank": 3, "alpha": 12.0}
    assert recipe["trainer"]["max_steps"] == 2 and recipe["model"]["path"] == str(base)

    merged = runs[1] / "merged"
    assert cli.main(["merge", str(runs[1]), "--output", str(merged), "--verify"]) == 0
    assert "verified: " in capsys.readouterr().out
    trained = AutoModelForCausalLM.from_pretrained(merged)
    batch = tiny.batch()
    adapted = trainer.model.eval()
    with torch.no_grad():
        close = {"rtol": 1e-4, "atol": 3e-5}
        torch.testing.assert_close(trained(**batch).logits, adapted(**batch).logits, **close)
    page = tmp_path / "page"
    assert cli.main(["report", str(tmp_path / "runs"), "--output", str(page)]) == 0
    text = next(page.rglob("*.html") if page.is_dir() else iter([page])).read_text()
    assert "orthogonal_variance" in text
    suite = write_suite(tmp_path / "suite", items=3, shots=0)
    assert cli.main(["merge", str(runs[0]), "--output", str(runs[0] / "merged")]) == 0
    for run in runs:
        evaluated = ["--suite", str(suite), "--backend", "hf", "--output", str(run / "eval")]
        assert cli.main(["eval", str(run), *evaluated]) == 0
    assert cli.main(["compare", *map(str, runs), "--output", str(tmp_path / "two.html")]) == 0


def test_trl_its_whole_model_and_a_share(base, tmp_path):
    run = tmp_path / "mine"
    terms = {"variance": {"share": 0.1}}
    trainer = SFTTrainer(
        model=loaded(base, whole=True),
        args=SFTConfig(
            output_dir=str(tmp_path / "theirs"), max_steps=2, logging_steps=1, report_to=[],
            bf16=False, use_cpu=True, save_strategy="no", router_aux_loss_coef=0.0, max_length=40,
            per_device_train_batch_size=2, gradient_accumulation_steps=2,
        ),
        train_dataset=rows(8),
        processing_class=tiny.tokenizer(),
        callbacks=[SpecializationCallback({"terms": terms}, output=run)],
    )  # fmt: skip
    trainer.train()
    assert json.loads((run / "routing" / "before.json").read_text())["data"] == "train"
    stored = AutoModelForCausalLM.from_pretrained(run / "merged").state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(stored[name], weight.cpu()), name


def test_the_folder_does_not_change_the_training(base, tmp_path):
    """Also where rows are drawn with the random numbers of training."""

    class Drawn(torch.utils.data.Dataset):
        def __init__(self):
            self.rows = rows(8)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, number):
            row = dict(self.rows[number])
            row["input_ids"] = row["input_ids"] + torch.randint(4, 260, (2,)).tolist()
            return row

    losses = []
    for name, output in (("plain", None), ("left", tmp_path / "run")):
        callback = SpecializationCallback("none", output=output)
        trainer = trainer_of(base, tmp_path / name, callback, train_dataset=Drawn())
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]


def test_where_no_tokens_are_at_hand_it_says_so(base, tmp_path, caplog):
    def stream():
        yield from rows(8)

    from datasets import IterableDataset

    run = tmp_path / "run"
    callback = SpecializationCallback("none", output=run)
    trainer = trainer_of(
        base, tmp_path, callback, train_dataset=IterableDataset.from_generator(stream)
    )
    trainer.train()  # not attached, so that the evaluation data are not known
    assert "routing before and after training is not written: the dataset is iterable" in (
        caplog.text
    )
    assert not (run / "routing" / "before.json").exists()
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def test_rows_that_only_the_collator_makes_tokens_of(base, tmp_path):
    def collate_texts(texts):
        encoded = tiny.tokenizer()([row["text"] for row in texts], return_tensors="pt")
        return {**encoded, "labels": encoded["input_ids"]}

    run = tmp_path / "run"
    texts = Dataset.from_dict({"text": ["one and two", "three and 4"] * 4})
    args = arguments(tmp_path / "theirs", logging_steps=1, remove_unused_columns=False)
    Trainer(
        loaded(base),
        args,
        data_collator=collate_texts,
        train_dataset=texts,
        callbacks=[SpecializationCallback("none", output=run)],
    ).train()
    wanted = sum(len(ids) for ids in tiny.tokenizer()(list(texts["text"]))["input_ids"])
    assert json.loads((run / "routing" / "before.json").read_text())["tokens"] == wanted


def test_a_training_that_ended_and_goes_on_replaces_its_adapter(base, tmp_path):
    for steps in (1, 2):
        callback = SpecializationCallback("none", output=tmp_path / "run")
        options = {"max_steps": steps, "save_steps": 1, "logging_steps": 1, "report_to": []}
        theirs = TrainingArguments(str(tmp_path / "theirs"), use_cpu=True, **options)
        model = loaded(base)
        trainer = Trainer(
            model, theirs, data_collator=collate, train_dataset=rows(8), callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=steps > 1)
        written = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        for name, tensor in get_peft_model_state_dict(model).items():
            assert torch.equal(written[name], tensor), (steps, name)


def test_a_training_that_cannot_begin_leaves_no_folder(base, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="contains other files"):
        trainer_of(base, tmp_path, SpecializationCallback("none", output=taken)).train()
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]

    run = tmp_path / "run"
    attention = get_peft_model(loaded(base, whole=True), LoraConfig(target_modules=["q_proj"]))
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_("layers.1" in name and "lora_" in name)
    unreached = {"terms": {"orthogonality": {"weight": 0.1, "layers": [0]}}}
    with pytest.raises(ObjectiveError, match="reaches no trainable"):
        callback = SpecializationCallback(unreached, output=run)
        trainer_of(base, tmp_path, callback, model=attention).train()
    assert not run.exists()

    nameless = loaded(base, whole=True)
    nameless.config._name_or_path = ""
    with pytest.raises(ObjectiveError, match="the model does not record its checkpoint"):
        callback = SpecializationCallback("none", output=run)
        trainer_of(base, tmp_path, callback, model=nameless).train()
    assert not run.exists()
