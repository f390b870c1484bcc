import json
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moe_finetune.errors import OutputExistsError, TraceError
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.trace_writer import TraceWriter

LAYERS, E, K, H = (1, 2, 5, 6), 11, 3, 7
L = len(LAYERS)
FACTS = {
    "model_type": "olmoe",
    "checkpoint": "tiny",
    "layers": LAYERS,
    "num_experts": E,
    "top_k": K,
    "hidden_size": H,
}


def batch(seed: int, tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, L, E))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    index = np.argsort(rng.random((tokens, L, E)), axis=-1)[..., :K]
    return {
        "index_TLK": index,
        "weights_TLK": np.take_along_axis(probs, index, -1),
        "seq_T": np.full(tokens, seed),
        "probs_TLE": probs,
        "token_ids_T": rng.integers(0, 99, tokens),
    }


def record(folder, batches: int = 9, part_bytes: int = 6000, **changes):
    """A trace of several chunks, and the arrays that went into it."""
    made = [batch(seed, 13 + seed) for seed in range(batches)]
    rng = np.random.default_rng(99)
    kept: dict[str, list[np.ndarray]] = {"positions": [], "embeddings": []}
    start = 0
    options = {**FACTS, "domains": ["law", "intent"], "embedding_share": 0.3, **changes}
    with TraceWriter(folder, part_bytes=part_bytes, **options) as writer:
        for number, arrays in enumerate(made):
            tokens = len(arrays["seq_T"])
            positions = writer.sample(tokens)
            embeddings = rng.normal(size=(len(positions), L, H)).astype(np.float32)
            writer.append(
                **arrays,
                domain=("law", "intent")[number % 2],
                positions_N=positions,
                embeddings_NLH=torch.from_numpy(embeddings),
            )
            kept["positions"].append(positions + start)
            kept["embeddings"].append(embeddings)
            start += tokens
    whole = {name: np.concatenate([arrays[name] for arrays in made]) for name in made[0]}
    return whole | {name: np.concatenate(parts) for name, parts in kept.items()}


@pytest.mark.parametrize("part_bytes", [900, 6000, 10**9])
def test_saved_equals_loaded(tmp_path, part_bytes):
    wanted = record(tmp_path / "trace", part_bytes=part_bytes, weights_dtype="float32")
    trace = RoutingTrace.open(tmp_path / "trace")
    assert (len(trace.info.parts) == 1) == (part_bytes == 10**9)
    assert trace.num_tokens == len(wanted["seq_T"])
    assert np.array_equal(trace.load("ids"), wanted["index_TLK"])
    assert trace.load("ids").dtype == np.int16
    assert np.array_equal(trace.load("weights"), wanted["weights_TLK"].astype(np.float32))
    assert np.array_equal(trace.load("seq"), wanted["seq_T"])
    assert np.array_equal(trace.load("token_ids"), wanted["token_ids_T"])
    assert np.array_equal(trace.load("probs"), wanted["probs_TLE"].astype(np.float16))
    assert np.array_equal(trace.load("domain"), wanted["seq_T"] % 2)
    assert np.array_equal(trace.load("ids", "intent"), wanted["index_TLK"][wanted["seq_T"] % 2 > 0])
    positions = wanted["positions"]
    assert 0.2 < len(positions) / trace.num_tokens < 0.4
    assert trace.num_embeddings == len(positions)
    assert np.array_equal(trace.load("embeddings"), wanted["embeddings"].astype(np.float16))
    best = wanted["weights_TLK"].argmax(-1)[..., None]
    top = np.take_along_axis(wanted["index_TLK"], best, -1)[..., 0]
    assert np.array_equal(trace.load("embedding_labels"), top[positions])
    starts = [chunk.start for chunk in trace.chunks("seq")]
    assert starts == [0, *np.cumsum([c.tokens for c in trace.info.parts])[:-1].tolist()]


def test_large_embeddings_keep_their_range(tmp_path):
    with TraceWriter(tmp_path / "t", **FACTS) as writer:
        arrays = batch(0, 5)
        big = np.full((1, L, H), 1e6, np.float32)
        writer.append(**arrays, positions_N=[2], embeddings_NLH=big)
    assert np.array_equal(RoutingTrace.open(tmp_path / "t").load("embeddings"), big)


