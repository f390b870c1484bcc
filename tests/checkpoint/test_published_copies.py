"""Small copies of three layouts, tensors called as published: trained, merged, verified."""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.exported_bias import router_name
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.run import run_recipe
from tests.support.recipes import recipe_of
from tests.support.tiny_heads import HEADS, WEIGHTS, carries, names_of, with_head

pytestmark = pytest.mark.usefixtures("warm")  # for rehearsals of runs

# Experts apart, with a further head; stacks; a prefix, stacks and a head.
COPIES = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text")


def copy_of(family, folder):
    """The tiny model with its head, its names and config as in the published files."""
    _, head = with_head(family, folder, names_of(family) if family in HEADS else [])
    if family == "qwen3_5_moe_text":  # cut out of the model with vision
        renamed = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in load_file(folder / WEIGHTS).items()
        }
        save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("family", COPIES)
def test_two_steps_a_merge_and_its_proof(family, tmp_path, caplog):
    base = tmp_path / "base"
    head = copy_of(family, base)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"{n} and {n * n}. " * 3} for n in range(4)])
    recipe = recipe_of(
        base,
        tmp_path / "rows.jsonl",
        method={"preset": "orthogonal_variance"},
        trainer={"learning_rate": 1e-2},
        export={"merge": True, "verify": True},  # the merged logits are base + adapter's
    )
    with caplog.at_level(logging.WARNING):
        run_recipe(recipe, tmp_path / "run")
    merged = tmp_path / "run" / "merged"
    before, after = load_file(base / WEIGHTS), load_file(merged / WEIGHTS)
    assert before.keys() == after.keys() and carries(merged, head)
    opened = open_checkpoint(merged)
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    layer = min(opened.experts)
    assert router_name(opened, layer) in changed
    assert opened.untrained.keys() == head.keys() and not changed & head.keys()
    said = [
        m for m in caplog.messages if m.startswith(f"the MTP head ({len(head)} tensors) is copied")
    ]
    assert len(said) == bool(head)
    config = [json.loads((folder / "config.json").read_text()) for folder in (base, merged)]
    assert config[0] == config[1]
