"""What training found and learned follows the weights: best model, resume, every save."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from moe_finetune import SpecializationCallback
from moe_finetune.checkpoint.adapters.files import BIAS_FILE, read_bias
from moe_finetune.errors import AdapterError, CaptureError, ObjectiveError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization, on_model
from tests.support import tiny
from tests.training.cases import collate, rows

BIASED = {"terms": {}, "bias_update": 0.05, "export_bias": "drop"}
WRITTEN = {"terms": {}, "bias_update": 0.05}
FOUND = {"terms": {"variance": {"share": 1e-3, "every": 1}}, "bias_update": 0.05}


def adapted(family="qwen3_moe", targets=("attention",)):
    torch.manual_seed(1)
    model = tiny.model(family, num_hidden_layers=3 if family == "deepseek_v3" else 2)
    return add_lora(model, LoraSection(rank=4, alpha=12.0, targets=list(targets)), "full")


class Recall(TrainerCallback):
    """Keeps the state as it is at each step's end."""

    def __init__(self, callback):
        self.callback, self.after = callback, {}

    def on_step_end(self, args, state, control, **kwargs):
        held = self.callback.table_state()
        self.after[state.global_step] = {name: value.clone() for name, value in held.items()}


def stock(folder, model, callback, extra=(), **changes):
    """Transformers' own trainer, without ``attach``."""
    options = {
        "max_steps": 4,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        **changes,
    }
    recall = Recall(callback)
    made = Trainer(
        model,
        TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **options),
        data_collator=collate,
        train_dataset=rows(),
        eval_dataset=rows(5, seed=3),
        callbacks=[callback, recall, *extra],
    )
    return made, recall


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without(made, *kinds):
    kept = [c for c in made.callback_handler.callbacks if not isinstance(c, kinds)]
    made.callback_handler.callbacks = kept


