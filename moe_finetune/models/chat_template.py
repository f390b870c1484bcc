"""A checkpoint's chat template is a program: it runs in jinja's sandbox, without an end.

Loops over what does not depend on the conversation, such as ``range(99999)`` in another one, are
counted before anything is rendered.
"""

from __future__ import annotations

from moe_finetune.errors import CheckpointError

MAX_CHARACTERS = 1 << 20
MAX_STEPS = 1_000_000
_RANGE = 100_000  # the sandbox's own limit


def check_template(template: str, place: object) -> None:
    """Raise CheckpointError when ``template`` is not a template, or its loops take too long."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """The tag that marks what an assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    if len(template) > MAX_CHARACTERS:
        raise CheckpointError(f"{place}: chat template: has more than {MAX_CHARACTERS:,} letters")
    try:
        parsed = Environment(extensions=[Generation, loopcontrols]).parse(template)
        named = {
            each.target.name: each.node
            for each in parsed.find_all(nodes.Assign)
            if isinstance(each.target, nodes.Name)
        }
        steps = _steps(parsed, named)
    except (TemplateError, RecursionError) as error:
        raise CheckpointError(
            f"{place}: its chat template cannot be read ({type(error).__name__}: {error}); copy "
            "the tokenizer's files again"
        ) from None
    if steps > MAX_STEPS:
        raise CheckpointError(
            f"{place}: its chat template loops {steps:,} times or more whatever the conversation; "
            "take the template of the base model"
        )


def _steps(node, named) -> int:
    """Most rounds of the loops in ``node`` that do not depend on the conversation."""
    from jinja2 import nodes

    inner = sum(_steps(child, named) for child in node.iter_child_nodes())
    if isinstance(node, nodes.For):
        return _size(node.iter, named, 0) * max(1, inner)
    if isinstance(node, nodes.Mul | nodes.Pow):
        # A text or list is repeated so often, or a number is grown.
        sides = [side.value for side in (node.left, node.right) if isinstance(side, nodes.Const)]
        most = max((side for side in sides if isinstance(side, int)), default=0)
        return max(inner, most**2 if isinstance(node, nodes.Pow) else most)
    return inner


def _size(node, named, depth: int) -> int:
    """How many items a loop's object has, 1 where only the conversation tells."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name) and node.name in named and depth < 9:
        return _size(named[node.name], named, depth + 1)
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return len(node.value)
    if isinstance(node, nodes.List | nodes.Tuple):
        return len(node.items)
    if isinstance(node, nodes.Call) and getattr(node.node, "name", "") == "range":
        values = [arg.value for arg in node.args if isinstance(arg, nodes.Const)]
        if len(values) < len(node.args) or not all(isinstance(value, int) for value in values):
            return 1
        return min(len(range(*values)) if 0 < len(values) < 3 else _RANGE, _RANGE)
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _size(node.node, named, depth + 1)
    return 1
