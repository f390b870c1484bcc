"""The miniature's runs on tiny models: what is measured, scored and trained."""

import json
import math
import os
import signal
import sys

import numpy as np
import pytest
import torch

from eval.demo.rows import write_rows
from eval.effects.finetune import Workbench, data_in, run_finetune, topic_frequencies
from eval.effects.probe import IGNORED, measure, padded_batches
from eval.effects.score import HeldOutTasks
from eval.effects.scratch import run_scratch, schedule
from eval.effects.settings import FinetuneSection, ScratchSection
from moe_finetune.metrics import (
    activation_cosine,
    conditional_mean_rank,
    coupling_mass,
    expert_overlap,
    output_cosine,
    score_variance,
)
from moe_finetune.moe.hooks import Recorder
from moe_finetune.recipe.shipped import recipes_folder
from tests import tiny

CLOZE = {"code": "code_test.jsonl", "prose": "prose_test.jsonl"}


def _rows(lengths=(7, 31, 12, 19), seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        ids = rng.integers(4, 260, length).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * 3 + ids[3:]})
    return rows


def _frequencies(experts=12):
    return np.random.default_rng(1).random((tiny.VOCABULARY, experts)).astype(np.float32)


def test_measures_are_those_of_the_rows_one_by_one():
    model = tiny.model("qwen3_moe").train()
    rows, frequencies_VE = _rows(), _frequencies()
    metrics, top1_TL = measure(model, rows, frequencies_VE, embeddings=10_000)
    assert model.training  # left as it was
    layers: dict[int, list] = {}

    def observe(record, _):
        layers.setdefault(record.layer, []).append(record)

    needs = frozenset({"activations", "outputs"})
    loss, learned = 0.0, 0
    with torch.no_grad(), Recorder(model.eval(), observers=[observe], needs=needs, observe="all"):
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            logits_SV = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            for position, label in enumerate(row["labels"][1:]):
                if label != IGNORED:
                    loss, learned = loss - logits_SV[position, label].item(), learned + 1

    def joined(layer, name):
        return torch.cat([getattr(record, name) for record in layers[layer]]).numpy()

    def mean(function):
        return np.mean([function(layer) for layer in layers])

    def overlap(layer):
        return expert_overlap(joined(layer, "inputs_TH"), joined(layer, "probs_TE").argmax(1))

    def rank(layer):
        ids = joined(layer, "token_ids_T")
        return conditional_mean_rank(joined(layer, "logits_TE"), ids, frequencies_VE)[0]

    expected = {
        "validation_loss": loss / learned,
        "score_variance": mean(lambda n: score_variance(joined(n, "scores_TE"))),
        "activation_cosine": mean(lambda n: activation_cosine(joined(n, "activations_TKD"))),
        "output_cosine": mean(lambda n: output_cosine(joined(n, "outputs_TKH"))),
        "expert_overlap": mean(overlap),
        "conditional_mean_rank": mean(rank),
        "coupling_mass": np.mean(
            [
                coupling_mass(
                    joined(a, "probs_TE"), joined(a, "index_TK"), joined(b, "probs_TE"), 3
                )
                for a, b in ((0, 1), (1, 2))
            ]
        ),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-3), name
    top = np.stack([joined(layer, "probs_TE").argmax(1) for layer in sorted(layers)], 1)
    assert (top1_TL == top).mean() > 0.99
    with Recorder(model):  # and nothing is left on it
        pass


def test_batches_hold_every_row_once_within_the_limit():
    rows = _rows((5, 9, 40, 3, 3, 8))
    batches = list(padded_batches(rows, limit=30))
    seen = []
    for batch in batches:
        assert batch["input_ids"].numel() <= 30 or len(batch["input_ids"]) == 1
        for ids_S, mask_S, labels_S in zip(*batch.values(), strict=True):
            length = int(mask_S.sum())
            assert mask_S[:length].all() and (labels_S[length:] == IGNORED).all()
            seen.append(
                {"input_ids": ids_S[:length].tolist(), "labels": labels_S[:length].tolist()}
            )
    assert seen == rows


def test_topics_are_groups_of_like_documents():
    documents = [[5, 5, 6], [5, 6, 6], [8, 9], [9, 8, 9]]
    table_VE = topic_frequencies(documents, vocabulary=11, experts=2)
    np.testing.assert_allclose(table_VE.sum(1), 1, rtol=1e-6)
    assert table_VE[5].max() > 0.99 and table_VE[9].max() > 0.99
    assert table_VE[5].argmax() == table_VE[6].argmax() != table_VE[8].argmax()
    np.testing.assert_allclose(table_VE[1], 0.5)


