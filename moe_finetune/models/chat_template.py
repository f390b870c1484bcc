"""A checkpoint's chat template: validation, and variables from a conversation's first turn.

A template is untrusted code. It is parsed here and rendered with a time limit, see
:mod:`moe_finetune.data.chat`.
"""

from typing import Any

from moe_finetune.errors import CheckpointError

MAX_CHARACTERS = 1 << 20
_BEGIN = "{#- what this package gives -#}"
_END = "{%- set before_template = none %}\n"


def check_template(template: str, path: object) -> None:
    """Raise CheckpointError if ``template`` cannot be parsed; does not render it."""
    from jinja2 import TemplateError

    if len(template) > MAX_CHARACTERS:
        raise CheckpointError(f"{path}: chat template: has more than {MAX_CHARACTERS:,} letters")
    try:
        _parse(template)
    except (TemplateError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its chat template cannot be read ({type(error).__name__}: {error}); copy "
            "the tokenizer's files again"
        ) from None


def with_carried_variables(template: str) -> str:
    """``template`` that reads variables, such as ``tools``, from ``carried`` in the first turn.

    Variables passed in other ways apply unless the turn carries them.
    """
    from jinja2 import meta

    names = meta.find_undeclared_variables(_parse(template)) - {"messages", "strftime_now"}
    sets = (
        f"{{%- if messages and '{name}' in (messages[0].carried or {{}}) -%}}"
        f"{{%- set {name} = messages[0].carried['{name}'] -%}}{{%- endif -%}}"
        for name in sorted(names)
    )
    return _before("".join(sets), template)


def original(template: str) -> str:
    """The template without those statements; other templates are unchanged."""
    return template.rpartition(_END)[2] if template.startswith(_BEGIN) else template


def _before(statements: str, template: str) -> str:
    # trim_blocks drops a newline after a block, so the template's own first one is kept.
    return f"{_BEGIN}{statements}{_END}{template}"


def _parse(template: str) -> Any:
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """The tag that marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Environment(extensions=[Generation, loopcontrols]).parse(template)
