"""Every checkpoint that training leaves opens as what it is: a model, or an adapter of its base."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from moe_finetune import SpecializationCallback
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.save_and_resume.gathered_weights import live_weights, model_weights
from moe_finetune.training.save_and_resume.resumable_trainer import ResumableTrainer
from moe_finetune.vllm.serve import open_merged
from tests.support import tiny
from tests.training.cases import collate, rows


class Plain(ResumableTrainer, Trainer):
    pass


def trained(folder, model, method):
    callback = SpecializationCallback(method)
    made = Plain(
        model,
        TrainingArguments(
            str(folder),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            max_steps=1,
            save_steps=1,
            learning_rate=1e-3,
            per_device_train_batch_size=2,
        ),
        data_collator=collate,
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
    )
    callback.attach(made)
    made.train()
    callback.close()
    return folder / "checkpoint-1", callback


def logits(model):
    with torch.no_grad():
        return model.eval()(**tiny.batch()).logits


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_a_model_without_an_adapter(tmp_path, family):
    model = tiny.model(family)
    only_routers = family == "olmoe"
    if only_routers:
        model = add_lora(model, LoraSection(rank=4, alpha=8.0, targets=[]), "full")
    folder, _ = trained(tmp_path, model, "none")
    opened = open_checkpoint(folder)
    assert {info.file.name for info in opened.tensors.values()} == {"model.safetensors"}
    # vLLM takes every safetensors file beside the weights for weights.
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert open_merged(folder).folder == folder
    assert load_tokenizer(folder).encode("Sum") == tiny.tokenizer().encode("Sum")
    assert torch.equal(logits(load_model(folder, dtype="float32")), logits(model))
    stored, live = model_weights(folder, model), live_weights(model)
    assert stored.keys() == live.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in live.items())
    assert all(".gate." in name for name in live) == only_routers