def _write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def test_choices_are_judged_as_by_single_forwards(tmp_path):
    model, tokenizer = tiny.model("qwen3_moe", seed=3), tiny.tokenizer()
    _write(tmp_path / "arithmetic_test.jsonl", [{"question": "1 + 1 =", "answer": "2"}])
    for index, name in enumerate(CLOZE.values()):
        choices = ["one two three", "two one", "six"]
        _write(
            tmp_path / name,
            [
                {"question": f"{index} {i * i}", "choices": choices, "answer": i % 3}
                for i in range(9)
            ],
        )
    scores = HeldOutTasks(tmp_path, tokenizer, limit=8).score(model)

    def log_likelihood(question, choice) -> float:
        prompt_ids, choice_ids = tokenizer.encode(question), tokenizer.encode(f" {choice}")
        with torch.no_grad():
            logs = (
                model(input_ids=torch.tensor([prompt_ids + choice_ids])).logits[0].log_softmax(-1)
            )
        return sum(
            logs[len(prompt_ids) - 1 + i, token].item() for i, token in enumerate(choice_ids)
        )

    for domain, name in CLOZE.items():
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()][:8]
        right = [
            np.argmax([log_likelihood(row["question"], c) for c in row["choices"]]) == row["answer"]
            for row in rows
        ]
        assert scores[domain] == np.mean(right)
    assert scores["mean"] == pytest.approx((0 + scores["code"] + scores["prose"]) / 3)


