"""Checks of a checkpoint's chat template, untrusted code that is rendered with a time limit."""

from typing import Any

from moe_finetune.errors import CheckpointError

MAX_CHARACTERS = 1 << 20


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
