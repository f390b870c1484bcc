"""Token ids and labels of TRL's published templates on fourteen kinds of rows, as short hashes.

``python -m tests.data.golden`` rewrites ``golden_labels.json``. A null is a row that is refused,
because the template cannot render it or would lose a part of it. ``ALIASES`` has what differs from
transformers 5.21 on, which gives a template a turn's reasoning under every name that it may read.
"""

import datetime
import hashlib
import importlib.resources
import json
from pathlib import Path
from unittest import mock

import transformers
from packaging.version import Version

from moe_finetune.data.row_forms import Former
from moe_finetune.data.tokenize import tokenize_row
from moe_finetune.errors import DataError
from tests.support.conversations import ASK, OPENAI, SHAREGPT, TOOLS, TRL, YES, tokenizer_of
from tests.support.goldens import lines_of

ALIASES = "transformers 5.21"
ALIASED = Version(transformers.__version__) >= Version("5.21")
FILE = Path(__file__).with_name("golden_labels.json")
FOLDER = importlib.resources.files("trl") / "chat_templates"
TEMPLATES = sorted(
    path.name.removesuffix(".jinja")
    for path in FOLDER.iterdir()
    if path.name.endswith(".jinja") and "_training" not in path.name
)
WHY, CLOUDS = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Clouds."}
THOUGHT = {**YES, "reasoning_content": "It rains."}
CITIES = [
    {"type": "function", "function": {"name": "rain", "arguments": {"city": city}}}
    for city in ("Bonn", "Kiel")
]
RESULTS = [{"role": "tool", "name": "rain", "content": text} for text in ("7 mm", "8 mm")]
PARTS = [{"type": "text", "text": "We"}, {"type": "text", "text": "t?"}]
ROWS = {
    "chat": {"messages": [ASK, YES]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, ASK, YES]},
    "chats": {"messages": [ASK, YES, WHY, CLOUDS]},
    "one of two": {"messages": [ASK, {**YES, "train": False}, WHY, CLOUDS]},
    "parts": {"messages": [{"role": "user", "content": PARTS}, YES]},
    "tools": TRL,
    "tools as text": OPENAI,
    "tools of ShareGPT": SHAREGPT,
    "tools without a schema": {"messages": TRL["messages"]},
    "call and prose": {
        "messages": [ASK, {**YES, "content": "Let me see.", "tool_calls": CITIES[:1]},
                     RESULTS[0], YES],
        "tools": TOOLS,
    },
    "parallel calls": {
        "messages": [ASK, {"role": "assistant", "tool_calls": CITIES}, *RESULTS, YES],
        "tools": TOOLS,
    },
    "reasoning": {"messages": [ASK, THOUGHT]},
    "reasoning twice": {"messages": [ASK, THOUGHT, WHY, {**CLOUDS, "reasoning_content": "Hm."}]},
    "reasoning and call": {
        "messages": [ASK, {**THOUGHT, "content": "", "tool_calls": CITIES[:1]}, RESULTS[0], YES],
        "tools": TOOLS,
    },
}  # fmt: skip


def hashes(template: str) -> dict[str, str | None]:
    """The hash of each row's ids and labels with this template."""
    tokenizer, result = tokenizer_of(template), {}
    day = datetime.datetime(2026, 2, 3)
    for name, row in ROWS.items():
        try:
            with mock.patch("moe_finetune.data.chat.midnight", lambda: day):
                tokens = tokenize_row(Former()("f:1", row), tokenizer, True)
        except DataError:
            result[name] = None
        else:
            text = json.dumps([list(tokens.input_ids), tokens.labels])
            result[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return result


def golden() -> dict[str, dict[str, str | None]]:
    """What was checked for each template and row."""
    answers = json.loads(FILE.read_text())
    for template, rows in answers.pop(ALIASES).items():
        answers[template] |= rows if ALIASED else {}
    return answers


if __name__ == "__main__":
    answers, before = {t: hashes(t) for t in TEMPLATES}, json.loads(FILE.read_text())
    if ALIASED:
        differences = {
            t: {name: label for name, label in rows.items() if label != before[t][name]}
            for t, rows in answers.items()
        }
        answers = before | {ALIASES: {t: rows for t, rows in differences.items() if rows}}
    else:
        answers[ALIASES] = before[ALIASES]
    FILE.write_text(lines_of(answers))
