"""Snapshots hold what the report draws, and evaluations measure what needs vectors."""

import json

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from moe_finetune import SpecializationCallback
from moe_finetune.data.load_rows import load_examples
from moe_finetune.lora.targets import add_lora
from moe_finetune.metrics import coherence_barrier, mutual_coherence
from moe_finetune.metrics.experts import separation
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import DataSection, LoraSection
from moe_finetune.routing.sums import squared_cosine
from moe_finetune.training.measures import routing_samples as sampling
from moe_finetune.training.measures.routing_samples import (
    Sample,
    evaluation_metrics,
    evaluation_sample,
    sample_examples,
    take_snapshot,
)
from tests.support import tiny
from tests.support.tiny_adapter import random_factors


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = add_lora(tiny.model("qwen3_moe"), LoraSection(rank=4, alpha=12.0), "full")
    random_factors(made, 0.1)
    return made


def examples() -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    lengths = {"law": (23, 9), "math": (14,)}
    return [
        {"domain": name, "input_ids": torch.randint(4, 260, (n,), generator=generator).tolist()}
        for name, rows in lengths.items()
        for n in rows
    ]


def records(model, rows):
    """Every layer's records of one forward per row."""
    seen: dict[int, list] = {}
    needs = frozenset({"outputs", "activations"})
    recorder = Recorder(
        model,
        observers=[lambda record, _: seen.setdefault(record.layer, []).append(record)],
        needs=needs,
        observe="all",
    )
    with torch.no_grad(), recorder:
        for row in rows:
            model(input_ids=torch.tensor([row["input_ids"]]))
    return seen


