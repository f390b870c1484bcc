"""Chat templates are parsed where they are read; nothing of them runs there."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moe_finetune.errors import CheckpointError
from moe_finetune.models.chat_template import (
    check_template,
    original,
    with_carried_variables,
)
from moe_finetune.models.loading import load_tokenizer
from tests import tiny

DATED = (
    "\n  {% if strftime_now is defined %}{% set f = '%d %b %Y' %}Today {{ strftime_now(f) }}"
    "{% endif %}\n{% for m in messages %}{{ strftime_now('%Y-%m-%d') }} {{ m['content'] }}"
    "{% generation %}!{% endgeneration %}{% endfor %}"
)
TURNS = [{"role": "user", "content": "a"}]


def render(template: str, **variables) -> str:
    turns = variables.pop("messages", TURNS)
    return render_jinja_template([turns], chat_template=template, **variables)[0][0]


def test_what_is_no_template_is_refused_by_its_folder(tmp_path):
    check_template(tiny.CHAT_TEMPLATE, "here")
    check_template(DATED, "here")
    tiny.tokenizer().save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    for text in (
        "{% for m in messages %}",
        "{{ 2 + }}",
        "{{ " + "(" * 9000 + "}}",
        "x" * (1 << 21),
    ):
        (tmp_path / "chat_template.jinja").write_text(text)
        with pytest.raises(CheckpointError, match="chat template"):
            load_tokenizer(tmp_path)


def test_the_first_turn_carries_what_a_template_reads_beside_the_turns():
    template = (
        "{% macro shown() %}{{ tools | tojson }}{% endmacro %}"
        "{% if tools %}[{{ shown() }}]{% endif %}{{ mode }}{{ messages[0].content }}"
    )
    carrying = with_carried_variables(template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    beside = {"tools": tools, "mode": "quick "}
    assert render(carrying, messages=[{**TURNS[0], "carried": beside}]) == render(
        template, **beside
    )
    assert render(carrying, **beside) == render(template, **beside)
    assert render(carrying) == render(template) == "a"
    assert render(with_carried_variables(DATED)) == render(DATED)
    assert original(carrying) == template and original(DATED) == DATED
