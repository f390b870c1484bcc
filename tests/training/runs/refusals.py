"""Recipes that cannot run, and what the verb answers before it loads weights: ``refusals.json``.

A key there is YAML laid over :func:`recipe_of`'s recipe, where `STAGE` or `LAUNCH` and a name may
come first, and `rows` are the lines of its data; or with a space in front it is an override. After
`STUDY` it is YAML laid over :data:`STUDY`, after `UPCYCLE` overrides with ` + ` between them.
``python -m tests.training.runs.refusals`` rewrites the answers; that of a new key may be ``[]``.
"""

import json
import logging
import os
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from moe_finetune import cli
from moe_finetune.recipe.yaml_tree import merge_mappings
from moe_finetune.training.run import checkpoint_and_rows
from tests.support import tiny
from tests.support.goldens import lines_of
from tests.upcycle.small import write_recipe

FILE = Path(__file__).with_name("refusals.json")
ROWS = {
    "rows": [{"prompt": f"number {n}", "completion": f" before {n + 1}"} for n in range(7)],
    "chat": [{"messages": [{"role": "user", "content": "hi"},
                           {"role": "assistant", "content": f"hello {n}"}]} for n in range(7)],
    "pairs": [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 4,
    "prompts": [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(4)],
    "numbers": [{"prompt": 3, "completion": " x"}],
    "nothing": [{"prompt": "x", "completion": ""}],
    "other": [{"question": "x", "reply": "y"}],
    "empty": [],
    "role": [{"messages": [{"role": "usr", "content": "hi"}]}],
}  # fmt: skip
DPO = "stage: dpo, method: aux_loss, data: {train: pairs.jsonl}"
GRPO = "stage: grpo, data: {train: prompts.jsonl}, rewards: [exact_match]"
CUT = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}
STUDY = {"base": {"model": {"path": "base"}, "data": {"train": "rows.jsonl"}}, "seeds": [1]}
ENVIRONMENTS = {
    "deepspeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "rows cut": {**CUT, "PARALLELISM_CONFIG_SP_SIZE": "2"},
    "context parallel": {**CUT, "PARALLELISM_CONFIG_CP_SIZE": "2"},
    "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "fsdp1": FSDP,
    "fsdp2 with offload": {**FSDP, "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
}
"""Variables that accelerate's launcher sets."""
LENGTH = 200
"""Characters of a message's line; the rest lists what a library knows."""


def write_inputs(folder: Path) -> None:
    """Checkpoints and rows that the recipes name, relative to ``folder``."""
    tiny.save("qwen3_moe", folder / "base")
    tiny.save("mixtral", folder / "mixtral")
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "cut.jsonl").write_text('{"prompt": "a", "comp')
    for name, content in {"broken": "{", "dense": '{"model_type": "llama"}'}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)
    (folder / "upcycle").mkdir()
    write_recipe(folder / "upcycle")


def recipe_of(text: str) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": "base", "dtype": "float32"},
        "method": "orthogonal_variance",
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": "rows.jsonl", "max_length": 40},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none"},
        "export": {"merge": False},
    }
    for name, stage in (("DPO", DPO), ("GRPO", GRPO)):
        if text.startswith(f"STAGE {name}, "):
            base = merge_mappings(base, yaml.safe_load(f"{{{stage}}}"))
            text = text.removeprefix(f"STAGE {name}, ")
    recipe = merge_mappings(base, yaml.safe_load(f"{{{text}}}") or {})
    if "rows" in recipe:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in recipe.pop("rows")]
        Path("own.jsonl").write_text("\n".join(lines))
        recipe["data"]["train"] = "own.jsonl"
    return recipe


def command_of(case: str) -> tuple[list[str], dict[str, str]]:
    """The verb with its arguments, and the launcher's environment; the recipe is written here."""
    kind, _, rest = case.partition(" ")
    if kind == "UPCYCLE":
        return ["upcycle", "upcycle/recipe.yaml", *rest.split(" + ")], {}
    if kind == "STUDY":
        text = yaml.safe_dump(merge_mappings(STUDY, yaml.safe_load(f"{{{rest}}}")))
        Path("recipe.yaml").write_text(text)
        return ["study", "recipe.yaml"], {}
    environment: dict[str, str] = {}
    text, overrides = ("", [rest]) if not kind else (case, [])
    if kind == "LAUNCH":
        launcher, _, text = rest.partition(", ")
        environment = ENVIRONMENTS[launcher]
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe_of(text), sort_keys=False))
    return ["train", "recipe.yaml", *overrides], environment


def answer(case: str) -> list[str]:
    """The message in the working folder, with exit code 2; nothing is written."""
    folder = Path.cwd()
    arguments, environment = command_of(case)
    before = sorted(folder.iterdir())
    out, err = StringIO(), StringIO()
    loaded = AssertionError("weights were loaded")
    with (
        patch.object(checkpoint_and_rows, "load_model", side_effect=loaded),
        patch.object(checkpoint_and_rows, "fresh_model", side_effect=loaded),
        patch.dict("os.environ", environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = cli.main([*arguments, "--output", "run"])
    assert sorted(folder.iterdir()) == before and code == 2, f"{case}: {code} {err.getvalue()}"
    message = err.getvalue().partition("error: ")[2].strip().replace(str(folder), "FOLDER")
    message = re.sub(r"this machine has [\d.]+", "this machine has SOME", message)
    return [line[:LENGTH] for line in message.splitlines()]


def main() -> None:
    """Write the answers of this version."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        os.chdir(folder)
        answers = {case: answer(case) for case in json.loads(FILE.read_text())}
    FILE.write_text(lines_of(answers))


if __name__ == "__main__":
    main()
