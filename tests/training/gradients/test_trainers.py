"""The same method under DPO, GRPO and soft prompts: policy forwards alone are trained on."""

import pytest
import torch
from datasets import Dataset
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from moe_finetune import SpecializationCallback
from moe_finetune.training.specialization import Specialization
from tests.support import reference_loop, tiny
from tests.training.cases import PAIRS, adapted
from tests.training.gradients.policy import COMMON, Policy, gradients

TERMS = {
    "load_balance": {"weight": 0.3},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
    "coupling": {"weight": 0.2},
    "specialization": {"weight": 0.4},
}


def difference(make):
    """Gradients with the method minus without it, and what the objective says they should be."""
    found = []
    for method in ({"terms": {}}, {"terms": TERMS}):
        torch.manual_seed(3)
        model = adapted()
        trainer, _ = make(model, SpecializationCallback(method))
        policy = Policy(model)
        kept = []
        original = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = lambda *a, o=original, m=model, k=kept, **kw: (
            k.append({n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}),
            o(*a, **kw),
        )[1]
        trainer.train()
        found.append((kept[0], policy.inputs))
    # The run without terms has no probing forward before training.
    (plain, inputs), (with_terms, _) = found
    wanted = reference_loop.gradients(
        adapted(), inputs, TERMS, scaling=3.0, scale=1.0 / len(inputs), language=False
    )
    return {n: with_terms[n] - plain[n] for n in wanted}, wanted


def assert_close(got, wanted, tolerance):
    for name, value in wanted.items():
        error = (got[name] - value).abs().max()
        assert error <= tolerance * value.abs().max().clamp_min(1e-3), (name, error)


def compare(kind, config, rows, **options):
    def make(model, callback):
        trainer = kind(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tiny.tokenizer(),
            callbacks=[callback],
            **options,
        )
        return trainer, callback.attach(trainer)

    got, wanted = difference(make)
    assert_close(got, wanted, 2e-4)


def test_dpo(tmp_path):
    compare(DPOTrainer, DPOConfig(str(tmp_path), per_device_train_batch_size=2, **COMMON), PAIRS)


@pytest.mark.slow
def test_grpo(tmp_path):
    config = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=9,
        beta=0.1,
        **COMMON,
    )
    rows = [{"prompt": f"Count {i}"} for i in range(4)]
    compare(
        GRPOTrainer,
        config,
        rows,
        reward_funcs=lambda completions, **_: [float(len(c) % 5) for c in completions],
    )


def test_tensors_that_do_not_move_are_named(caplog):
    model = adapted().train()
    optimizer = torch.optim.SGD(
        [p for n, p in model.named_parameters() if p.requires_grad and "layers.2" not in n], lr=0.1
    )
    with Specialization(model, "aux_loss", total_steps=12) as method:
        for _ in range(10):
            model(**tiny.batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()
    assert method.unmoved and all("layers.2" in name for name in method.unmoved)
    assert f"{len(method.unmoved)} of " in caplog.text and "never changed in 10" in caplog.text


@pytest.mark.parametrize("token_mask", ["attention", "labels"])
@pytest.mark.parametrize(
    ("config", "tokens"), [(PromptTuningConfig, 4 + 19), (PrefixTuningConfig, 19)]
)
def test_soft_prompts(config, tokens, token_mask):
    """What the terms push is the prompt, through the frozen model."""
    torch.manual_seed(4)
    soft = config(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, batch = get_peft_model(tiny.model("qwen3_moe"), soft).train(), tiny.batch()
    lengths = []
    with Specialization(model, {"terms": TERMS, "token_mask": token_mask}) as method:
        method.recorder.add_observer(lambda record, _: lengths.append(record.mask_T))
        model(**batch).loss.backward()
        got = gradients(model)
    assert {mask.numel() for mask in lengths} == {3 * tokens}
    real = int(batch["attention_mask"].sum()) + 3 * (tokens - 19)
    # A token counts for its label where the next one has a label.
    learned = real if token_mask == "attention" else int((batch["labels"][:, 1:] != -100).sum())
    if token_mask == "labels" and tokens > 19:
        learned += 3  # the last virtual token predicts the first real one
    assert {int(mask.sum()) for mask in lengths} == {learned}
    model(**batch).loss.backward()
    plain = gradients(model)
    assert all((got[name] - plain[name]).norm() > 0.05 * plain[name].norm() for name in plain)
