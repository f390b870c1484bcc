import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from moe_finetune import cli
from moe_finetune.checkpoint.adapters import open_adapter
from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import (
    AdapterError,
    DataError,
    NumericsError,
    OutputExistsError,
    TraceError,
)
from moe_finetune.losses.functional import erc_loss
from moe_finetune.metrics import conditional_activation
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.report.analysis import analyze, find_trace
from moe_finetune.routing.measures_of_model import router_geometry
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.trace_writer import TraceWriter
from tests.checkpoint.helpers import adapter as random_adapter


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rows = {
        "law": ["the court finds", "a contract is void when it is signed under duress"],
        "math": ["1 + 1 = 2 and 7 * 6 = 42", "x", "not read, past the limit"],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return {name: [str(folder / f"{name}.jsonl")] for name in rows}


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory, tiny_checkpoint, texts):
    output = tmp_path_factory.mktemp("analysis") / "qwen"
    checkpoint = tiny_checkpoint("qwen3_moe")
    analyze(checkpoint, output, texts, limit=2, probabilities=True)
    return checkpoint, output


def test_the_trace_is_what_the_router_chose(analyzed, texts):
    checkpoint, output = analyzed
    trace = RoutingTrace.open(output / "trace")
    trace.check(model_type="qwen3_moe", layers=(0, 1, 2))
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    ids, seq = trace.load("token_ids"), trace.load("seq")
    assert trace.info.domains == ("law", "math") and seq.max() == 3
    lines = [json.loads(line)["text"] for line in Path(texts["math"][0]).read_text().splitlines()]
    assert tokenizer.decode(ids[seq == 2]).startswith(lines[0])
    for number in range(4):
        rows = seq == number
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor(ids[rows][None].astype(np.int64)), output_router_logits=True
            )
        for layer, logits_TE in enumerate(out.router_logits):
            top = logits_TE.softmax(-1).topk(3, -1)
            kept = trace.load("ids")[rows, layer]
            np.testing.assert_array_equal(np.sort(kept), top.indices.sort(-1).values)
            weights = top.values / top.values.sum(-1, keepdim=True)
            np.testing.assert_allclose(
                np.sort(trace.load("weights")[rows, layer]), weights.sort(-1).values, atol=1e-3
            )
            stored = trace.load("probs")[rows, layer]
            np.testing.assert_allclose(stored, logits_TE.softmax(-1), atol=1e-3)


def test_summary_snapshot_and_page_agree_with_the_trace(analyzed):
    _, output = analyzed
    trace = RoutingTrace.open(output / "trace")
    ids, probs = trace.load("ids"), trace.load("probs").astype(np.float64)
    picture = json.loads((output / "routing" / "after.json").read_text())
    summary = json.loads((output / "summary.json").read_text())
    load = [np.bincount(ids[:, layer].ravel(), minlength=12).tolist() for layer in range(3)]
    assert picture["load"] == load
    for number, name in enumerate(("law", "math")):
        here = ids[trace.load("domain") == number]
        counts = [np.bincount(here[:, layer].ravel(), minlength=12).tolist() for layer in range(3)]
        assert picture["domains"][name] == counts
    matrix = conditional_activation(ids[:, 1], ids[:, 2], 12)
    np.testing.assert_allclose(picture["conditional_activation"]["matrix"], matrix, atol=1e-4)
    entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(-1).mean(0)
    np.testing.assert_allclose(summary["per_layer"]["entropy"], entropy, rtol=1e-2)
    assert summary["trace"]["path"] == str(output / "trace")
    assert summary["trace"]["domains"]["law"] == int((trace.load("domain") == 0).sum())
    passage = picture["colored_text"][0]
    assert "".join(passage["tokens"]).startswith("the court finds")
    assert passage["layer"] == 1 and len(passage["experts"]) == len(passage["tokens"])
    assert len(picture["coherence"]["per_layer"]) == 3
    page = (output / "report" / "index.html").read_text()
    top = max(set(passage["experts"]), key=passage["experts"].count)
    assert f"expert {top}" in page
    assert "repeated tokens go to their usual expert in layer 1" in page


