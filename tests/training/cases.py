"""A tiny model with an adapter, rows of unequal length and what a Trainer needs for them."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.callback.early_ends import FiniteTrainer
from moe_finetune.training.save_and_resume.resumable_trainer import ResumableTrainer
from tests.support import tiny
from tests.support.tiny_adapter import random_factors

TEXTS = [(f"Say {i}.", f" It is {i}.", f" No, {i + 7}!") for i in range(4)]
PAIRS = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in TEXTS]
JUDGED = [
    {"prompt": row[0], "completion": row[1 + i % 2], "label": i % 2 == 0}
    for i, row in enumerate(TEXTS)
]


def adapted(name="qwen3_moe", router="full", **changes):
    torch.manual_seed(1)
    model = add_lora(tiny.model(name, **changes), LoraSection(rank=4, alpha=12.0), router)
    random_factors(model, 0.1)
    return model


def rows(count=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 27, (count,), generator=generator).tolist()
    ids = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]
    labels = [[-100] * 3 + row[3:] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def arguments(tmp_path, **changes):
    return TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        use_cpu=True,
        max_steps=2,
        save_strategy="no",
        **changes,
    )


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [3] * (width - len(row["input_ids"])) for row in rows])
    mask = (ids != 3).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


LORA = {
    "r": 3,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
}


def loaded(base, whole=False):
    """The checkpoint by transformers, with an adapter of stock PEFT unless ``whole``."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base)
    return model if whole else get_peft_model(model, LoraConfig(**LORA))


class Guarded(FiniteTrainer, ResumableTrainer, Trainer):
    """The mixins of the run's trainer on transformers' own."""


def guarded(folder, model, callback, kind=Guarded, **options):
    """A trainer that ends at numbers that are not finite; checkpoints go into ``folder``."""
    trainer = kind(
        model,
        TrainingArguments(
            str(folder / "checkpoints"),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            logging_nan_inf_filter=False,
            per_device_train_batch_size=2,
            **options,
        ),
        data_collator=collate,
        train_dataset=rows(),
        callbacks=[callback],
    )
    callback.attach(trainer)
    return trainer
