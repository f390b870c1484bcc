import json

import numpy as np
import pytest

from moe_finetune.errors import TraceError
from moe_finetune.metrics import (
    conditional_activation,
    domain_information,
    expert_overlap,
    max_violation,
    path_stability,
    routing_entropy,
    routing_variance,
    score_variance,
    top_choice,
)
from moe_finetune.metrics.arrays import entropy
from moe_finetune.metrics.experts import separation
from moe_finetune.routing import comparison as compare_module
from moe_finetune.routing.comparison import compare_traces
from moe_finetune.routing.metrics_of_trace import summarize_trace
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.trace_writer import TraceWriter

LAYERS, E, K, H = (0, 1, 4), 8, 3, 6


def loads(index):
    """Dispatches ``(..., E)`` of ``(T, K)`` or ``(T, L, K)``."""
    return (index[..., None] == np.arange(E)).sum((0, -2))


def record(
    folder, seed=0, sequences=20, logits_shift=0.0, extras=True, model_type="olmoe", chunk=9_000
):
    """A trace of sequences of 11 to 16 tokens; ``logits_shift`` moves the routing of some."""
    shared = np.random.default_rng(7)
    own = np.random.default_rng(seed)
    with TraceWriter(
        folder,
        model_type=model_type,
        checkpoint="tiny",
        layers=LAYERS,
        num_experts=E,
        top_k=K,
        hidden_size=H,
        domains=["law", "code"],
        weights_dtype="float32",
        embedding_share=0.7,
        part_bytes=chunk,
    ) as writer:
        for number in range(sequences):
            tokens = 11 + number % 6
            logits = shared.normal(size=(tokens, len(LAYERS), E)) + 0.5 * np.arange(E)
            logits[..., : number % E] += 0.7  # sequences differ from each other
            logits += logits_shift * own.normal(size=logits.shape)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            index = np.argsort(-probs, axis=-1)[..., K - 1 :: -1]
            options = {}
            if extras:
                positions = writer.sample(tokens)
                options = {
                    "probs_TLE": probs,
                    "positions_N": positions,
                    "embeddings_NLH": own.normal(size=(len(positions), len(LAYERS), H)),
                }
            writer.append(
                index,
                np.take_along_axis(probs, index, -1),
                np.full(tokens, number),
                "code" if number % 4 == 1 else "law",
                **options,
            )
    return RoutingTrace.open(folder)


def test_summary_equals_the_functions(tmp_path):
    trace = record(tmp_path / "t")
    assert len(trace.info.parts) > 2
    found = summarize_trace(trace, sample=10_000)
    ids, weights = trace.load("ids"), trace.load("weights")
    probs, domain = trace.load("probs").astype(float), trace.load("domain")
    probs /= probs.sum(-1, keepdims=True)
    embeddings, labels = trace.load("embeddings"), trace.load("embedding_labels")
    counts_GE = [
        np.stack([loads(ids[domain == g, layer]) for g in (0, 1)]) for layer in range(len(LAYERS))
    ]
    for layer in range(len(LAYERS)):
        scores = np.zeros((len(ids), E))
        shares = weights[:, layer] / weights[:, layer].sum(-1, keepdims=True)
        np.put_along_axis(scores, ids[:, layer].astype(np.int64), shares, axis=-1)
        mean_E, of_token = scores.mean(0), routing_entropy(scores)
        wanted = {
            "max_violation": max_violation(loads(ids[:, layer])),
            "score_variance": score_variance(scores),
            "score_entropy": routing_entropy(scores),
            "expert_entropy": entropy(mean_E),
            "mutual_information": entropy(mean_E) - of_token,
            "collision_entropy": -np.log((mean_E**2).sum()),
            "routing_variance": routing_variance(probs[:, layer]),
            "entropy": routing_entropy(probs[:, layer]),
            "domain_information": domain_information(counts_GE[layer])["mutual_information"],
            "expert_overlap": expert_overlap(embeddings[:, layer], labels[:, layer]),
            "silhouette": separation(embeddings[:, layer], labels[:, layer])[1],
        }
        got = {name: values[layer] for name, values in found["per_layer"].items()}
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-9)
    arrays = found["arrays"]
    assert np.array_equal(arrays["load_LE"], loads(ids))
    for layer in range(len(LAYERS) - 1):
        assert arrays["conditional_activation_LEE"][layer] == pytest.approx(
            conditional_activation(ids[:, layer], ids[:, layer + 1], E)
        )
        shares = counts_GE[layer] / counts_GE[layer].sum(-1, keepdims=True)
        assert arrays["domain_shares_GLE"][:, layer] == pytest.approx(shares)
    assert arrays["mean_score_LE"].sum(-1) == pytest.approx(1.0)
    for name, value in found["mean"].items():
        assert value == pytest.approx(np.mean(found["per_layer"][name]))
    assert sum(found["trace"]["domains"].values()) == trace.num_tokens
    json.dumps({key: value for key, value in found.items() if key != "arrays"}, allow_nan=False)


