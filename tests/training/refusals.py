"""Recipes that cannot train, and what `train` answers before it loads weights: ``refusals.json``.

A key there is YAML laid over :func:`recipe_of`'s recipe, where `STAGE` or `LAUNCH` and a name may
come first, or with a space in front an override.
``python -m tests.training.refusals`` rewrites the answers; that of a new key may be ``[]``.
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
from moe_finetune.recipe.tree import merge_mappings
from tests import tiny

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
    return merge_mappings(base, yaml.safe_load(f"{{{text}}}") or {})


def answer(case: str) -> list[str]:
    """The message of `train` in the working folder, whose exit code is 2; nothing is written."""
    folder = Path.cwd()
    text, overrides = ("", [case[1:]]) if case.startswith(" ") else (case, [])
    environment: dict[str, str] = {}
    if text.startswith("LAUNCH "):
        launcher, _, text = text.removeprefix("LAUNCH ").partition(", ")
        environment = ENVIRONMENTS[launcher]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(text), sort_keys=False))
    before = sorted(folder.iterdir())
    arguments = ["train", "recipe.yaml", *overrides, "--output", "run"]
    out, err = StringIO(), StringIO()
    loaded = AssertionError("weights were loaded")
    with (
        patch("moe_finetune.checkpoint.loading.load_model", side_effect=loaded),
        patch("moe_finetune.models.fresh.fresh_model", side_effect=loaded),
        patch.dict("os.environ", environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = cli.main(arguments)
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
    FILE.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