def test_norms_and_erc_of_routers_and_gates(analyzed):
    """Of every layer, against the plain functions on the checkpoint's own weights."""
    checkpoint, output = analyzed
    found = json.loads((output / "summary.json").read_text())["per_layer"]
    state = load_model(checkpoint, dtype="float32").state_dict()
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp"
        router_EH = state[f"{prefix}.gate.weight"]
        gate_EDH = state[f"{prefix}.experts.gate_up_proj"].chunk(2, dim=1)[0]
        loss = {a: erc_loss(router_EH, gate_EDH, a, noise=False).item() for a in (1, 2, 3, 4, 5)}
        norms = {"router": router_EH.norm(dim=1), "gate": gate_EDH.flatten(1).norm(dim=1)}
        wanted = {
            "erc_loss": loss[1],
            **{f"erc_loss_alpha_{a}": loss[a] for a in (2, 3, 4, 5)},
            "noise_level": router_geometry(router_EH)[1].item(),
            **{f"{name}_norm_mean": float(each.mean()) for name, each in norms.items()},
            **{f"{name}_norm_std": float(each.std(correction=0)) for name, each in norms.items()},
        }
        got = {name: found[name][layer] for name in wanted}
        assert got == pytest.approx(wanted, rel=1e-4)


def test_a_trace_is_read_back_alike(analyzed, tmp_path, capsys):
    _, output = analyzed
    assert find_trace(output) == output / "trace"
    assert cli.main(["analyze", str(output / "trace"), "-o", str(tmp_path / "again")]) == 0
    first = json.loads((output / "summary.json").read_text())
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert len(again["per_layer"]) > 8
    for name, values in again["per_layer"].items():  # routing_variance of rounded probabilities
        np.testing.assert_allclose(values, first["per_layer"][name], rtol=1e-3)
    assert (tmp_path / "again" / "report" / "index.html").is_file()


def test_the_published_traces(data_file, tmp_path):
    analyze(data_file("deepseek_v2_lite_routing_law.npz"), tmp_path / "law")
    summary = json.loads((tmp_path / "law" / "summary.json").read_text())
    assert len(summary["per_layer"]["max_violation"]) == 26


def test_an_adapter_changes_what_is_recorded(tmp_path, tiny_checkpoint, texts):
    base = tiny_checkpoint("olmoe")
    adapter = random_adapter(base, tmp_path / "adapter", scale=0.2)
    analyze(base, tmp_path / "base", texts)
    with patch.object(open_adapter, "read_adapter", wraps=open_adapter.read_adapter) as opened:
        analyze(base, tmp_path / "adapted", texts, adapter=adapter)
    opened.assert_called_once()
    model = with_adapter(
        load_model(base), open_adapter.check_adapter(adapter, open_checkpoint(base))
    )
    trace = RoutingTrace.open(tmp_path / "adapted" / "trace")
    ids = trace.load("token_ids")[trace.load("seq") == 0].astype(np.int64)
    seen = []
    router = model.get_base_model().model.layers[2].mlp.gate
    router.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    with torch.no_grad():
        model(input_ids=torch.tensor(ids[None]))
    kept = np.sort(trace.load("ids")[trace.load("seq") == 0][:, 2])
    np.testing.assert_array_equal(kept, seen[0].sort(-1).values)
    plain = RoutingTrace.open(tmp_path / "base" / "trace").load("ids")
    assert (np.sort(plain) != np.sort(trace.load("ids"))).any()


def test_a_loss_free_bias_acts(tmp_path, tiny_checkpoint, texts):
    from moe_finetune.checkpoint.adapters.files import BIAS_FILE
    from moe_finetune.training.save_and_resume.state_files import save_state

    base = tiny_checkpoint("olmoe")
    adapter = random_adapter(base, tmp_path / "adapter", scale=1e-4)
    favour = torch.zeros(12)
    favour[[7, 2, 9]] = 5.0
    save_state(adapter / BIAS_FILE, {f"bias.{layer}": favour.clone() for layer in range(3)})
    analyze(base, tmp_path / "out", texts, adapter=adapter)
    ids = RoutingTrace.open(tmp_path / "out" / "trace").load("ids")
    assert set(np.unique(ids)) == {2, 7, 9}


