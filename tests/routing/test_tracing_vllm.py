"""Routing heard from vLLM: the experts that transformers chooses on the same tokens."""

import json

import numpy as np
import pytest

from moe_finetune import cli
from moe_finetune.errors import CaptureError, DataError
from moe_finetune.report.analysis import analyze
from moe_finetune.routing.trace import RoutingTrace
from moe_finetune.routing.tracing_vllm import Heard, selection


def test_a_selection_leaves_dense_layers_and_the_answer_out():
    told_TLK = np.random.default_rng(0).integers(0, 9, (7, 5, 3), np.uint8)
    found = selection(told_TLK, 6, (1, 2, 4), 3)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, told_TLK[:6][:, [1, 2, 4]])
    assert found.flags.owndata  # the engine may reuse its own
    for told in (None, told_TLK[:5], told_TLK[:, :4], told_TLK[..., :2]):
        with pytest.raises(CaptureError, match="--backend hf"):
            selection(told, 6, (1, 2, 4), 3)


def test_what_was_heard_is_joined_over_steps_and_forgotten():
    import torch

    heard, steps = Heard(), torch.arange(2 * 10).reshape(2, 5, 2)
    assert heard.take() is None
    for layer in (3, 1):
        buffer = torch.empty(3, 2, dtype=torch.int64)
        for rows in (steps[layer // 3, :3], steps[layer // 3, 3:]):  # a prompt in two chunks
            buffer[: len(rows)] = rows
            heard._note(layer, buffer[: len(rows)])
    told = heard.take()
    assert told is not None and told.shape == (5, 4, 2)
    np.testing.assert_array_equal(told[:, [1, 3]], steps.transpose(0, 1))
    assert not told[:, [0, 2]].any() and heard.take() is None
    heard._note(0, torch.zeros(4, 2))
    heard._note(1, torch.zeros(5, 2))
    with pytest.raises(CaptureError, match="different numbers of tokens"):
        heard.take()


def test_what_vllm_does_not_tell_is_refused(tmp_path, tiny_checkpoint, capsys):
    base, text = tiny_checkpoint("qwen3_moe"), tmp_path / "t.jsonl"
    text.write_text('{"text": "a"}\n')
    for options in ({"probabilities": True}, {"adapter": tmp_path}):
        with pytest.raises(DataError, match="merge an adapter first"):
            analyze(base, tmp_path / "o", {"t": [str(text)]}, backend="vllm", **options)
    arguments = ["analyze", str(base), "-d", str(text), "-o", str(tmp_path / "o")]
    assert cli.main([*arguments, "--vllm", "max_num_seqs=4"]) == 2
    assert "need --backend vllm" in capsys.readouterr().err
    assert cli.main([*arguments, "-b", "vllm", "--vllm", "tensor_parallel_size=2"]) == 2
    assert not (tmp_path / "o" / "trace").exists()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_vllm_chooses_what_transformers_chooses(family, tmp_path, tiny_checkpoint):
    base = tiny_checkpoint(family)
    rng = np.random.default_rng(2)
    for name, lengths in {"law": (700, 3, 41), "math": (1, 90)}.items():
        rows = ["".join(map(chr, rng.integers(97, 123, length))) for length in lengths]
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    data = ["-d", str(tmp_path / "law.jsonl"), "-d", str(tmp_path / "math.jsonl")]
    for backend in ("hf", "vllm"):
        output = ["-o", str(tmp_path / backend), "-b", backend, "--dtype", "float32"]
        # Fewer tokens a step than the longest row: its prefill comes in chunks.
        engine = ["--vllm", "max_num_batched_tokens=256"] if backend == "vllm" else []
        assert cli.main(["analyze", str(base), *data, *output, *engine]) == 0
    ours, theirs = (RoutingTrace.open(tmp_path / b / "trace") for b in ("hf", "vllm"))
    assert theirs.info.layers == ours.info.layers and theirs.info.domains == ("law", "math")
    for field in ("token_ids", "seq", "domain"):
        np.testing.assert_array_equal(theirs.load(field), ours.load(field))
    found, wanted = np.sort(theirs.load("ids")), np.sort(ours.load("ids"))
    assert (found != wanted).any(-1).mean() < 1e-3  # ties within float32's last bits
    assert len(np.unique(wanted)) == 12 and not theirs.has("weights")
    assert (tmp_path / "vllm" / "report" / "index.html").is_file()
