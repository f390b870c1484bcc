"""Chat templates are parsed where they are read; nothing of them runs there."""

import pytest

from moe_finetune.errors import CheckpointError
from moe_finetune.models.chat_template import check_template
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from tests.support import tiny

DATED = (
    "\n  {% if strftime_now is defined %}{% set f = '%d %b %Y' %}Today {{ strftime_now(f) }}"
    "{% endif %}\n{% for m in messages %}{{ strftime_now('%Y-%m-%d') }} {{ m['content'] }}"
    "{% generation %}!{% endgeneration %}{% endfor %}"
)


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
