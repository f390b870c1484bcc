"""One conversation with a call in every published layout, and templates of published models."""

import importlib.resources
import json
import re

from transformers import AddedToken

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