def test_ids_only(tmp_path):
    arrays = batch(3, 17)
    with TraceWriter(tmp_path / "t", **FACTS) as writer:
        writer.append(arrays["index_TLK"], None, arrays["seq_T"])
    trace = RoutingTrace.open(tmp_path / "t")
    assert np.array_equal(trace.load("ids"), arrays["index_TLK"])
    with pytest.raises(TraceError, match="contains no weights, only ids, seq, domain"):
        trace.load("weights")


def test_the_published_layout(data_file):
    path = data_file("deepseek_v2_lite_routing_law.npz")
    trace = RoutingTrace.open(path)
    trace.check(model_type="deepseek_v2", layers=range(1, 27), num_experts=64)
    with np.load(path, allow_pickle=False) as archive:
        for ours, theirs in (("ids", "ids"), ("weights", "weights"), ("seq", "seq")):
            assert np.array_equal(trace.load(ours), archive[theirs])
    assert trace.num_tokens == 8327
    assert (trace.info.num_experts, trace.info.top_k) == (64, 6)
    assert trace.info.domains == ("law",)
    assert not trace.load("domain").any()


def test_an_imported_trace_that_is_another_models(tmp_path):
    path = tmp_path / "routing_x.npz"
    arrays = batch(0, 9)
    ids = arrays["index_TLK"].astype(np.int16)
    weights = arrays["weights_TLK"].astype(np.float32)
    np.savez(path, ids=ids + 54, weights=weights, seq=arrays["seq_T"])
    with pytest.raises(TraceError, match="got values from 54 to 64, expected 0 to 63"):
        RoutingTrace.open(path).load("ids")
    np.savez(path, ids=ids, weights=weights, seq=arrays["seq_T"])
    assert np.array_equal(RoutingTrace.open(path).load("ids"), ids)
    repeated = ids.copy()
    repeated[7, 2, 0] = repeated[7, 2, 2]
    np.savez(path, ids=repeated, weights=weights, seq=arrays["seq_T"])
    expected = rf"routing_x.npz: layer 3, token 7: lists expert {repeated[7, 2, 0]} more than once"
    with pytest.raises(TraceError, match=expected):
        RoutingTrace.open(path).load("ids")
    np.savez(path, ids=ids, weights=weights)
    with pytest.raises(TraceError, match=r"routing_x.npz: not a trace, or damaged .*seq"):
        RoutingTrace.open(path)
    np.savez(path, ids=np.array([{}], dtype=object), weights=weights, seq=arrays["seq_T"])
    with pytest.raises(TraceError, match="not a trace, or damaged"):
        RoutingTrace.open(path)  # a pickled array is never loaded


def test_unfinished_recordings_do_not_open(tmp_path):
    with pytest.raises(RuntimeError, match="stopped"), TraceWriter(tmp_path / "t", **FACTS) as w:
        w.append(**batch(0, 5))
        raise RuntimeError("stopped")
    with pytest.raises(TraceError, match="the recording did not finish"):
        RoutingTrace.open(tmp_path / "t")


def test_an_empty_domain_is_named(tmp_path):
    writer = TraceWriter(tmp_path / "t", **FACTS, domains=["law", "code", "maths"])
    writer.append(**batch(0, 5), domain="code")
    with pytest.raises(TraceError, match="no tokens of domain 'law', 'maths'"):
        writer.close()
    assert not (tmp_path / "t" / "trace.json").exists()


def test_unknown_domain(tmp_path):
    record(tmp_path / "t")
    trace = RoutingTrace.open(tmp_path / "t")
    with pytest.raises(TraceError, match="no domain 'code'; it contains law, intent"):
        trace.load("ids", "code")


def test_existing_folders_are_not_touched(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("keep")
    with pytest.raises(OutputExistsError, match="is not empty"):
        TraceWriter(tmp_path / "t", **FACTS)
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"model_type": "mixtral"}, "recorded with model type olmoe, expected mixtral"),
        ({"layers": range(3)}, r"recorded with MoE layers \[1, 2, 5, 6\], expected \[0, 1, 2\]"),
        ({"num_experts": 12}, "recorded with experts a layer 11, expected 12"),
    ],
)
def test_traces_of_another_model(tmp_path, facts, message):
    record(tmp_path / "t", batches=2)
    trace = RoutingTrace.open(tmp_path / "t")
    trace.check(model_type="olmoe", layers=LAYERS, num_experts=E)
    with pytest.raises(TraceError, match=message):
        trace.check(**facts)


