"""A plain transformers Trainer with the mixin: exact resume in its corners, without pickle."""

import errno
import pickle

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from moe_finetune import SpecializationCallback
from moe_finetune.errors import CheckpointError, NumericsError
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.save_and_resume import resumable_trainer
from moe_finetune.training.save_and_resume.gathered_weights import live_weights
from moe_finetune.training.save_and_resume.resumable_trainer import ResumableTrainer
from moe_finetune.training.save_and_resume.training_state import checkpoints
from tests.support import tiny, tiny_families
from tests.training.cases import Guarded, collate, guarded, rows


class Plain(ResumableTrainer, Trainer):
    pass


class Stop(TrainerCallback):
    """Ends the process' training right after the step, as an exception anywhere would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and not control.should_save:
            raise RuntimeError("stopped here")


def model(router="full", targets=("attention", "experts"), of=None, **lora):
    torch.manual_seed(1)
    of = tiny.model("qwen3_moe", num_hidden_layers=2) if of is None else of
    lora = LoraSection(rank=4, alpha=12.0, dropout=0.1, targets=list(targets), **lora)
    return add_lora(of, lora, router)


def gated(train):
    return model(of=tiny_families.model("qwen2_moe"), shared_expert_gate=train)


def trainer(folder, stop=None, built=None, method="none", **changes):
    options = {
        "max_steps": 7,
        "save_steps": 2,
        "logging_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,  # 11 rows: windows of 2, 2, 2 batches
        "learning_rate": 1e-2,
        **changes,
    }
    callback = SpecializationCallback(method, dropout=0.1)
    made = Plain(
        built if built is not None else model(),
        TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **options),
        data_collator=collate,
        train_dataset=rows(),
        eval_dataset=rows(5, seed=3),
        callbacks=[callback] + ([Stop(stop)] if stop else []),
    )
    callback.attach(made)
    return made


def weights(made):
    return {name: tensor.clone() for name, tensor in live_weights(made.model).items()}


def history(made):
    timed = ("runtime", "per_second")
    kept = [row for row in made.state.log_history if "train_runtime" not in row]
    return [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in kept]


CASES = {
    "adapter": {},
    "shared outer factors": {"built": lambda: model(shared_outer=True)},
    "a shared expert's gate, in full": {"built": lambda: gated("full")},
    "a shared expert's gate, by LoRA": {"built": lambda: gated("lora")},
    "routers alone, no adapter": {"built": lambda: model(targets=())},
    "evaluation and best metric": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    },
    "plateau scheduler, another optimizer": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "loss",
        "optim": "adafactor",
    },
    "a stop at the end of an epoch": {"stop": 4, "save_steps": 3},
    "windows and logs out of step": {"logging_steps": 5, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_like_the_straight_one(tmp_path, case):
    options = dict(CASES[case])
    build, stop = options.pop("built", model), options.pop("stop", 5)
    method = "none" if "alone" in case else "orthogonal_variance"
    straight = trainer(tmp_path / "a", built=build(), method=method, **options)
    straight.train()
    stopped = trainer(tmp_path / "b", stop, built=build(), method=method, **options)
    with pytest.raises(RuntimeError, match="stopped here"):
        stopped.train()
    resumed = trainer(tmp_path / "b", built=build(), method=method, **options)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 7
    wanted, got = weights(straight), weights(resumed)
    assert wanted.keys() == got.keys() and len(wanted) >= 2
    for name, value in wanted.items():
        assert torch.equal(value, got[name]), name
    assert history(straight) == history(resumed)
    assert straight.state.best_metric == resumed.state.best_metric


@pytest.mark.parametrize("steps", [7, 9])  # inside an epoch, and at the end of one
def test_a_run_stopped_after_its_last_save_trains_no_further(tmp_path, steps):
    straight = trainer(tmp_path, max_steps=steps)
    mean = straight.train().training_loss
    wanted = weights(straight)
    again = trainer(tmp_path, max_steps=steps)
    assert again.train(resume_from_checkpoint=True).training_loss == pytest.approx(mean)
    assert again.state.global_step == steps
    for name, value in weights(again).items():
        assert torch.equal(value, wanted[name]), name


def test_nothing_is_pickled_and_no_pickle_is_read(tmp_path, monkeypatch):
    trainer(tmp_path, method="loss_free").train()
    written = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert {p.rpartition(".")[2] for p in written} == {"json", "safetensors"}

    def refuse(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    newest = checkpoints(tmp_path)[0]
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (newest / name).write_bytes(b"not even a pickle")
    resumed = trainer(tmp_path, method="loss_free", max_steps=8)
    resumed.train(resume_from_checkpoint=str(newest))
    assert resumed.state.global_step == 8


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    write = resumable_trainer.write_adapter

    def full(config, weights, folder):
        write(config, weights, folder)
        if folder.name == "checkpoint-4":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resumable_trainer, "write_adapter", full)
    trainer(tmp_path, method="none").train()
    assert [p.name for p in checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (7, 6, 2)]
    warning = next(r.message for r in caplog.records if "could not be saved" in r.message)
    assert "checkpoint-4" in warning and "No space left" in warning and "checkpoint-2" in warning


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    trainer(tmp_path).train()
    newest = checkpoints(tmp_path)[0]
    other = trainer(tmp_path, built=model(targets=("attention",)))
    with pytest.raises(CheckpointError, match=r"are missing.*resume with the recipe that wrote it"):
        other.train(resume_from_checkpoint=str(newest))
    (newest / "trainer" / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: is missing"):
        trainer(tmp_path).train(resume_from_checkpoint=str(newest))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_the_run_before_its_update(tmp_path, where):
    class Poisoned(Guarded):
        seen = 0

        def compute_loss(self, *args, **kwargs):
            self.seen += 1
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.seen == 3 and where == "loss" else loss

        def _get_grad_norm(self, model, grad_norm=None):
            if self.seen == 4 and where == "gradient":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(float("inf"))
                grad_norm = None
            return super()._get_grad_norm(model, grad_norm)

    callback = SpecializationCallback("loss_free", dropout=0.1)
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_steps": 1}
    made = guarded(tmp_path, model(), callback, Poisoned, **options)
    with pytest.raises(NumericsError, match=r"step 2: .*good checkpoint: .*checkpoint-1$"):
        made.train()
    assert made.state.global_step == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights(made).values())
