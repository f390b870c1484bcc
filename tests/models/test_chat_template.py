"""Chat templates that loop for ever are refused before they are rendered."""

from __future__ import annotations

import json

import pytest

from moe_finetune.errors import CheckpointError
from moe_finetune.models.chat_template import check_template
from moe_finetune.models.loading import load_tokenizer
from tests import tiny

BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{% for a in 'x' * 2000000000 %}{% endfor %}",
    "{% for a in range(9999)|list %}{% for b in range(999) %}{% endfor %}{% endfor %}",
    "".join(f"{{% for a{i} in 'abcdefghij' %}}" for i in range(9)) + "{% endfor %}" * 9,
    "{{ 2 ** 100000 }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_bombs(template):
    with pytest.raises(CheckpointError, match="chat template loops"):
        check_template(template, "here")


def test_what_real_templates_do_is_taken():
    check_template(tiny.CHAT_TEMPLATE, "here")
    check_template(
        "{% for i in range(messages|length) %}{% for c in m %}{% endfor %}{% endfor %}", ""
    )
    check_template(
        "{% for m in messages[::-1] %}{% if loop.first %}{% break %}{% endif %}{% endfor %}", ""
    )


def test_a_tokenizer_with_one_is_refused_by_its_folder(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(BOMBS[0])
    with pytest.raises(CheckpointError, match=r"chat template loops"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": BOMBS[1]}))
    with pytest.raises(CheckpointError, match=r"chat template loops"):
        load_tokenizer(tmp_path)
