"""Measured strength equals a separate backward of each loss by hand, however training is run."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from moe_finetune import SpecializationCallback, measure_strength
from moe_finetune.errors import ObjectiveError
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.base import LayerContext, PreviousLayer
from moe_finetune.losses.objective import Objective
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.layers import backbone_of, model_facts, moe_layers
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import replay
from moe_finetune.training.memory.live import LiveBytes
from moe_finetune.training.replay import Replay
from moe_finetune.training.specialization import Specialization
from tests import tiny

TERMS = {
    "load_balance": {"weight": 0.3, "scope": "sequence"},
    "z_loss": {"weight": 0.02},
    "orthogonality": {"weight": 0.5, "reduction": "sum", "tokens": 41},
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


def adapted(family="qwen3_moe", **changes):
    torch.manual_seed(1)
    model = add_lora(tiny.model(family, **changes), LoraSection(rank=4, alpha=12.0), "full")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture
def terms(tmp_path):
    path = tmp_path / "table.safetensors"
    save_file({"token_frequencies": torch.randn(tiny.VOCABULARY, 12).softmax(-1)}, path)
    return {**copy.deepcopy(TERMS), "supervised_routing": {"weight": 0.1, "table": str(path)}}


def by_hand(model, terms, batches):
    """Rows from ``torch.autograd.grad`` of the language loss and of each term's explicit sum."""
    model.train()
    objective = Objective.from_options(terms, model_facts(model))
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
                scale = options.weight * (options.tokens or 1) / len(batches)
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


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_measured_strength_is_a_separate_backward_of_each_loss(family, terms):
    model = adapted(family).eval()
    names = {name for name, _ in model.named_parameters()}
    before = torch.get_rng_state()
    rows = measure_strength(model, {"terms": terms}, BATCHES)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert names == {name for name, _ in model.named_parameters()}
    agree(rows, by_hand(model, terms, BATCHES))
    for row in rows:
        mainly = {"router": row["share_router"], "experts": row["share_experts"]}
        assert max(mainly.values()) > 0
        assert row["weight"] == terms[row["term"]]["weight"]


def forwards_of(model, terms):
    """Rows, and the forwards it took to measure them beyond the window's own."""
    seen = []
    handle = backbone_of(model).register_forward_hook(lambda *_: seen.append(1))
    with torch.random.fork_rng():
        rows = measure_strength(model, {"terms": terms}, BATCHES)
    handle.remove()
    return rows, len(seen) - len(BATCHES) - 1  # the first looks for what each term reaches


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_forward_a_batch_serves_all_terms_and_the_language_loss_needs_none(
    terms, checkpointing
):
    model = adapted()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    quiet = {name: {**o, "weight": 1e-4 * o["weight"]} for name, o in terms.items()}
    for some in (quiet, {"dpp": quiet["dpp"]}):
        rows, forwards = forwards_of(model, some)
        assert forwards == len(BATCHES)
        agree(rows, by_hand(adapted(), some, BATCHES))


def test_a_drowned_language_loss_gets_a_backward_of_its_own(terms):
    rows, forwards = forwards_of(adapted(), terms)
    assert forwards == 2 * len(BATCHES)
    assert max(row["share_experts"] for row in rows) > 3
    agree(rows, by_hand(adapted(), terms, BATCHES))


@pytest.mark.parametrize("how", ["one term at a time", "no graph is kept", "in shards"])
def test_however_gradients_are_taken_the_strength_is_the_same(terms, monkeypatch, how):
    if how == "one term at a time":  # what trains is too large to hold once a term
        monkeypatch.setattr(Replay, "_at_once", False)
    elif how == "no graph is kept":
        monkeypatch.setattr(replay, "_compiled", lambda model: True)
    else:  # as FSDP2 needs it: through the model's output, one term's losses switched on
        monkeypatch.setattr(replay, "_sharded", lambda parameters: True)
    rows, forwards = forwards_of(adapted(), terms)
    # The language loss's among them; these weights drown it.
    assert forwards == (1 if how == "in shards" else len(terms) + 1) * len(BATCHES)
    agree(rows, by_hand(adapted(), terms, BATCHES))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_measuring_holds_one_forward_and_leaves_nothing(terms, checkpointing):
    """Bytes of live tensors, without the garbage collector's help."""
    model, batch = adapted().train(), tiny.batch(rows=8, length=64, seed=1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    method = {"terms": terms, "strength": {"first": False}}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9)

    def step(work):
        live.reset()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        work.step()
        return live.reset()

    with Specialization(model, method, total_steps=4) as work:
        gc.disable()
        try:
            with LiveBytes() as live:
                step(work)
                plain, before = step(work), live.now
                work.strength.every = 1
                work.strength.begin(work.steps)
                work.strength.every = None
                measured, left = step(work), live.now - before
        finally:
            gc.enable()
    assert {row.term for row in work.strength.rows} == set(terms)
    # Beside what a step holds: a gradient of each of eleven terms.
    assert plain < measured < 1.35 * plain
    assert left == 0