def test_an_answer_counts_only_when_greedy_decoding_gives_all_of_it_and_ends(tmp_path):
    """A model that is trained on one answer alone gets that one right and no other."""
    tokenizer, model = tiny.tokenizer(), tiny.model("qwen3_moe", seed=3).train()
    for name in CLOZE.values():
        _write(tmp_path / name, [{"question": "a", "choices": ["b c", "c b"], "answer": 0}])
    items = [
        {"question": "7 + 5 =", "answer": "12"},
        {"question": "7 + 5 =", "answer": "1"},
        {"question": "7 + 5 =", "answer": "123"},
        {"question": "7 + 5 =", "answer": "13"},
    ]
    _write(tmp_path / "arithmetic_test.jsonl", items)
    ids = [*tokenizer.encode("7 + 5 = 12"), tokenizer.eos_token_id]
    inputs = torch.tensor([ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        model(input_ids=inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert HeldOutTasks(tmp_path, tokenizer, limit=1).score(model)["arithmetic"] == 0.25
    _write(tmp_path / "arithmetic_test.jsonl", items[:1])
    assert HeldOutTasks(tmp_path, tokenizer, limit=1).score(model)["arithmetic"] == 1
    assert model.training


def test_data_that_were_being_written_when_a_study_was_killed_are_written_anew(tmp_path):
    def die(event, arguments):
        if event == "open" and str(arguments[0]).endswith("arithmetic_test.jsonl"):
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.addaudithook(die)
        data_in(tmp_path)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (partial,) = tmp_path.glob(".data.partial-*")
    assert (partial / "train.jsonl").is_file() and not (tmp_path / "data").exists()
    data = data_in(tmp_path)
    names = {file.name for file in (recipes_folder() / "demo").glob("*.jsonl")}
    assert {path.name for path in data.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.fixture
def bench(tiny_checkpoint, tmp_path):
    write_rows(tmp_path / "data", 0, 40, 8, 5, 3, 10)
    section = FinetuneSection(
        recipe={
            "model": {"path": str(tiny_checkpoint("qwen3_moe"))},
            "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]},
            "data": {"max_length": 200},
            "trainer": {
                "max_steps": 4,
                "per_device_train_batch_size": 3,
                "learning_rate": 1e-2,
                "logging_steps": 1,
            },
        },
        arms={"none": {"preset": "none"}},
        probes=2,
        embeddings=50,
        tasks=3,
    )
    return Workbench(section, tmp_path)


@pytest.mark.slow
def test_an_arm_trains_is_probed_and_scored_and_probing_changes_nothing(bench, tmp_path):
    method = {"preset": "specialization_coupling"}
    result = run_finetune(bench, method, 5, tmp_path / "a")
    assert [row["step"] for row in result["probes"]] == [0, 2, 4]
    assert "stability" not in result["probes"][0]
    assert all(0 < row["stability"] < 1 for row in result["probes"][1:])
    assert [row["step"] for row in result["log"]] == [1, 2, 3, 4]
    assert all("losses/coupling" in row for row in result["log"])
    assert set(result["scores"]) == {"arithmetic", "code", "prose", "mean"}
    json.dumps(result, allow_nan=False)
    values = ("loss", "losses/coupling", "losses/specialization")
    bench.section = bench.section.model_copy(update={"probes": 4})
    repeated = run_finetune(bench, method, 5, tmp_path / "b")
    assert len(repeated["probes"]) == 5
    for a, b in zip(result["log"], repeated["log"], strict=True):
        assert [a[name] for name in values] == [b[name] for name in values]
    assert repeated["probes"][2]["coupling_mass"] == result["probes"][1]["coupling_mass"]
    other = run_finetune(bench, method, 6, tmp_path / "c")
    assert other["log"][0]["loss"] != result["log"][0]["loss"]
    assert other["probes"][0]["coupling_mass"] == result["probes"][0]["coupling_mass"]


@pytest.mark.slow
def test_fresh_rows_are_not_the_demos_and_every_arm_of_a_seed_answers_the_same_sums(
    bench, tiny_checkpoint, tmp_path
):
    section = bench.section.model_copy(update={"fresh_rows": 9, "sums": 7})
    fresh = Workbench(section, tmp_path)
    demo = {tuple(row["input_ids"]) for row in [*bench.validation, *bench.train.to_list()]}
    assert 0 < len(fresh.validation) <= 9
    assert not demo & {tuple(row["input_ids"]) for row in fresh.validation}
    assert fresh.sums(5) == fresh.sums(5) != fresh.sums(6) and len(fresh.sums(5)) == 7
    learned = run_finetune(fresh, {"preset": "none"}, 5, tmp_path / "sums")
    assert "sums" not in learned["probes"][0]
    assert [0 <= row["sums"] <= 100 for row in learned["probes"][1:]] == [True, True]
    # Asking sums changes nothing else.
    plain = run_finetune(bench, {"preset": "none"}, 5, tmp_path / "plain")
    assert [row["loss"] for row in learned["log"]] == [row["loss"] for row in plain["log"]]


@pytest.mark.slow
def test_the_bias_and_the_table_of_a_method_are_at_work(bench, tmp_path):
    supervised = run_finetune(bench, {"preset": "supervised_routing"}, 1, tmp_path / "s")
    assert all("losses/supervised_routing" in row for row in supervised["log"])
    free = run_finetune(bench, {"bias_update": 0.5}, 1, tmp_path / "f")
    plain = run_finetune(bench, {"preset": "none"}, 1, tmp_path / "n")
    # A bias this large decides the selection, so the probe must have seen it.
    assert free["probes"][-1]["max_violation"] != plain["probes"][-1]["max_violation"]
    assert free["log"][0]["loss"] == plain["log"][0]["loss"]


SCRATCH = ScratchSection(
    arms={"a": {}},
    model={"hidden_size": 64, "layers": 2, "experts": 6, "top_k": 3, "expert_width": 32},
    mixture={"code_rows": 1, "prose_rows": 1, "arithmetic_rows": 1, "length": 96},
    steps=6,
    learning_rate=5e-3,
)


@pytest.mark.slow
def test_pretraining_from_scratch_learns_and_arms_share_their_start():
    plain = run_scratch(SCRATCH, {"preset": "none"}, 1)
    coupled = run_scratch(SCRATCH, {"preset": "specialization_coupling_scratch"}, 1)
    assert plain["diverged"] is None and len(plain["loss"]) == 6
    assert plain["loss"][-1] < plain["loss"][0] - 0.5
    assert plain["held_out"] < plain["loss"][0]
    # The logged loss is the language model's, so it is equal before the first step.
    assert coupled["loss"][0] == plain["loss"][0] and coupled["loss"][-1] != plain["loss"][-1]
    assert coupled["values"]["losses/coupling"] < 0
    assert plain == run_scratch(SCRATCH, {"preset": "none"}, 1)
    assert run_scratch(SCRATCH, {"preset": "none"}, 2)["loss"] != plain["loss"]


@pytest.mark.slow
def test_a_run_that_diverges_says_where():
    unbounded = {"terms": {"ncl": {"weight": 1e12, "normalize": False}}}
    section = SCRATCH.model_copy(update={"learning_rate": 1e6, "gradient_norm": 1e9})
    result = run_scratch(section, unbounded, 1)
    assert result["diverged"] is not None and result["held_out"] == math.inf
    assert len(result["loss"]) == result["diverged"] + 1


def test_the_schedule_warms_up_and_falls_to_a_tenth():
    shares = [schedule(step, 20) for step in range(20)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[2:] == sorted(shares[2:], reverse=True)
    assert 0.1 < shares[-1] < 0.11
