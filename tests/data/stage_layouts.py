"""Rows of DPO and GRPO in every layout that is read, and what training gets of them.

``python -m tests.data.stage_layouts`` writes ``golden_stage_rows.json``, which was made by the code
that prepared all rows as lists in memory, with TRL's own preparation over the whole table.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from moe_finetune.recipe.sections import DataSection
from moe_finetune.recipe.stages import STAGES
from tests.support import tiny
from tests.support.conversations import (
    ASK,
    FUNCTION,
    OPENAI,
    SHAREGPT,
    TOOLS,
    TRL,
    YES,
    tokenizer_of,
)

GOLDEN = Path(__file__).with_name("golden_stage_rows.json")
DAY = "2026-11-28"
"""On which it was written: a chat template may write today's."""
NO = {"role": "assistant", "content": "No."}
CALLED = TRL["messages"][:3]  # the question, the call and its result
HELLO = {"role": "assistant", "content": "Hello."}
TURNS = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
TEXTS = {"prompt": "Wet?", "chosen": " Yes.", "rejected": " No, it is not<|endoftext|>"}
TOOLED = {"prompt": CALLED, "chosen": [YES], "rejected": [NO], "tools": json.dumps(TOOLS)}
LONG = {**TURNS, "rejected": [{**NO, "content": "No. " * 40}]}
WORDY = {**TURNS, "prompt": [{**ASK, "content": "Wet? " * 300}]}


def texts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} and", "chosen": f" {n + 1}", "rejected": f" {n + 2}", "answer": n}
            for n in range(count)]  # fmt: skip


LAYOUTS: dict[str, dict[str, Any]] = {
    "turns": {"stage": "dpo", "rows": [TURNS, LONG]},
    "texts": {"stage": "dpo", "rows": [TEXTS, {**TEXTS, "chosen": " Yes. " * 40}]},
    "json_text": {"stage": "dpo", "rows": [TOOLED, {**TOOLED, "rejected": LONG["rejected"]}]},
    "implicit_prompt": {
        "stage": "dpo",
        "rows": [{"chosen": [*CALLED, YES], "rejected": [*CALLED, NO], "tools": TOOLS}],
    },
    "openai": {
        "stage": "dpo",
        "rows": [
            {"prompt": OPENAI["messages"][:3], "chosen": [YES], "rejected": [NO], "tools": TOOLS}
        ],
    },
    "sharegpt": {
        "stage": "dpo",
        "data": {"columns": {"prompt": "conversations"}},
        "rows": [
            {
                "conversations": SHAREGPT["conversations"][:3],
                "tools": json.dumps([FUNCTION]),
                "chosen": {"from": "gpt", "value": "Yes."},
                "rejected": {"from": "gpt", "value": "No."},
            }
        ],
    },
    "ultrafeedback": {
        "stage": "dpo",
        "rows": [{"prompt": "Wet?", "chosen": [ASK, YES], "rejected": [ASK, NO], "score": 8.5},
                 {"prompt": "Wet?", "chosen": [YES], "rejected": [NO], "score": None}],
    },
    "some_tools": {
        "stage": "dpo",
        "rows": [TURNS, {**TOOLED, "chat_template_kwargs": {"enable_thinking": False}}, TURNS],
    },
    "variables": {
        "stage": "dpo",
        "template": "gptoss",
        "rows": [{**TURNS, "chat_template_kwargs": {"reasoning_effort": "low"}}, TURNS],
    },
    "opened_by_the_assistant": {
        "stage": "dpo",
        "template": "llama3_1",
        "rows": [{"prompt": [HELLO, ASK], "chosen": [YES], "rejected": [NO]}],
    },
    "odd_columns": {
        "stage": "dpo",
        "rows": [{**TURNS, "source": "web", "id": 3}, {**TURNS, "source": None, "tokens": [1]}],
    },
    "malformed": {
        "stage": "dpo",
        "data": {"malformed": "drop"},
        "rows": [TURNS, {**TURNS, "rejected": []},
                 {**TURNS, "chosen": [{**YES, "reasoning_content": "It rains."}]}, LONG],
    },
    "too_long": {"stage": "dpo", "data": {"max_length": 60}, "rows": [LONG, TURNS, WORDY, TURNS]},
    "overlong_dropped": {
        "stage": "dpo",
        "data": {"max_length": 60, "overlong": "drop"},
        "rows": [LONG, TURNS, WORDY],
    },
    "drawn": {"stage": "dpo", "data": {"limit": 7}, "rows": texts(40)},
    "held_out": {"stage": "dpo", "data": {"validation": 0.3}, "rows": texts(40)},
    "held_out_turns": {
        "stage": "dpo",
        "data": {"validation": 0.3},
        "rows": [
            {**TURNS, "chosen": [{"role": "assistant", "content": f"Yes, {n}."}]} for n in range(30)
        ],
    },
    "prompts": {"stage": "grpo", "rows": texts(5)},
    "prompts_of_turns": {
        "stage": "grpo",
        "rows": [
            {"prompt": [{"from": "human", "value": "Wet?"}], "system": "Be brief.", "answer": "7"},
            {"prompt": [*CALLED, YES, ASK], "system": None, "answer": "8"},
        ],
    },
    "prompts_held_out": {"stage": "grpo", "data": {"validation": 0.3}, "rows": texts(40)},
    "prompts_with_no_room": {
        "stage": "grpo",
        "room": 30,
        "data": {"max_length": 40},
        "rows": [*texts(3), {"prompt": "Wet? " * 5, "answer": "7"}],
    },
    "odd_columns_of_prompts": {
        "stage": "grpo",
        "data": {"columns": {"answer": "reward_model.ground_truth"}},
        "rows": [
            {"prompt": [ASK], "hash": 2**64 - 5, "kind": "a", "size": 1, "tags": [], "none": None,
             "reward_model": {"ground_truth": "7", "style": "rule"}, "source": "web", "row": 1,
             "place": None, "tokens": None, "flags": None},
            {"prompt": [ASK], "hash": -1, "kind": 3, "size": 2.5, "tags": ["a", "b"], "place": 4,
             "reward_model": {"ground_truth": "8"}, "tokens": 2, "flags": {"a": [1, None]}},
        ],
    },
    "code": {
        "stage": "grpo",
        "rewards": ["code"],
        "rows": [{"prompt": "Write f.", "tests": ["assert f(1) == 2", "assert f(2) == 3"]},
                 {"prompt": "Write g.", "tests": "assert g()"}],
    },
}  # fmt: skip
"""Name -> stage, rows, and where they differ from the usual ``data``, ``rewards``, ``room``."""