def rows_of(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 27, (count,), generator=generator).tolist()
    ids = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [3] * (width - len(row["input_ids"])) for row in rows])
    mask = (ids != 3).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


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
        model, arguments, data_collator=collate, train_dataset=rows_of(), callbacks=[callback]
    )
    callback.attach(trainer)
    batches, original = [], trainer.training_step
    trainer.training_step = lambda m, b, *a: (batches.append(copy.copy(b)), original(m, b, *a))[1]
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.specialization, batches


def logged(trainer, step):
    row = next(r for r in trainer.state.log_history if r["step"] == step and "loss" in r)
    return {k.removeprefix("strength/"): v for k, v in row.items() if k.startswith("strength/")}


def test_a_trainers_first_window_is_measured_once_and_changes_nothing(tmp_path, terms):
    del terms["erc"]["noise"]
    terms["coupling"]["pairing"] = "transition"
    seen = {"terms": terms}
    trainer, work, batches = train(tmp_path, seen, dropout=0.1)
    unseen = {"terms": terms, "strength": {"first": False}}
    again, other, _ = train(tmp_path, unseen, dropout=0.1)
    for (name, one), two in zip(
        trainer.model.named_parameters(), again.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    state = work.state_dict()
    assert state and all(torch.equal(v, other.state_dict()[k]) for k, v in state.items())
    first = logged(trainer, 1)
    assert len(first) == 6 * len(terms) and not logged(trainer, 2) and not logged(again, 1)
    assert {"losses/" + name for name in terms} <= trainer.state.log_history[0].keys()
    assert trainer.state.log_history[0]["losses/dpp"] == again.state.log_history[0]["losses/dpp"]
    assert len(batches) == 6


@pytest.mark.parametrize("mask", ["attention", "labels"])
def test_strength_under_a_trainer_is_that_of_its_window(tmp_path, terms, mask):
    trainer, _, batches = train(tmp_path, {"terms": terms, "token_mask": mask}, steps=1)
    window = [{k: b[k] for k in ("input_ids", "attention_mask", "labels")} for b in batches]
    if mask == "attention":
        wanted = by_hand(adapted(), terms, window)
    else:  # the last token of a row predicts nothing
        rows = measure_strength(adapted(), {"terms": terms, "token_mask": mask}, window)
        wanted = {row["term"]: {k: v for k, v in row.items() if "_" in k[:8]} for row in rows}
        plain = measure_strength(adapted(), {"terms": terms}, window)
        assert rows[3]["share_router"] != pytest.approx(plain[3]["share_router"], rel=1e-3)
    first = logged(trainer, 1)
    agree(
        [{"term": name} | {k: first[f"{name}/{k}"] for k in wanted[name]} for name in wanted],
        wanted,
    )


SHARED = {
    "load_balance": {"share": 0.05, "scope": "sequence"},
    "variance": {"share": 0.1, "schedule": {"kind": "linear", "warmup_steps": 4}},
    "specialization": {"share": 0.2, "every": 2},
    "erc": {"weight": 0.01, "noise": False},
}


def test_a_share_is_found_in_the_first_window_and_acts_from_the_next_step(tmp_path, caplog):
    method = {"terms": SHARED}
    trainer, work, batches = train(tmp_path, method, save_strategy="steps", save_steps=1, steps=4)
    window = [{k: b[k] for k in ("input_ids", "attention_mask", "labels")} for b in batches]
    first, third = logged(trainer, 1), logged(trainer, 3)
    found = {name: first[f"{name}/weight"] for name in SHARED}
    at_weights = {n: {**SHARED[n], "weight": found[n], "share": None} for n in SHARED}
    del at_weights["specialization"]["every"]
    rows = {r["term"]: r for r in measure_strength(adapted(), {"terms": at_weights}, window[:2])}
    assert rows["load_balance"]["share_router"] == pytest.approx(0.05, rel=1e-4)
    assert rows["variance"]["share_router"] == pytest.approx(0.1, rel=1e-4)
    assert rows["specialization"]["share_experts"] == pytest.approx(0.2, rel=1e-4)
    assert found["erc"] == 0.01
    # Found again at step 2 (0-based), on other weights and data; the others stay.
    assert third["specialization/share_experts"] == pytest.approx(0.2, rel=1e-6)
    assert third["specialization/weight"] != pytest.approx(found["specialization"], rel=1e-3)
    assert third["variance/weight"] == found["variance"]
    assert work.objective.weights["variance"] == pytest.approx(found["variance"])  # warmed up
    # The step that is measured has none of them in it.
    plain, *_ = train(tmp_path / "plain", {"terms": {"erc": SHARED["erc"]}}, steps=1)
    one_step, *_ = train(tmp_path / "one", method, steps=1)
    for (name, one), two in zip(
        plain.model.named_parameters(), one_step.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    # A resume goes on with what was found, and finds what is due.
    again, resumed, _ = train(
        tmp_path, method, steps=4, resume=str(tmp_path / "checkpoint-2"), save_strategy="no"
    )
    assert not logged(again, 4) and logged(again, 3).keys() == third.keys()
    for name, weight in work.objective.full_weights.items():
        assert resumed.objective.full_weights[name] == pytest.approx(weight, rel=1e-5), name
    assert resumed.objective.full_weights["variance"] == found["variance"]


def test_a_share_in_a_plain_loop_and_every_so_many_steps():
    model = adapted().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    method = {"terms": {"dpp": {"share": 0.3}}, "strength": {"every": 2}}
    seen = []
    with Specialization(model, method) as work:
        work.strength.on_measured.append(lambda step, rows: seen.append((step, rows[0].row())))
        for batch in (*BATCHES, *BATCHES):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            work.step()
    assert [step for step, _ in seen] == [0, 2]
    weight = work.objective.full_weights["dpp"]
    assert seen[0][1]["weight"] == seen[1][1]["weight"] == weight
    assert seen[0][1]["share_experts"] == pytest.approx(0.3)
    assert seen[1][1]["share_experts"] != pytest.approx(0.3, rel=1e-3)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_base_model().model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*alpha")
def test_a_share_that_no_weight_gives_is_refused():
    terms = {"erc": {"share": 0.1, "alpha": 1e6}}
    with pytest.raises(ObjectiveError, match=r"erc\.share: no weight gives it a share of 0\.1"):
        measure_strength(adapted(), {"terms": terms}, BATCHES)
    rows = measure_strength(adapted(), {"terms": {"erc": {"weight": 1.0, "alpha": 1e6}}}, BATCHES)
    assert rows[0]["share_router"] == 0 and rows[0]["weight_for_10_percent"] is None


def test_a_share_needs_an_optimizer_step_to_be_found():
    model = adapted().train()
    with Specialization(model, {"terms": {"dpp": {"share": 0.3}}}) as work:
        model(**BATCHES[0]).loss.backward()
        with pytest.raises(ObjectiveError, match=r"dpp\.share: .* no torch\.optim\.Optimizer"):
            work.step()


def test_deepspeed_is_refused_for_a_share_and_said_without(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with (
        pytest.raises(ObjectiveError, match=r"dpp\.share: .*DeepSpeed"),
        Specialization(adapted(), {"terms": {"dpp": {"share": 0.3}}}),
    ):
        pass
    with Specialization(adapted(), {"terms": {"dpp": {"weight": 0.3}}}):
        pass
    assert "strength is not measured: DeepSpeed" in caplog.text


def test_whispers_and_drowning_are_said(caplog):
    terms = {"variance": {"weight": 1e-5}, "z_loss": {"weight": 9.0}, "dpp": {"share": 0.3}}
    rows = measure_strength(adapted(), {"terms": terms}, BATCHES)
    said = [r.getMessage() for r in caplog.records if r.name.endswith("training.strength")]
    whisper, drowned = (r for r in said if "dpp" not in r)
    assert "variance: at weight 1e-05" in whisper and "too little to show" in whisper
    assert f"weight {rows[0]['weight_for_10_percent']:.3g} would be 10 %" in whisper
    assert "z_loss: at weight 9" in drowned and "drowns it" in drowned
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "dpp" in r.msg]) == 0


def test_window_without_labels_is_refused():
    batch = {k: v for k, v in BATCHES[0].items() if k != "labels"}
    for window in ([], [batch]):
        with pytest.raises(ObjectiveError, match="at least one batch, each with labels"):
            measure_strength(adapted(), "erc", window)


def test_inspect_measures_what_the_run_then_logs_and_the_recipe_notes_the_weight(tmp_path):
    from typer.testing import CliRunner

    from moe_finetune.cli import app
    from moe_finetune.recipe.schema import load_recipe
    from moe_finetune.run import run_recipe

    checkpoint = tiny.save("qwen3_moe", tmp_path / "model", num_hidden_layers=2)
    lines = [{"text": f"{i} and {i * 7} are {i * 8}. " * (1 + i % 3)} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {{path: {checkpoint}, dtype: float32}}
method:
  preset: orthogonal_variance
  terms: {{variance: {{share: 0.2}}}}
lora: {{rank: 4, alpha: 8.0, dropout: 0.0, targets: [attention, experts]}}
data: {{train: {tmp_path / "data.jsonl"}, max_length: 60, packing: true}}
trainer:
  max_steps: 2
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  logging_steps: 1
  report_to: none
  save_strategy: "no"
export: {{merge: false}}
"""
    )
    command = ["inspect", str(checkpoint), "--recipe", str(recipe), "--strength"]
    shown = CliRunner().invoke(app, [*command, "--format", "json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert [row["term"] for row in rows] == ["load_balance", "orthogonality", "variance"]
    assert rows[2]["share_router"] == pytest.approx(0.2)
    output = run_recipe(load_recipe(recipe), tmp_path / "run")
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert not any(key.startswith("strength/") for key in logged[1])
    for row in rows:
        for key in ("weight", "share_router", "share_experts", "cosine_router"):
            got = logged[0][f"strength/{row['term']}/{key}"]
            assert got == pytest.approx(row[key], rel=1e-4, abs=1e-6), (row["term"], key)
    noted = (output / "recipe.yaml").read_text()
    weight = logged[0]["strength/variance/weight"]
    assert "share: 0.2" in noted and f"weight: {weight!r}" in noted
    assert load_recipe(output / "recipe.yaml").hash == load_recipe(recipe).hash


def test_a_share_under_dpo_is_one_of_the_preference_losss_gradient(tmp_path):
    from trl import DPOConfig, DPOTrainer

    from tests.training.test_trainers import COMMON, Policy, explicit, gradients

    texts = [
        {"prompt": f"Say {i}.", "chosen": f" It is {i}.", "rejected": f" No, {i + 7}!"}
        for i in range(4)
    ]
    model = adapted()
    callback = SpecializationCallback({"terms": {"specialization": {"share": 0.2}}})
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, **COMMON),
        train_dataset=Dataset.from_list(texts),
        processing_class=tiny.tokenizer(),
        callbacks=[callback],
    )
    callback.attach(trainer)
    policy, kept = Policy(model), []
    clip = trainer.accelerator.clip_grad_norm_

    def keep(*args, **kwargs):
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        kept.append((found, len(policy.inputs)))
        return clip(*args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = keep
    trainer.train()
    (preference, forwards), work = kept[0], callback.specialization
    window = policy.inputs[1:forwards]  # without the probing forward, nor what is run again later
    weight = work.objective.full_weights["specialization"]
    fresh = adapted().train()
    for batch in window:
        explicit(fresh, batch, {"specialization": {"weight": weight}}, 1.0 / len(window))
    own = gradients(fresh)

    def norm(grads):
        return sum(g.double().square().sum() for n, g in grads.items() if ".experts." in n) ** 0.5

    assert float(norm(own) / norm(preference)) == pytest.approx(0.2, rel=1e-3)
