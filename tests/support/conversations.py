"""One conversation with a call in every published layout, and templates of published models."""

import importlib.resources
import json
import re

from transformers import AddedToken

from moe_finetune.data.row_forms import Former
from moe_finetune.data.tokenize import IGNORED, tokenize_row
from moe_finetune.training.before.preview import marked
from tests.support import tiny

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "rain", "description": "Rain?", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASK = {"role": "user", "content": "Wet?"}
RESULT = {"role": "tool", "tool_call_id": "c12345678", "name": "rain", "content": "7 mm"}
YES = {"role": "assistant", "content": "Yes."}
OPENAI = {
    "tools": TOOLS,
    "messages": [
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c12345678",
                    "type": "function",
                    "function": {"name": "rain", "arguments": '{"city":"Bonn"}'},
                }
            ],
        },
        RESULT,
        YES,
    ],
}
TRL = {
    "tools": json.dumps(TOOLS),
    "messages": [
        ASK,
        {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "function": {"name": "rain", "arguments": {"city": "Bonn"}}}
            ],
        },
        {"role": "tool", "name": "rain", "content": "7 mm"},
        YES,
    ],
}
SHAREGPT = {
    "system": "Be brief.",
    "tools": json.dumps([FUNCTION]),
    "conversations": [
        {"from": "human", "value": "Wet?"},
        {"from": "function_call", "value": '{"name": "rain", "arguments": {"city": "Bonn"}}'},
        {"from": "observation", "value": "7 mm"},
        {"from": "gpt", "value": "Yes."},
    ],
}
LEGACY = {
    "tools": [FUNCTION],
    "messages": [
        ASK,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "rain", "arguments": '{"city": "Bonn"}'},
        },
        {"role": "function", "name": "rain", "content": "7 mm"},
        YES,
    ],
}


def tokenizer_of(name: str):
    """A byte tokenizer with the template of this name in TRL."""
    tokenizer = tiny.tokenizer()
    folder = importlib.resources.files("trl") / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = sorted(set(re.findall(r"<[|｜][^\s<>]+?[|｜]>", tokenizer.chat_template)))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer


def learned(row: dict, tokenizer, completion_only: bool = True, **options) -> str:
    """The row's text with what is learned between ⟦ and ⟧."""
    tokens = tokenize_row(Former(**options)("f:1", row), tokenizer, completion_only)
    for token, label in zip(tokens.input_ids, tokens.labels, strict=True):
        assert label in (token, IGNORED)
    return marked(tokens.input_ids, tokens.labels, tokenizer, ("⟦", "⟧"))


def write(tmp_path, *rows) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)