def load(layout: dict[str, Any], folder: Path, load_stage_rows: Any, **options: Any) -> Any:
    """The examples of a layout, on the day of the golden ones."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in layout["rows"]), encoding="utf-8")
    section = {"train": str(file), "max_length": 1024, **layout.get("data", {}), **options}
    plain = layout["rows"][0].get("chosen") == " Yes."
    tokenizer = (
        tiny.tokenizer() if plain else tokenizer_of(layout.get("template", "qwen3_instruct_2507"))
    )
    if tokenizer.chat_template is not None:
        tokenizer.chat_template = re.sub(
            r"strftime_now\([^)]*\)", repr(DAY), tokenizer.chat_template
        )
    rewards = layout.get("rewards", ["exact_match"] if layout["stage"] == "grpo" else [])
    return load_stage_rows(
        STAGES[layout["stage"]],
        DataSection(**section),
        tokenizer,
        seed=3,
        room=layout.get("room", 0),
        rewards=rewards,
    )


def as_plain(examples: Any) -> dict[str, Any]:
    """What training gets, as JSON has it."""
    plain = {
        "train": examples.train.to_list(),
        "validation": examples.validation and examples.validation.to_list(),
        "sources": [rows.to_list() for _, rows in examples.sources],
        "lengths": examples.lengths,
        "largest_id": examples.largest_id,
    }
    return json.loads(json.dumps(plain))


if __name__ == "__main__":
    from moe_finetune.data.load_rows import load_stage_rows

    golden = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            golden[name] = as_plain(load(layout, Path(folder), load_stage_rows))
    GOLDEN.write_text(json.dumps(golden) + "\n", encoding="utf-8")
