"""A chat template that runs for ever ends; the next rendering goes on."""

import json
import signal

import pytest

from moe_finetune.data import chat
from moe_finetune.data.chat import TemplateLimitError
from moe_finetune.data.tokenize import rendered
from moe_finetune.errors import DataError
from moe_finetune.recipe.sections import DataSection
from tests.data.loading import load_dataset_for
from tests.support import tiny

SLOW = [
    "{% set n = messages|length * 40000 %}{% for a in range(n) %}{% for b in range(n) %}"
    "{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
]


@pytest.fixture(autouse=True)
def half_a_second(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.5)


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.mark.parametrize("template", SLOW)
def test_a_rendering_ends_and_the_next_one_goes_on(tokenizer, template):
    row = {"messages": [{"role": "user", "content": "a"}]}
    tokenizer.chat_template = template
    with pytest.raises(TemplateLimitError, match=r"chat template takes more than"):
        rendered(row, tokenizer)
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    assert rendered(row, tokenizer)[0] == "<|im_start|>user\na<|im_end|>"


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, SLOW[0]])
def test_the_timers_handler_is_the_processs_own_again(tokenizer, template):
    def handler(*_):
        pass

    tokenizer.chat_template = template
    row = {"messages": [{"role": "user", "content": "a"}]}
    former = signal.signal(signal.SIGPROF, handler)
    try:
        if template is tiny.CHAT_TEMPLATE:
            rendered(row, tokenizer)
        else:
            with pytest.raises(TemplateLimitError):
                rendered(row, tokenizer)
        assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
        assert signal.getsignal(signal.SIGPROF) is handler
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


def test_work_on_a_rendered_text_has_the_same_limit(tokenizer):
    row = {
        "messages": [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "a"}]
    }
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content | replace('a', 'b' * 1000000) | wordwrap(1) }}"
        "{% endfor %}"
    )
    with pytest.raises(TemplateLimitError, match=r"chat template takes more than"):
        rendered(row, tokenizer)


def test_the_row_whose_rendering_has_no_end_is_named(tokenizer, tmp_path):
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
