"""A teacher's routing in distillation: values and gradients by models of their own."""

import pytest
import torch
from datasets import Dataset

from moe_finetune.errors import RecipeError
from moe_finetune.lora.targets import add_lora
from moe_finetune.models import FAMILIES
from moe_finetune.moe.hooks import Recorder
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.tree import Tree
from moe_finetune.run import plan_run
from moe_finetune.training.callback import SpecializationCallback
from moe_finetune.training.teacher import check_teacher
from moe_finetune.training.trainer import trainer_of
from tests import tiny
from tests.losses import reference

WEIGHT = 0.4


def student(family):
    torch.manual_seed(1)
    model = add_lora(tiny.model(family), LoraSection(rank=3, alpha=6.0), "full")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def trained(folder, family, terms, checkpointing=False):
    """A trainer after one step of rate 0: its log, inputs, gradients; how often the teacher ran."""
    stage = STAGES["distill"]
    args = stage.config_class()(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], max_steps=1,
        per_device_train_batch_size=3, gradient_accumulation_steps=2, max_completion_length=5,
        learning_rate=0.0, logging_steps=1, save_strategy="no", max_grad_norm=0.0, seed=3,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": p} for p in ("ab", "abcdefg", "wxyz", "q", "t", "ü")])
    teacher = tiny.model(family, seed=7)
    trainer = trainer_of(stage)(
        model=student(family), teacher_model=teacher, args=args, train_dataset=prompts,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.callback = callback = SpecializationCallback({"terms": terms})
    trainer.add_callback(callback)
    callback.attach(trainer)
    batches, runs, gradients, compute = [], [], {}, trainer._compute_loss

    def at_loss(model, inputs, *rest):
        batches.append(inputs)
        return compute(model, inputs, *rest)

    def at_norm(model, grad_norm=None):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()
        return torch.zeros(())

    trainer._compute_loss, trainer._get_grad_norm = at_loss, at_norm
    teacher.model.register_forward_hook(lambda *_: runs.append(1))
    trainer.train()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert len(batches) == len(runs) == 2
    return next(row for row in trainer.state.log_history if "loss" in row), batches, gradients


def divergence(model, teacher, inputs, score):
    """The sum over layers of a slow loop's KL, over the tokens of rows without padding."""
    pairs = {}
    for b in range(len(inputs["prompt_ids"])):
        parts = [
            inputs[f"{part}_ids"][b][inputs[f"{part}_mask"][b].bool()]
            for part in ("prompt", "completion")
        ]
        for side in (model, teacher):
            found = []
            with Recorder(side, observers=[lambda r, _: found.append(r)], observe="all"):  # noqa: B023
                side(input_ids=torch.cat(parts)[None], use_cache=False)
            for record in found:
                pairs.setdefault(record.layer, ([], []))[side is teacher].append(record.logits_TE)
    return sum(
        reference.teacher_routing(
            torch.cat(ours).double(), torch.cat(theirs).double(), score=score
        )
        for ours, theirs in pairs.values()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "score", "checkpointing"),
    [("qwen3_moe", "softmax", False), ("deepseek_v3", "sigmoid", True)],
)
def test_the_routers_learn_the_teachers(tmp_path, family, score, checkpointing):
    terms = {"teacher_routing": {"weight": WEIGHT}}
    log, batches, gradients = trained(tmp_path / "with", family, terms, checkpointing)
    plain, same, without = trained(tmp_path / "without", family, {}, checkpointing)
    assert log["loss"] == plain["loss"]  # TRL's own loss gets the teacher it would have got
    for inputs, other in zip(batches, same, strict=True):
        assert torch.equal(inputs["completion_ids"], other["completion_ids"])
    model, teacher = student(family), tiny.model(family, seed=7)
    values = [divergence(model, teacher, inputs, score) for inputs in batches]
    wanted = torch.stack(values).mean()
    assert log["losses/teacher_routing"] == pytest.approx(wanted.item(), rel=1e-4)
    (WEIGHT * wanted).backward()
    assert any("gate" in name for name in gradients)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        found = gradients[name] - without[name]
        close = 1e-3 * parameter.grad.abs().max().item() + 1e-7
        torch.testing.assert_close(found, parameter.grad, rtol=2e-3, atol=close)


def test_a_teacher_that_does_not_fit_is_refused(tmp_path):
    config = tiny.config("qwen3_moe")
    family = FAMILIES["qwen3_moe"]
    check_teacher((config, family), (config, family))
    other = tiny.config("qwen3_moe")
    other.num_experts, other.num_hidden_layers = 16, 4
    with pytest.raises(RecipeError) as caught:
        check_teacher((config, family), (other, family))
    assert "MoE layers [0, 1, 2] and [0, 1, 2, 3]; numbers of experts 12 and 16" in str(
        caught.value
    )
    tiny.save("qwen3_moe", tmp_path / "student")
    tiny.save("olmoe", tmp_path / "teacher")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    tree = {
        "stage": "distill",
        "model": {"path": str(tmp_path / "student"), "dtype": "float32"},
        "teacher": str(tmp_path / "teacher"),
        "lora": {"rank": 2},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64},
        "method": {"terms": {"teacher_routing": {"weight": 1.0}}},
    }
    with pytest.raises(RecipeError, match="they have different families qwen3_moe and olmoe"):
        plan_run(recipe_from_tree(Tree(tree)), tmp_path / "run")
    with pytest.raises(
        RecipeError, match="teacher_routing: only valid for stage distill, and this is stage s"
    ):
        recipe_from_tree(Tree({**tree, "stage": "sft", "teacher": None}))
