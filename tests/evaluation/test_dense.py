"""A dense checkpoint is evaluated and inspected, so that a MoE is compared with its parent."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune import cli
from moe_finetune.checkpoint.dense_checkpoint import open_dense
from moe_finetune.errors import CheckpointError, EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.models.family_lookup import DENSE
from tests.evaluation.local import write_suite
from tests.support import tiny
from tests.support.parity import parity
from tests.support.vllm_server import needs_vllm


def dense(model_type, folder):
    sizes = {
        "vocab_size": tiny.VOCABULARY, "hidden_size": 192, "intermediate_size": 112,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
        "initializer_range": 0.08, "max_position_embeddings": 2048, "bos_token_id": None,
        "eos_token_id": 0, "pad_token_id": 3, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", DENSE)
@torch.no_grad()
def test_a_padded_prompt_is_continued_as_the_prompt(model_type, tmp_path):
    folder = dense(model_type, tmp_path / "dense")
    with open_backend(folder, "hf", batch_size=2) as backend:
        model, prompts = backend.lm.model, [[5, 9, 17, 40, 7], [11, 3, 8]]
        padded = torch.tensor([prompts[0], [3, 3, *prompts[1]]])
        mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
        together = model.generate(padded, attention_mask=mask, max_new_tokens=7, do_sample=False)
        for row, prompt in zip(together, prompts, strict=True):
            ids = torch.tensor([prompt])
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7,
                                   do_sample=False)  # fmt: skip
            assert row[5:].tolist() == alone[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_vllm_and_transformers_give_the_same_answers(warm_vllm, model_type, tmp_path):
    suite = write_suite(tmp_path / "data", items=20)
    folder = dense(model_type, tmp_path / "dense")
    results = parity(folder, ("vllm", "hf"), suite, tmp_path / "out", 20)
    assert [result.holds for result in results] == [True, True], results


def test_a_moe_is_compared_with_its_parent(tiny_checkpoint, tmp_path, capsys):
    suite = write_suite(tmp_path / "suite", items=11)
    parent = dense("qwen3", tmp_path / "parent")
    for checkpoint, output in ((parent, "dense"), (tiny_checkpoint("qwen3_moe"), "moe")):
        command = ["eval", str(checkpoint), "--suite", str(suite), "--backend", "hf"]
        assert cli.main([*command, "--output", str(tmp_path / output)]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "dense"), str(tmp_path / "moe")]) == 0
    assert "sums" in capsys.readouterr().out


def test_inspect_shows_it_and_analyze_has_nothing_to_trace(tmp_path, capsys):
    folder = dense("llama", tmp_path / "dense")
    assert cli.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert "llama, a dense model" in text and f"{count:,}" in text and "3 layers" in text
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == count
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    data = ["--domain", f"x={tmp_path / 'rows.jsonl'}"]
    assert cli.main(["analyze", str(folder), *data, "--output", str(tmp_path / "out")]) == 2
    assert "no routing to trace" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_damaged_or_over_it_is_refused(tmp_path):
    folder = dense("mistral", tmp_path / "dense")
    with pytest.raises(EvaluationError, match="only adapters of MoE models"):
        open_backend(folder, "hf", adapter=tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = tensors | {name: torch.full_like(tensors[name], torch.nan)}
    save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
    open_dense(folder)
    with pytest.raises(CheckpointError, match="up_proj"):
        open_backend(folder, "hf")
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj"):
        open_dense(folder)