def test_summary_reports_its_sample(tmp_path):
    trace = record(tmp_path / "t")
    found = summarize_trace(trace, sample=40, seed=3)
    assert found["sample"] == {"embeddings": 40, "neighbors": 10, "seed": 3}
    assert summarize_trace(trace, sample=40)["sample"]["seed"] == 0
    chosen = np.sort(np.random.default_rng(3).choice(trace.num_embeddings, 40, replace=False))
    embeddings, labels = trace.load("embeddings")[chosen], trace.load("embedding_labels")[chosen]
    wanted = [expert_overlap(embeddings[:, n], labels[:, n]) for n in range(len(LAYERS))]
    assert found["per_layer"]["expert_overlap"] == pytest.approx(wanted)
    few = summarize_trace(trace, sample=2)  # too few for clusters, enough for a neighbour
    assert few["per_layer"]["silhouette"] == [None] * len(LAYERS)
    assert few["mean"]["silhouette"] is None


def test_summary_of_ids_alone(tmp_path):
    trace = record(tmp_path / "t", extras=False)
    with TraceWriter(
        tmp_path / "ids", model_type="m", checkpoint="c", layers=LAYERS, num_experts=E, top_k=K
    ) as writer:
        writer.append(trace.load("ids"), None, trace.load("seq"))
    found = summarize_trace(RoutingTrace.open(tmp_path / "ids"))
    assert list(found["per_layer"]) == ["max_violation"]
    whole = summarize_trace(trace)
    assert found["per_layer"]["max_violation"] == whole["per_layer"]["max_violation"]
    assert found["sample"]["embeddings"] == 0


def test_summary_of_the_real_router(data_file):
    for task, wanted in (("intent", 2.81), ("law", 2.52)):
        trace = RoutingTrace.open(data_file(f"deepseek_v2_lite_routing_{task}.npz"))
        found = summarize_trace(trace)
        assert found["mean"]["max_violation"] == pytest.approx(wanted, abs=0.005)


def test_differences_and_stability_of_a_moved_router(tmp_path):
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", logits_shift=2.0, chunk=2_000)
    found = compare_traces(a, b, bootstrap=400)
    summaries = summarize_trace(a)["mean"], summarize_trace(b)["mean"]
    for name, entry in found["metrics"].items():
        assert (entry["a"], entry["b"]) == pytest.approx((summaries[0][name], summaries[1][name]))
        assert entry["difference"] == pytest.approx(entry["b"] - entry["a"])
        assert np.mean(found["per_layer"][name]) == pytest.approx(entry["difference"])
        assert entry["low"] < entry["high"]
    assert found["metrics"]["score_entropy"]["high"] < 0  # sharper than chance would make it
    tops = [top_choice(trace.load("ids"), trace.load("weights")) for trace in (a, b)]
    stability = found["path_stability"]
    assert stability["value"] == pytest.approx(path_stability(*tops))
    assert stability["per_layer"] == pytest.approx((tops[0] == tops[1]).mean(0).tolist())
    assert stability["low"] < stability["value"] < stability["high"] < 1


def test_bootstrap_against_loop(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", logits_shift=1.0)
    found = compare_traces(a, b, bootstrap=60, seed=4, level=0.8)
    ids = [trace.load("ids") for trace in (a, b)]
    seq = a.load("seq")
    draws = np.random.default_rng(4).multinomial(20, np.full(20, 1 / 20), size=60)
    differences = []
    for draw in draws:
        rows = np.concatenate([np.flatnonzero(seq == n) for n in range(20) for _ in range(draw[n])])
        values = [np.mean([max_violation(load) for load in loads(index[rows])]) for index in ids]
        differences.append(values[1] - values[0])
    entry = found["metrics"]["max_violation"]
    assert (entry["low"], entry["high"]) == pytest.approx(
        tuple(np.quantile(differences, [0.1, 0.9]))
    )


def test_traces_of_other_data_are_not_paired(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", sequences=13)
    found = compare_traces(a, b, bootstrap=30)
    assert not found["paired"]
    assert found["path_stability"] is None
    assert found["units"] == [20, 13]


def test_many_sequences_are_joined(tmp_path, monkeypatch):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", logits_shift=1.0)
    wanted = compare_traces(a, b, bootstrap=20)
    monkeypatch.setattr(compare_module, "MAX_UNITS", 7)
    found = compare_traces(a, b, bootstrap=20)
    assert found["units"] == [7, 7]
    for name, entry in found["metrics"].items():
        assert entry["difference"] == pytest.approx(wanted["metrics"][name]["difference"])


def test_other_models_are_refused(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", model_type="mixtral")
    with pytest.raises(TraceError, match="model type mixtral, expected olmoe"):
        compare_traces(a, b)
    with pytest.raises(ValueError, match="bootstrap, level: got 0"):
        compare_traces(a, a, bootstrap=0)
