"""Packed rows from a recipe, in one's own trainer, and of families that the package lacks."""

import json
import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from moe_finetune import cli
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.evaluation.transformers_backend import open_transformers
from moe_finetune.models import FAMILIES, using
from moe_finetune.models.family import Rows
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.training.callback.callback import SpecializationCallback
from moe_finetune.training.refuse_packing import packing_problem
from moe_finetune.training.specialization import Specialization
from tests.support import tiny, tiny_families

UNDECLARED = replace(FAMILIES["qwen3_next"], rows=Rows())
"""A family of a plugin or recipe that says nothing of its states."""


def rows(seed=3):
    """Token ids of texts that fit into two rows of 40."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (13, 17, 9, 21, 6, 12)
    return [torch.randint(10, 260, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a tiny checkpoint of the family that is asked for."""

    def write(family, **keys):
        base = tmp_path / family
        tiny_families.model(family).save_pretrained(base)
        tiny.tokenizer().save_pretrained(base)
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": f"text {n} " * 5}) + "\n" for n in range(9)))
        content = {
            "model": {"path": str(base), "dtype": "float32"},
            "method": "none",
            "lora": {"rank": 4, "alpha": 8},
            "data": {"train": str(file), "max_length": 100, "packing": True},
            "trainer": {"max_steps": 2, "report_to": "none", "per_device_train_batch_size": 1},
            "export": {"merge": False},
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(content | keys))
        return tmp_path / "recipe.yaml"

    return write


def train(capsys, *arguments):
    code = cli.main(["train", *map(str, arguments)])
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return code, message


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "glm4v_moe"])
def test_the_loss_of_packed_rows_is_that_of_padded_ones(family, tmp_path):
    """Through TRL: all texts in one step, as rows of one text each or packed."""
    losses = []
    for packing in (False, True):
        trainer = SFTTrainer(
            model=tiny_families.model(family),
            args=SFTConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=len(rows()),
                max_steps=1,
                learning_rate=0.0,
                logging_steps=1,
                router_aux_loss_coef=0.0,
                report_to=[],
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                max_length=40,
                packing=packing,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows(), "labels": rows()}),
            processing_class=tiny.tokenizer(),
            callbacks=[SpecializationCallback("none")],
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] > 1 and abs(losses[1] - losses[0]) < 1e-5 * losses[0]


def test_a_family_that_is_declared_without_its_states_is_refused(recipe, capsys, tmp_path):
    file = recipe("qwen3_next")
    with using(UNDECLARED):
        code, message = train(capsys, file, "--output", tmp_path / "run", "--dry-run")
        assert code == 2 and "data.packing: sequences in one row see each other" in message
        assert "rows.per_sequence" in message and not (tmp_path / "run").exists()
        for unpacked in (["data.packing=false"], ["data.packing_strategy=wrapped"]):
            code, message = train(capsys, file, *unpacked, "-o", tmp_path / "run", "--dry-run")
            assert code == 0, message
    code, message = train(capsys, file, "--output", tmp_path / "run", "--dry-run")
    assert code == 0, message


def test_a_family_declares_how_sequences_are_kept_apart():
    config = tiny_families.config("qwen3_next")
    told = replace(UNDECLARED, rows=Rows(per_sequence=("Qwen3NextGatedDeltaNet",)))
    with using(told):
        assert packing_problem(config, told) is None
    with using(UNDECLARED):
        assert "Qwen3-Next" in str(packing_problem(config, UNDECLARED))


@pytest.mark.parametrize(("family", "warnings"), [(UNDECLARED, 1), (FAMILIES["qwen3_next"], 0)])
def test_one_s_own_trainer_says_so_once(family, warnings, caplog, tmp_path):
    examples = [{"input_ids": row} for row in rows()]
    # From 5.20 transformers refuses such rows itself, if the collator names their sequences.
    refused = pytest.raises(ValueError, match="keep packed sequences apart")
    newer = Version(transformers.__version__) >= Version("5.20")
    stopped = refused if newer and family is UNDECLARED else nullcontext()
    with using(family), caplog.at_level(logging.WARNING), stopped:
        Trainer(
            model=tiny_families.model("qwen3_next"),
            args=TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=3,
                max_steps=2,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
            ),
            train_dataset=examples,
            data_collator=DataCollatorForLanguageModeling(pad_token_id=3, padding_free=True),
            callbacks=[SpecializationCallback("none")],
        ).train()
    said = [line for line in caplog.messages if "positions start again within a row" in line]
    assert len(said) == warnings and all("Qwen3-Next" in line for line in said)


def test_no_row_is_packed_and_nothing_is_said(caplog):
    model = tiny_families.model("qwen3_next").train()
    with using(UNDECLARED), Specialization(model, "none"):
        model(input_ids=torch.tensor(rows()[:1]))
    assert not caplog.messages


def test_pretraining_keeps_texts_apart(recipe):
    """Long texts are cut into rows, and nothing of them is lost or mixed."""
    data = load_recipe(recipe("qwen3_moe", data={"train": "x.jsonl"}), ["stage=pretrain"]).data
    assert (data.packing, data.packing_strategy) == (True, "bfd_split")


def test_rows_that_mix_texts_are_named(recipe, capsys, caplog, tmp_path):
    file = recipe("qwen3_moe")
    wrapped = [file, "stage=pretrain", "data.packing_strategy=wrapped"]
    code, message = train(capsys, *wrapped, "--output", tmp_path / "run", "--dry-run")
    assert code == 0 and "whose texts attend to each other" in caplog.text, message


@pytest.mark.parametrize("family", ["minimax", "deepseek_v4"])
def test_rollouts_beside_padding_are_refused(family, recipe, capsys, tmp_path):
    title = FAMILIES[family].title
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    few = {"num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1}
    keys = {"stage": "grpo", "rewards": ["exact_match"], "trainer": few}
    file = recipe(family, data={"train": str(data)}, **keys)
    code, message = train(capsys, file, "--output", tmp_path / "run", "--dry-run")
    assert code == 2 and f"{title} computes wrong logits for a prompt with padding" in message


def test_an_evaluation_beside_padding_takes_one_prompt_at_a_time(recipe, caplog):
    base = open_checkpoint(recipe("minimax").parent / "minimax", values=True)
    model, settings, _ = open_transformers(base, None, 4, "float32", 0)
    assert settings["batch_size"] == model.batch_size == 1
    assert "MiniMax-01 computes wrong logits" in caplog.text
