"""Strength by hand, and a plain Trainer's run in which it is measured."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from moe_finetune import SpecializationCallback
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.moe.layers import model_facts, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny
from tests.support.objectives import objective_of
from tests.training.cases import adapted, collate, rows

TERMS = {
    "load_balance": {"weight": 0.3, "scope": "sequence"},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 20.5},
    "variance": {"weight": 0.7, "layers_reduction": "mean"},
    "specialization": {"weight": 0.4},
    "coupling": {"weight": 0.2},
    "erc": {"weight": 0.3, "noise": False},
    "router_orthogonality": {"weight": 0.6, "layers": [1]},
    "dpp": {"weight": 0.2},
    "ncl": {"weight": 0.1},
    "supervised_routing": {"weight": 0.1},
}
BATCHES = (tiny.batch(seed=1), tiny.batch(rows=2, length=23, seed=2))


def by_hand(model, terms, batches):
    """Rows from ``torch.autograd.grad`` of the language loss and of each term's explicit sum."""
    model.train()
    objective = objective_of(terms, model_facts(model))
    layers = moe_layers(model)
    parts = {
        "router": [p for x in layers for p in x.router.parameters() if p.requires_grad],
        "experts": [p for x in layers for p in x.outer_experts.parameters() if p.requires_grad],
    }
    learned = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    sums = {name: dict.fromkeys(parts, 0.0) for name in ("language", *terms)}

    def add(name, loss):
        for part, own in parts.items():
            grads = torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)
            pairs = zip(own, grads, strict=True)
            flat = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs]
            sums[name][part] = sums[name][part] + torch.cat(flat).double()

    for batch in batches:
        totals, below = {}, []

        def observer(record, _, totals=totals, below=below):
            context = LayerContext(previous=below[-1] if below else None)
            with torch.enable_grad():
                for term in objective.terms:
                    if not term.options.selects(record.layer):
                        continue
                    value = term.loss(record, context)
                    if value is not None:
                        totals[term.name] = totals.get(term.name, 0.0) + value
            below.append(PreviousLayer(record.layer, record.distribution_TE, record.index_TK))

        with Recorder(model, observers=[observer], needs=objective.needs):
            tokens = int((batch["labels"][:, 1:] != -100).sum())
            add("language", model(**batch).loss * (tokens / learned))
            for term in objective.terms:
                options = term.options
                count = sum(options.selects(x.index) for x in layers)
                scale = options.weight / len(batches)
                scale /= count if options.layers_reduction == "mean" else 1
                add(term.name, totals[term.name] * scale)
    rows = {}
    for name in terms:
        row = rows[name] = {}
        for part in parts:
            own, language = sums[name][part], sums["language"][part]
            row[f"share_{part}"] = float(own.norm() / language.norm())
            both = own.norm() * language.norm()
            row[f"cosine_{part}"] = float(own @ language / both) if both else 0.0
    return rows


def agree(rows, wanted, rel=1e-4):
    assert [row["term"] for row in rows] == list(wanted)
    for row in rows:
        for key, value in wanted[row["term"]].items():
            assert row[key] == pytest.approx(value, rel=rel, abs=1e-7), (row["term"], key)


def train(folder, method, *, model=None, steps=3, dropout=0.0, resume=None, **changes):
    """A plain Trainer's run of two micro-batches a step, and the batches it met."""
    model = model or adapted()
    callback = SpecializationCallback(method, dropout=dropout)
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        lr_scheduler_type="constant",
        learning_rate=1e-2,
        disable_tqdm=True,
        **{"save_strategy": "no", **changes},
    )
    trainer = Trainer(
        model, arguments, data_collator=collate, train_dataset=rows(12), callbacks=[callback]
    )
    callback.attach(trainer)
    batches, original = [], trainer.training_step
    trainer.training_step = lambda m, b, *a: (batches.append(copy.copy(b)), original(m, b, *a))[1]
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.specialization, batches


def logged(trainer, step):
    row = next(r for r in trainer.state.log_history if r["step"] == step and "loss" in r)
    return {k.removeprefix("strength/"): v for k, v in row.items() if k.startswith("strength/")}
