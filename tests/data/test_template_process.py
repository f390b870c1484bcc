"""A chat template that runs for ever, or takes all memory, ends; the next rendering goes on."""

from __future__ import annotations

import json

import pytest

from moe_finetune.data import template_process
from moe_finetune.data.template_process import TemplateLimitError
from moe_finetune.data.tokenize import rendered
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from tests import tiny
from tests.data.loading import load_dataset_for

SLOW = [
    "{% set n = messages|length * 40000 %}{% for a in range(n) %}{% for b in range(n) %}"
    "{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% set n = 99999999 %}{{ n ** n }}",
]
LARGE = [
    "{% set ns = namespace(s='x' * 1000) %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{% set n = 99999999 %}{{ 'x' * n }}",
]


@pytest.fixture
def limited(monkeypatch):
    """Conversations get half a second."""
    code = "from moe_finetune.data import template_process as p; p.SECONDS = 0.5; p.serve()"
    template_process.stop_process()
    monkeypatch.setattr(template_process, "_RUN", code)
    yield
    template_process.stop_process()


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.mark.parametrize("template", [*SLOW, *LARGE])
def test_a_rendering_ends_and_the_next_one_goes_on(limited, tokenizer, template):
    row = {"messages": [{"role": "user", "content": "a"}]}
    tokenizer.chat_template = template
    with pytest.raises(TemplateLimitError, match=r"chat template (takes|needs) more than"):
        rendered(row, tokenizer)
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    assert rendered(row, tokenizer)[0] == "<|im_start|>user\na<|im_end|>"


def test_work_on_a_rendered_text_has_the_same_limit(limited, tokenizer):
    row = {
        "messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "a"}]
    }
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content | replace('a', 'b' * 1000000) | wordwrap(1) }}"
        "{% endfor %}"
    )
    with pytest.raises(TemplateLimitError, match=r"chat template takes more than"):
        rendered(row, tokenizer)


def test_the_row_whose_rendering_has_no_end_is_named(limited, tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'loop' in m.content %}" + SLOW[0] + "{% endif %}"
        "{{ m.content }}|{% endfor %}"
    )
    answer = {"role": "assistant", "content": "b"}
    rows = [[{"role": "user", "content": text}, answer] for text in ("a", "b", "loop", "c")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the chat template takes more than"):
        load_dataset_for(DataSection(train=str(file)), tokenizer, 0)


def test_answers_that_nobody_read_are_not_taken_for_others(tokenizer):
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b")]
    requests = [
        {
            "template": {"text": "{{ messages[0].content }}", "marked": None, "variables": {}},
            "purpose": "text",
            "checked": False,
            "extra": {},
            "turns": row["messages"],
        }
        for row in rows
    ]
    answers = template_process.answers_to(requests)
    assert next(answers)["text"] == "a"
    answers.close()
    assert [a["text"] for a in template_process.answers_to(requests)] == ["a", "b"]


def test_a_process_that_does_not_start_is_named(monkeypatch, tokenizer):
    template_process.stop_process()
    monkeypatch.setattr(template_process, "_RUN", "raise SystemExit(3)")
    row = {"messages": [{"role": "user", "content": "a" * 300_000}]}  # more than a pipe's buffer
    with pytest.raises(TemplateLimitError, match=r"renders the chat template ended \(3\)"):
        rendered(row, tokenizer)
    template_process.stop_process()