def test_bad_input(tmp_path, tiny_checkpoint, analyzed, texts):
    base, (_, output) = tiny_checkpoint("qwen3_moe"), analyzed
    with pytest.raises(DataError, match="give the text"):
        analyze(base, tmp_path / "o")
    with pytest.raises(DataError, match="is a trace"):
        analyze(output, tmp_path / "o", texts)
    with pytest.raises(OutputExistsError):
        analyze(output, output)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 3}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        analyze(base, tmp_path / "o", {"bad": [str(tmp_path / "bad.jsonl")]})
    other = random_adapter(tiny_checkpoint("olmoe"), tmp_path / "adapter")
    with pytest.raises(AdapterError):
        analyze(base, tmp_path / "o", texts, adapter=other)
    (tmp_path / "some.npz").write_bytes(b"no zip")
    with pytest.raises(TraceError, match=r"some\.npz"):
        analyze(tmp_path / "some.npz", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_recording_that_breaks_can_be_repeated(tmp_path, tiny_checkpoint, texts):
    base = load_model(tiny_checkpoint("mixtral"))
    with torch.no_grad():
        base.model.layers[1].mlp.gate.weight[4] = 3e38  # finite, and no softmax is
    base.save_pretrained(tmp_path / "broken")
    tokenizer = load_tokenizer(tiny_checkpoint("mixtral"))
    tokenizer.save_pretrained(tmp_path / "broken")
    for _ in range(2):
        with pytest.raises(NumericsError, match="NaN"):
            analyze(tmp_path / "broken", tmp_path / "o", texts)
        assert {path.name for path in tmp_path.iterdir()} == {"broken"}


def write_trace(folder, seed: int, experts: int = 9):
    rng = np.random.default_rng(seed)
    with TraceWriter(
        folder, model_type="olmoe", checkpoint="x", layers=(0, 1), num_experts=experts, top_k=3
    ) as writer:
        ids = rng.permuted(np.tile(np.arange(experts), (40, 2, 1)), axis=-1)[..., :3]
        writer.append(ids, rng.random((40, 2, 3)), np.arange(40) // 5)
    return folder


def test_compare_traces_prints_and_writes(tmp_path, capsys):
    a, b = write_trace(tmp_path / "a", 1), write_trace(tmp_path / "b", 2)
    output = tmp_path / "c.json"
    assert cli.main(["compare", str(a), str(b), "-o", str(output)]) == 0
    out = capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["paired"] and "path stability" in out
    row = found["metrics"]["max_violation"]
    assert f"{row['difference']:+.4g}" in out and row["low"] <= row["difference"] <= row["high"]
    assert cli.main(["compare", str(a), str(a), str(b)]) == 2
    assert cli.main(["compare", str(a), str(tmp_path)]) == 2
    assert cli.main(["compare", str(a), str(write_trace(tmp_path / "c", 3, 10))]) == 2
    assert "experts a layer" in capsys.readouterr().err


def test_neighbors_of_equal_length_share_a_forward(tmp_path, tiny_checkpoint):
    from moe_finetune.routing.tracing import equal_lengths, trace_model

    rng = np.random.default_rng(4)
    texts = [rng.integers(4, 260, length) for length in (5, 5, 5, 7, 5, 5)]
    assert [b.shape for b in equal_lengths(texts)] == [(3, 5), (1, 7), (2, 5)]
    assert [b.shape for b in equal_lengths(texts, 11)] == [(2, 5), (1, 5), (1, 7), (2, 5)]
    assert [b.shape for b in equal_lengths(texts, 4)] == [(1, len(t)) for t in texts]
    model, shapes = load_model(tiny_checkpoint("olmoe")), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    trace_model(model, {"a": texts[:4], "b": texts[4:]}, tmp_path / "t", checkpoint="x")
    assert shapes == [(3, 5), (1, 7), (2, 5)]
    trace = RoutingTrace.open(tmp_path / "t")
    assert trace.load("seq").tolist() == np.repeat(range(6), [len(t) for t in texts]).tolist()
    np.testing.assert_array_equal(trace.load("token_ids"), np.concatenate(texts))
    ids, weights = trace.load("ids"), trace.load("weights")
    seen = []
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor(text)[None])
    np.testing.assert_array_equal(
        np.sort(ids[:, 1]), torch.cat([out[2] for out in seen]).sort(-1).values
    )
    wanted = torch.cat([out[1] for out in seen]).sort(-1).values
    np.testing.assert_allclose(np.sort(weights[:, 1]), wanted, atol=1e-3)