@pytest.mark.faults
def test_damage_is_found_and_named(tmp_path):
    folder = tmp_path / "t"
    record(folder)
    file = folder / "part-00001.safetensors"
    intact = file.read_bytes()
    trace = RoutingTrace.open(folder)
    damaged = [intact[:-40], b"", b"x" * len(intact)]
    for place in range(0, len(intact), 97):
        damaged.append(intact[:place] + bytes([intact[place] ^ 0x55]) + intact[place + 1 :])
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(TraceError, match=r"part-00001.safetensors: damaged"):
            trace.load("ids")

    file.unlink()
    with pytest.raises(TraceError, match=r"part-00001.safetensors: this part .* is missing"):
        trace.load("ids")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 9, "version 9"),
        ("layers", None, "layers Input should be"),
        ("layers", [3, 1, 5, 6], "not ascending"),
        ("num_experts", 10**400, "num_experts"),
        ("top_k", 12, ": damaged: top_k 12 of 11"),
        ("domains", ["a", "a"], "named twice"),
        ("fields", ["ids", "code"], r"unknown fields \['code'\]"),
        ("fields", ["ids", "ids"], "named twice"),
        ("parts", [], "no tokens"),
        (
            "parts",
            [{"file": "x", "tokens": 5, "embeddings": 0, "crc32": 1}] * 2,
            "parts: one is named twice",
        ),
        (
            "parts",
            [{"file": "../x", "tokens": 5, "embeddings": 0, "crc32": 1}],
            r"parts\.0\.file",
        ),
        (
            "parts",
            [{"file": "x", "tokens": -5, "embeddings": 0, "crc32": 1}],
            r"parts\.0\.tokens",
        ),
    ],
)
def test_damaged_manifests(tmp_path, key, value, message):
    record(tmp_path / "t", batches=2)
    path = tmp_path / "t" / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(TraceError, match=rf"trace\.json.*{message}"):
        RoutingTrace.open(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("ids", np.full((17, L, K), E, np.int16), "ids: got values from 11 to 11"),
        ("ids", np.zeros((17, L, K), np.int64), "ids: got int64"),
        ("weights", np.full((17, L, K), np.nan, np.float16), "weights: contains NaN"),
        ("weights", np.ones((17, L, K), np.int32), "expected float16 or float32"),
        ("seq", np.zeros(16, np.int32), r"seq: got int32 \(16,\), expected int32 or int64 \(17,\)"),
    ],
)
def test_wrong_values_in_a_chunk(tmp_path, name, array, message):
    arrays = batch(0, 17)
    with TraceWriter(tmp_path / "t", **FACTS) as writer:
        writer.append(arrays["index_TLK"], arrays["weights_TLK"], arrays["seq_T"])
    file = tmp_path / "t" / "part-00000.safetensors"
    save_file(load_file(file) | {name: array}, file)
    manifest = tmp_path / "t" / "trace.json"
    document = json.loads(manifest.read_text())
    document["parts"][0]["crc32"] = zlib.crc32(file.read_bytes())
    manifest.write_text(json.dumps(document))
    with pytest.raises(TraceError, match=message):
        RoutingTrace.open(tmp_path / "t").load(name)


def test_wrong_batches(tmp_path):
    writer = TraceWriter(tmp_path / "t", **FACTS)
    arrays = batch(0, 5)
    with pytest.raises(ValueError, match=r"index_TLK: got shape \(5, 3, 3\), expected \(T, 4, 3\)"):
        writer.append(arrays["index_TLK"][:, :3], None, arrays["seq_T"])
    broken = arrays["weights_TLK"].copy()
    broken[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match="weights_TLK: 1 of 60 values are NaN"):
        writer.append(arrays["index_TLK"], broken, arrays["seq_T"])
    with pytest.raises(ValueError, match="embeddings_NLH: 1 of 28 values are NaN"):
        embeddings = np.ones((1, L, H))
        embeddings[0, 3, 6] = np.nan
        writer.append(**arrays, positions_N=[0], embeddings_NLH=embeddings)


def test_memory_does_not_grow_with_the_trace(tmp_path):
    arrays = batch(0, 500)
    ids, weights = arrays["index_TLK"], arrays["weights_TLK"]

    def peak(batches: int) -> int:
        tracemalloc.start()
        with TraceWriter(tmp_path / str(batches), **FACTS, part_bytes=100_000) as writer:
            for number in range(batches):
                writer.append(ids, weights, np.full(500, number))
        for chunk in RoutingTrace.open(tmp_path / str(batches)).chunks():
            assert chunk.tokens
        peaked = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peaked

    short, long = peak(20), peak(400)
    written = 400 * (ids.astype(np.int16).nbytes * 2)
    assert long < short + written / 20