def close(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(**tiny.batch()).logits


def test_the_best_model_comes_with_its_own_bias(tmp_path):
    callback = SpecializationCallback(FOUND, export_bias="drop")
    made, recall = stock(
        tmp_path,
        adapted(),
        callback,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the untrained model is the best
    )
    made.train()
    best = int(made.state.best_model_checkpoint.rpartition("-")[2])
    assert best < 4 and not same(recall.after[best], recall.after[4])
    assert same(callback.table_state(), recall.after[best])
    assert {name.partition(".")[0] for name in callback.table_state()} == {"strength", "bias"}


def test_a_resume_reads_the_path_that_it_is_given(tmp_path):
    straight = {}
    for name, seed in (("mine", 5), ("other", 6)):
        callback = SpecializationCallback(FOUND, export_bias="drop")
        made, recall = stock(tmp_path / name, adapted(), callback, max_steps=2, data_seed=seed)
        made.train()
        callback.close()
        straight[name] = recall.after[2]
    assert not same(straight["mine"], straight["other"])
    callback = SpecializationCallback(FOUND, export_bias="drop")
    begun = {}
    note = TrainerCallback()
    note.on_train_begin = lambda *_, **__: begun.update(callback.table_state())
    made, _ = stock(tmp_path / "other", adapted(), callback, [note], max_steps=3)
    made.train(resume_from_checkpoint=str(tmp_path / "mine" / "checkpoint-2"))
    assert same(begun, straight["mine"])
    assert made.state.global_step == 3


def test_a_state_that_is_not_there_is_an_error(tmp_path):
    plain, _ = stock(tmp_path, adapted(), SpecializationCallback({"terms": {}}), max_steps=2)
    plain.train()
    folder = str(tmp_path / "checkpoint-2")
    for method, name in (
        ({"terms": FOUND["terms"]}, r"strength\.variance"),
        (BIASED, r"bias\.0"),
    ):
        callback = SpecializationCallback(method, export_bias="drop")
        made, _ = stock(tmp_path, adapted(), callback)
        with pytest.raises(ObjectiveError, match=f"lacks '{name}'"):
            made.train(resume_from_checkpoint=folder)
    callback = SpecializationCallback(FOUND, export_bias="drop")
    biased, _ = stock(tmp_path / "b", adapted(), callback, max_steps=2)
    biased.train()
    made, _ = stock(tmp_path, adapted(), SpecializationCallback({"terms": {}}))
    with pytest.raises(ObjectiveError, match=r"contains 'bias.\d', which this method does not use"):
        made.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    with Specialization(adapted(), FOUND) as work, pytest.raises(ObjectiveError, match="experts"):
        small = {f"bias.{n}": torch.zeros(7) for n in range(2)}
        work.load_state_dict({**small, "strength.variance": torch.zeros((), dtype=torch.float64)})


def test_a_checkpoint_made_without_the_callback_can_be_gone_on_with(tmp_path):
    made, _ = stock(tmp_path, adapted(), SpecializationCallback("none"), max_steps=2)
    without(made, SpecializationCallback, Recall)
    made.train()
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    assert "SpecializationCallback" not in json.loads(file.read_text())["stateful_callbacks"]
    made, _ = stock(tmp_path, adapted(), SpecializationCallback("aux_loss"), max_steps=3)
    made.train(resume_from_checkpoint=str(file.parent))
    assert made.state.global_step == 3


def test_transformers_may_restore_the_callback_itself(tmp_path):
    first = SpecializationCallback(BIASED, dropout=0.1, kernel="grouped")
    made, recall = stock(tmp_path, adapted(), first, max_steps=2)
    made.train()
    again, _ = stock(
        tmp_path,
        adapted(),
        SpecializationCallback(BIASED),
        max_steps=2,
        restore_callback_states_from_checkpoint=True,
    )
    without(again, Recall)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (new,) = [c for c in again.callback_handler.callbacks if isinstance(c, SpecializationCallback)]
    assert new is not first and new.method == first.method
    assert (new.dropout, new.kernel) == (0.1, "grouped")
    assert new.specialization.recorder.kernel == "grouped"
    assert all(name in new.table_state() for name in recall.after[2])


def test_the_callback_that_was_given_goes_on_as_the_one_that_replaces_it(tmp_path, tiny_checkpoint):
    """Folder, window and the reference of who made it were lost."""

    def model():
        loaded = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3_moe"))
        torch.manual_seed(0)
        return get_peft_model(loaded, LoraConfig(r=3, target_modules=["q_proj"]))

    options = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    straight = SpecializationCallback(BIASED)
    made, _ = stock(tmp_path / "trainer", model(), straight, **options)
    straight.attach(made)
    made.train()
    given = SpecializationCallback(BIASED, output=tmp_path / "run")
    options["restore_callback_states_from_checkpoint"] = True
    again, _ = stock(tmp_path / "again", model(), given, **options)
    without(again, Recall)
    given.attach(again)
    again.processing_class = again.callback_handler.processing_class = tiny.tokenizer()
    again.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    (new,) = [c for c in again.callback_handler.callbacks if isinstance(c, SpecializationCallback)]
    assert new is not given and new is again.callback_handler.callbacks[0]
    assert given.specialization is new.specialization is not None
    assert same(given.table_state(), straight.table_state())
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    given.close()
    assert on_model(again.model) is None


def test_evaluation_after_training_sees_the_bias_until_it_is_closed(tmp_path):
    model, callback = adapted(), SpecializationCallback(BIASED)
    made, _ = stock(tmp_path, model, callback, save_strategy="no")
    made.train()
    with (
        torch.no_grad(),
        Recorder(model, perturbation=callback.specialization.perturbation, observe="all"),
    ):
        wanted = model.eval()(**tiny.batch()).logits
    seen = logits(model)
    assert close(seen, wanted)
    evaluated = made.evaluate()["eval_loss"]
    with model.disable_adapter():
        reference = logits(model)
    callback.close()
    assert not close(logits(model), wanted)
    assert made.evaluate()["eval_loss"] != evaluated
    with model.disable_adapter():
        assert torch.equal(logits(model), reference)
    assert "save_pretrained" not in model.__dict__
    assert not any(layer.mlp.gate._forward_hooks for layer in model.get_base_model().model.layers)


def test_a_second_training_goes_on_with_the_first_ones_bias(tmp_path):
    model, callback = adapted(), SpecializationCallback(BIASED)
    made, recall = stock(tmp_path, model, callback, save_strategy="no", max_steps=3)
    made.train()
    first = recall.after[3]
    made.train()
    moved = recall.after[1]
    assert all((moved[n] - first[n]).abs().max() < 0.051 for n in first)
    assert max(float(first[n].abs().max()) for n in first) > 0.14
    # another trainer and callback on the same model
    callback.specialization.balancer.bias = {n: torch.full((12,), 0.5) for n in (0, 1)}
    other, recall = stock(tmp_path, model, SpecializationCallback(BIASED), save_strategy="no")
    other.train()
    assert all((recall.after[1][n] - 0.5).abs().max() < 0.051 for n in first)
    # a method without a bias would drop it
    plain, _ = stock(tmp_path, model, SpecializationCallback("none"), save_strategy="no")
    with pytest.raises(ObjectiveError, match=r"routing bias of an earlier training.*close\(\)"):
        plain.train()
    with pytest.raises(CaptureError, match="restore"):
        Specialization(model, BIASED).install()
    # on another model the same callback begins at 0
    fresh, recall = stock(tmp_path, adapted(), callback, save_strategy="no")
    fresh.train()
    assert all(recall.after[1][n].abs().max() < 0.051 for n in first)


def test_every_save_of_an_adapter_has_the_bias(tmp_path):
    model, callback = adapted("deepseek_v3"), SpecializationCallback(WRITTEN)
    made, recall = stock(tmp_path / "run", model, callback)
    made.train()
    own = {n: m.mlp.gate.e_score_correction_bias for n, m in layers(model)}
    assert len(own) == 2
    made.save_model(str(tmp_path / "end"))
    for step, folder in ((2, tmp_path / "run" / "checkpoint-2"), (4, tmp_path / "end")):
        saved = load_file(folder / BIAS_FILE)
        assert saved.keys() == {f"bias.{n}" for n in own}
        for n, value in own.items():
            assert torch.equal(saved[f"bias.{n}"], value + recall.after[step][f"bias.{n}"])
        (folder / BIAS_FILE).unlink()
        with pytest.raises(AdapterError, match=f"{BIAS_FILE}: is missing"):
            read_bias(folder)
    callback.close()
    made.save_model(str(tmp_path / "closed"))
    assert not (tmp_path / "closed" / BIAS_FILE).exists()


def layers(model):
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [(n, at) for n, at in enumerate(inner.model.layers) if hasattr(at.mlp, "gate")]


def test_a_whole_model_is_saved_with_the_bias_where_it_has_a_place(tmp_path, caplog):
    from moe_finetune.checkpoint.load_model import load_model

    model, callback = tiny.model("deepseek_v3"), SpecializationCallback(WRITTEN)
    made, _ = stock(tmp_path / "run", model, callback, max_steps=2, learning_rate=1e-4)
    made.train()
    made.save_model(str(tmp_path / "end"))
    trained = logits(model)
    for folder in (tmp_path / "end", tmp_path / "run" / "checkpoint-2"):
        assert close(logits(load_model(folder, dtype="float32")), trained)
    callback.close()
    assert not close(logits(model), trained)
    assert "no place" not in caplog.text

    model, callback = tiny.model("olmoe", num_hidden_layers=2), SpecializationCallback(WRITTEN)
    made, _ = stock(tmp_path / "o", model, callback, max_steps=1, save_strategy="no")
    made.train()
    assert "OLMoE" in caplog.text and "cannot store a routing bias" in caplog.text
    caplog.clear()
    made.save_model(str(tmp_path / "o" / "end"))
    assert "is saved without the learned routing bias" in caplog.text


class Broken(TrainerCallback):
    """Raises once, at the end of a step."""

    def __init__(self, error):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        error, self.error = self.error, None
        if error is not None:
            raise error


def test_training_again_after_an_exception(tmp_path):
    model, callback = adapted(), SpecializationCallback(BIASED)
    made, recall = stock(
        tmp_path, model, callback, [Broken(RuntimeError("interrupted"))], save_strategy="no"
    )
    with pytest.raises(RuntimeError, match="interrupted"):
        made.train()
    left = recall.after[1]
    made.train()
    assert all((recall.after[1][n] - left[n]).abs().max() < 0.051 for n in left)
    # a new trainer and callback after an exception
    made.add_callback(Broken(RuntimeError("again")))
    with pytest.raises(RuntimeError, match="again"):
        made.train()
    other, _ = stock(tmp_path, model, SpecializationCallback(BIASED), save_strategy="no")
    other.train()
    assert other.state.global_step == 4


def test_a_smaller_batch_after_running_out_of_memory(tmp_path):
    model, callback = adapted(), SpecializationCallback("aux_loss")
    made, _ = stock(
        tmp_path,
        model,
        callback,
        [Broken(RuntimeError("CUDA out of memory."))],
        save_strategy="no",
        auto_find_batch_size=True,
    )
    made.train()
    assert made.state.global_step == 4 and made._train_batch_size == 1
    assert made.state.log_history[0]["losses/load_balance"] != 0


def test_two_callbacks_in_one_trainer_are_refused(tmp_path):
    callback = SpecializationCallback("aux_loss")
    made, _ = stock(tmp_path, adapted(), callback, [SpecializationCallback("erc")])
    with pytest.raises(ObjectiveError, match="two SpecializationCallbacks"):
        made.train()


def test_another_trainer_gets_a_window_of_its_own(tmp_path):
    callback = SpecializationCallback("aux_loss")
    scales = []

    class Scales(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            scales.append(callback.specialization.recorder.plan.scale())

    first, _ = stock(
        tmp_path, adapted(), callback, [Scales()], save_strategy="no", max_steps=3,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    callback.attach(first)
    first.train()  # 6 batches: windows of 4 and 2
    assert scales == [1 / 4, 1 / 2, 1 / 4]
    scales.clear()
    second, _ = stock(
        tmp_path, adapted(), callback, [Scales()], save_strategy="no", max_steps=2,
        gradient_accumulation_steps=3, eval_strategy="no", logging_steps=50,
    )  # fmt: skip
    second.train()
    assert scales == [1 / 3, 1 / 3]
    scales.clear()
    third, _ = stock(tmp_path, adapted(), callback, [Scales()], save_strategy="no", max_steps=1)
    third.train()
    assert scales == [1.0]
    assert callback._window.trainer is None


def test_a_resumed_run_draws_the_same_experts(tmp_path):
    """DenseMixer's drawn experts: by seed, step and micro-batch, so a resume repeats them."""
    DRAWN = {"preset": "densemixer", "dense_sample": 2}

    def trained(folder, until, seed=7, **options):
        callback = SpecializationCallback(DRAWN)
        model = adapted(targets=["attention", "experts"])
        made, _ = stock(
            folder, model, callback, max_steps=4, seed=seed, gradient_accumulation_steps=2,
            data_seed=1, lr_scheduler_type="constant", extra=[Until(until)],
        )  # fmt: skip
        callback.attach(made)
        made.train(**options)
        callback.close()
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    straight = trained(tmp_path / "straight", 4)
    half = trained(tmp_path / "resumed", 2)
    resumed = trained(
        tmp_path / "resumed", 4, resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2")
    )
    other = trained(tmp_path / "other", 4, seed=8)
    assert same(straight, resumed) and not same(half, resumed)
    assert not same(straight, other), "the seed draws"


class Until(TrainerCallback):
    """Ends the training after a step, as an interruption does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
