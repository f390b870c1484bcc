"""What the verbs say of a published checkpoint, each compared with the fixture's own rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.merge import plan_merge
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.lora import targets
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.class_structure import meta_model
from moe_finetune.models.config_and_tokenizer import load_config
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.inspect_checkpoint import inspect_checkpoint
from tests.published import fixture, generate
from tests.published.fixture import Published


def run(published: Published, folder: Path) -> dict[str, str]:
    """What each verb answers: nothing where it passes, else its refusal."""
    folder = generate.write(published, folder / "base")
    adapted: list[Any] = []
    opened: list[Checkpoint] = []

    def keep(*arguments: Any) -> Any:
        adapted.append(add_lora(*arguments))
        return adapted[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "add_lora", keep)  # a merge takes the model that inspect adapts
        inspected = _answer(lambda: inspect(published, folder, opened))
    return {
        "inspect": inspected,
        "merge": _answer(lambda: merge(published, folder, opened, adapted)),
    }


def _answer(verb: Callable[[], None]) -> str:
    try:
        verb()
    except MoeFinetuneError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a crash, not a refusal
        return f"{type(error).__name__}: {error}"
    return ""


def inspect(published: Published, folder: Path, opened: list[Checkpoint]) -> None:
    """Sizes, LoRA's reach and the memory of a recipe."""
    opened.append(open_checkpoint(folder, stored=True))
    inspection = inspect_checkpoint(opened[0], _recipe(folder))
    assert inspection.stored_bytes == published.bytes
    assert inspection.stored_tensors == published.counted["tensors"]
    assert inspection.stored_dtypes == sorted({row.dtype for row in published.rows})
    groups = inspection.coverage.groups
    assert {part: groups[part].parameters for part in fixture.MODEL_PARTS} == {
        part: published.count(part, *(["vision"] if part == "other" else []))
        for part in fixture.MODEL_PARTS
    }
    assert {part: groups[part].reached_parameters for part in fixture.MODEL_PARTS} == {
        part: sum(row.parameters for row in published.rows if row.adapted and row.part == part)
        for part in fixture.MODEL_PARTS
    }
    assert inspection.memory is not None
    assert inspection.memory.stored.weights >= published.count(*fixture.MODEL_PARTS)


def merge(published: Published, folder: Path, opened: list[Checkpoint], adapted: list[Any]) -> None:
    """The plan of a LoRA on everything changes just those parts, and copies all else."""
    base = open_checkpoint(opened[0] if opened else folder)  # refuses a quantized one
    plan = plan_merge(open_adapter(_adapter(folder, adapted), base, values=False), folder)
    assert plan.changed.keys() == {name for name, row in published.tensors if row.adapted}
    assert plan.copied == {name for name, row in published.tensors if not row.adapted}


def _recipe(folder: Path) -> Recipe:
    """LoRA on all parts, and a row short enough to look at in a moment."""
    return recipe_from_tree(
        Tree(
            {
                "model": {"path": str(folder)},
                "data": {"train": "hub/data", "max_length": 8},
                "method": "aux_loss",
                "lora": {
                    "rank": 1,
                    "alpha": 2,
                    "targets": ["attention", "shared_experts", "experts"],
                },
                "router": {"train": "lora"},
                "trainer": {"gradient_checkpointing": False},  # one forward to plan, not two
            }
        )
    )


def _adapter(folder: Path, adapted: list[Any]) -> Path:
    """An adapter of that recipe, its factors a hole."""
    if not adapted:
        recipe = _recipe(folder)
        with torch.device("meta"):
            model = meta_model(load_config(folder))
            adapted.append(add_lora(model, recipe.lora, recipe.router.train))
    model = adapted[0]
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    output = folder.parent / "adapter"
    output.mkdir()
    model.peft_config["default"].save_pretrained(output)
    rows = [(name, fixture.Row(name, tuple(tensor.shape), "F32")) for name, tensor in state.items()]
    generate.write_file(output / "adapter_model.safetensors", rows)
    return output