def numbers(value):
    """All numbers of a snapshot, in their order."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_rows_together_give_what_they_give_alone(model, tmp_path, monkeypatch):
    rows, found = examples(), []
    for size, forwards in ((1, 3), (2 * 23, 2), (1000, 1)):
        monkeypatch.setattr(sampling, "BATCH", size)
        ids = [row["input_ids"] for row in rows]
        assert len(list(sampling._batches(ids))) == forwards
        found.append(take_snapshot(model, rows, tmp_path / "s.json"))
    for other in found[1:]:
        assert other["load"] == found[0]["load"] and other["domains"] == found[0]["domains"]
        assert list(numbers(other)) == pytest.approx(list(numbers(found[0])), rel=1e-5, abs=1e-7)


def test_a_snapshot_is_what_the_layers_computed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "BATCH", 1)  # row by row, as `records`
    rows = examples()
    model.train()
    found = take_snapshot(model, rows, tmp_path / "s.json", None, tiny.tokenizer())
    assert model.training and json.loads((tmp_path / "s.json").read_text()) == found
    model.eval()
    seen = records(model, rows)
    top_k, barrier = 3, coherence_barrier(3)
    for layer in range(3):
        index = torch.cat([r.index_TK for r in seen[layer]]).numpy()
        assert found["load"][layer] == np.bincount(index.ravel(), minlength=12).tolist()
        law = np.bincount(index[:32].ravel(), minlength=12).tolist()
        assert found["domains"]["law"][layer] == law
        outputs_TKH = torch.cat([r.outputs_TKH for r in seen[layer]])
        assert outputs_TKH.shape[:2] == (46, top_k)
        coherence_T = np.array([mutual_coherence(outputs_KH) for outputs_KH in outputs_TKH])
        row = found["coherence"]["per_layer"][layer]
        assert row["mean"] == pytest.approx(coherence_T.mean(), rel=1e-4)
        assert row["share_below"] == pytest.approx((coherence_T < barrier).mean())
        inputs = torch.cat([r.inputs_TH for r in seen[layer]])
        top = torch.cat([r.scores_TE for r in seen[layer]]).argmax(1)
        metrics = {name: value["per_layer"][layer] for name, value in found["metrics"].items()}
        overlap, clusters = separation(inputs, top)
        assert metrics["expert_overlap"] == pytest.approx(overlap)
        assert metrics["silhouette"] == pytest.approx(clusters)
        gram = outputs_TKH @ outputs_TKH.transpose(1, 2)
        assert metrics["output_cosine"] == pytest.approx(
            squared_cosine(gram).mean().item(), rel=1e-4
        )
    middle = torch.cat([r.probs_TE for r in seen[1]]).argmax(1).tolist()
    law, math = found["colored_text"]
    assert (law["domain"], math["domain"]) == ("law", "math") and law["layer"] == 1
    assert law["experts"] == middle[:23] and math["experts"] == middle[32:]
    assert law["tokens"] == [tiny.tokenizer().decode([i]) for i in rows[0]["input_ids"]]


def test_gate_rows_have_the_adapter_in_them(model):
    found = {}

    def keep(record, _):
        found[record.layer] = record.expert_factors("gate").of([0, 8])

    with torch.no_grad(), Recorder(model, observers=[keep], observe="all"):
        model(input_ids=torch.arange(4, 15)[None])
    merged = add_lora(tiny.model("qwen3_moe"), LoraSection(rank=4, alpha=12.0), "full")
    merged.load_state_dict(model.state_dict())
    whole = merged.merge_and_unload().model.layers[1].mlp.experts.gate_up_proj[[0, 8], :48]
    torch.testing.assert_close(found[1], whole.detach(), rtol=1e-4, atol=1e-5)


def test_a_sample_keeps_to_its_limit(model):
    sample = Sample(model_facts(model), max_tokens=17)
    recorder = Recorder(model, observers=[sample], observe="all",
                        needs=frozenset({"activations_gram", "outputs_gram"}))  # fmt: skip
    batch = tiny.batch()
    with torch.no_grad(), recorder:
        for _ in range(2):
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert all(len(sample.rows(name, 2)) == 17 for name in ("index", "top"))
    sums = sample.measures.sums
    assert sums.column(sums.array(), "tokens").tolist() == [[17] * 3]


def test_embeddings_are_drawn_over_all_rows_alike_in_every_layer(model, monkeypatch):
    monkeypatch.setattr("moe_finetune.training.measures.routing_samples.MAX_EMBEDDINGS", 30)
    sample = Sample(model_facts(model), max_tokens=90)
    rows = [{"input_ids": list(range(4 + 20 * n, 24 + 20 * n))} for n in range(5)]  # the last cut
    seen = records(model, rows)
    recorder = Recorder(model, observers=[sample], observe="all",
                        needs=frozenset({"activations_gram", "outputs_gram"}))  # fmt: skip
    with torch.no_grad(), recorder:
        for row in rows:
            model(input_ids=torch.tensor([row["input_ids"]]))
    drawn = []
    for layer in (0, 2):
        inputs_TH = torch.cat([r.inputs_TH for r in seen[layer]])[:90].numpy()
        top_T = torch.cat([r.scores_TE for r in seen[layer]])[:90].argmax(1).numpy()
        kept_NH, top_N = sample.embeddings(layer)
        assert len(kept_NH) == 30
        same_NT = (kept_NH[:, None] == inputs_TH).all(-1)
        assert (same_NT.sum(1) == 1).all(), "each is one token's"
        at_N = same_NT.argmax(1)
        assert (np.diff(at_N) > 0).all() and (top_N == top_T[at_N]).all()
        drawn.append(at_N.tolist())
    assert drawn[0] == drawn[1]
    counts = np.bincount(np.array(drawn[0]) // 20, minlength=5)
    assert (counts[:4] >= 3).all() and counts[4] >= 1, "no row is left out"


def test_labels_are_the_selected_expert_of_largest_weight(tmp_path):
    """Moonlight selects by biased scores: its most probable expert may not be selected."""
    biased = tiny.model("deepseek_v3")
    with torch.no_grad():
        for name, buffer in biased.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.mul_(4)
    rows = examples()
    seen = records(biased, rows)
    found = take_snapshot(biased, rows, tmp_path / "s.json", None, tiny.tokenizer())
    index_TK = torch.cat([r.index_TK for r in seen[2]])
    weights_TK = torch.cat([r.weights_TK for r in seen[2]])
    largest_T = index_TK.gather(1, weights_TK.argmax(1, keepdim=True)).squeeze(1)
    probable_T = torch.cat([r.probs_TE for r in seen[2]]).argmax(1)
    assert (largest_T != probable_T).float().mean() > 0.1
    law = found["colored_text"][0]
    assert law["layer"] == 2 and law["experts"] == largest_T[:23].tolist()
    inputs_TH = torch.cat([r.inputs_TH for r in seen[2]])
    overlap, _ = separation(inputs_TH, largest_T)
    place = found["layers"].index(2)
    assert found["metrics"]["expert_overlap"]["per_layer"][place] == pytest.approx(overlap)
    assert overlap != pytest.approx(separation(inputs_TH, probable_T)[0])


def test_every_file_is_a_domain(tmp_path):
    for name, lines in {"law": ["the court", "a writ"], "math": ["1 + 1"]}.items():
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("law", "math")]
    tokenizer = tiny.tokenizer()
    sources = load_examples(DataSection(train=files, max_length=6), tokenizer, 1).sources
    found = sample_examples(sources, 6)
    assert [row["domain"] for row in found] == ["law", "law", "math"]
    assert tokenizer.decode(found[0]["input_ids"]) == "the co"
    many = ({"input_ids": list(range(3000)), "labels": []} for _ in range(100))
    found = sample_examples([(files[0], many)], 5000)
    assert [len(row["input_ids"]) for row in found] == [3000, 3000, 2192]
    assert {row["domain"] for row in found} == {"law"} and next(many)


@pytest.mark.parametrize("attached", [True, False])
def test_evaluations_measure_what_needs_vectors(tmp_path, attached):
    torch.manual_seed(0)
    made = add_lora(tiny.model("olmoe"), LoraSection(rank=4, alpha=12.0), "full")
    rows = Dataset.from_list([{"input_ids": r["input_ids"], "labels": r["input_ids"]}
                              for r in examples() * 2])  # fmt: skip
    callback = SpecializationCallback("orthogonal_variance")
    arguments = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1, use_cpu=True,
        per_device_train_batch_size=2, per_device_eval_batch_size=4, report_to=[],
        router_aux_loss_coef=0.0, save_strategy="no", logging_steps=1, seed=5,
    )  # fmt: skip
    trainer = SFTTrainer(model=made, args=arguments, train_dataset=rows, eval_dataset=rows,
                         processing_class=tiny.tokenizer(), callbacks=[callback])  # fmt: skip
    if attached:
        callback.attach(trainer)
    callback.routing_file = tmp_path / "routing" / "steps.jsonl"
    trainer.train()
    history = trainer.state.log_history
    found = [row for row in history if "eval_routing/expert_overlap" in row]
    assert [row["step"] for row in found] == [1, 2]
    trained = [row["routing/max_violation"] for row in history if "loss" in row]
    assert len(trained) == 2  # the evaluations' forwards are not counted among the training's
    made.eval()
    recorder = Recorder(made)
    with recorder:
        sample = evaluation_sample(recorder, trainer.get_eval_dataloader())
        assert recorder.plan.observers == () and recorder.plan.observe == "train"
    again = evaluation_metrics(sample)
    lines = [json.loads(line) for line in callback.routing_file.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [1, 2]
    assert lines[1] == sample.routing()
    for name, value in again.items():
        assert found[1][name] == pytest.approx(value, rel=1e-5), name
    assert {"eval_routing/silhouette", "eval_routing/mutual_coherence",
            "eval_routing/output_cosine", "eval_routing/coupling_mass"} <= set(again)  # fmt: skip


def test_measuring_draws_nothing_that_training_would(model):
    loader = torch.utils.data.DataLoader([{"input_ids": torch.arange(4, 24)}], batch_size=1)
    recorder = Recorder(model)
    with recorder:
        before = torch.get_rng_state()
        evaluation_sample(recorder, loader)
        assert torch.equal(torch.get_rng_state(), before)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("streamed", [False, True])
def test_two_ranks_measure_what_one_does(model, streamed):
    """Seven rows of which accelerate would repeat one."""
    generator = torch.Generator().manual_seed(6)
    rows = [{"input_ids": torch.randint(4, 260, (17,), generator=generator)} for _ in range(7)]
    data = Stream(rows) if streamed else rows

    def measured(world, rank):
        loader = prepare_data_loader(
            torch.utils.data.DataLoader(data, batch_size=2, generator=generator),
            num_processes=world,
            process_index=rank,
            put_on_device=False,
            dispatch_batches=False,
        )
        if world > 1:
            divided = [len(batch["input_ids"]) for batch in loader.base_dataloader]
            assert sum(divided) == 4, "half of seven, and one again"
        recorder = Recorder(model)
        with recorder:
            return evaluation_sample(recorder, loader)

    samples = [measured(1, 0), measured(2, 0), measured(2, 1)]
    assert [sample.routing() for sample in samples[1:]] == [samples[0].routing()] * 2
    assert samples[0].routing()["tokens"] == 7 * 17
    wanted = evaluation_metrics(samples[0])
    assert all(evaluation_metrics(sample) == wanted for sample in samples[1:])
