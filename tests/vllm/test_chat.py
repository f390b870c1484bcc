"""vLLM answers a chat as training taught it, with the template and end token of the training."""

import json

import pytest

from moe_finetune.io.row_files import write_jsonl
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.run import run_recipe
from tests.support import tiny
from tests.support.vllm_server import complete_each, needs_vllm

QUESTIONS = {"a?": "b!", "c?": "dd!", "e?": "fff!"}


def turns(question, answer=None):
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_base_without_a_template_that_was_trained_with_chatml(warm_vllm, tmp_path):
    base = tiny.save("qwen3_moe", tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns(q, a)} for q, a in QUESTIONS.items()])
    tree = {
        "model": {"path": str(base), "dtype": "float32"},
        "method": {"preset": "none"},
        "router": {"train": "full"},
        "lora": None,
        "data": {"train": str(tmp_path / "chat.jsonl"), "chat_template": "chatml"},
        "trainer": {"max_steps": 40, "learning_rate": 3e-3, "per_device_train_batch_size": 3,
                    "warmup_steps": 0, "report_to": []},
    }  # fmt: skip
    merged = RunFolder(run_recipe(recipe_from_tree(Tree(tree)), tmp_path / "run")).merged
    (answers,) = complete_each([merged], [turns(question) for question in QUESTIONS], 12)
    assert not isinstance(answers, str), answers
    tokenizer = load_tokenizer(merged)
    texts = [tokenizer.decode(answer.tokens) for answer in answers]
    assert texts == [f"{answer}<|im_end|>" for answer in QUESTIONS.values()]
