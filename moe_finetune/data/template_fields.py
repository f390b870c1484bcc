"""Which fields of turns a chat template reads, from its syntax tree."""

import functools
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template


def compiled_template(template: str) -> Any:
    """The template as transformers compiles it, once: its environment and its globals."""
    return _compile_jinja_template(template)


@functools.lru_cache(maxsize=8)
def fields_read(template: str) -> tuple[frozenset[str], bool]:
    """Fields that a template reads of any object, and whether it writes a turn as a whole.

    From its syntax tree, so that a field in a branch that no row takes counts, too.
    """
    tree = compiled_template(template).environment.parse(template)
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = [node.arg for node in tree.find_all(nodes.Getitem)]
    for call in tree.find_all((nodes.Call, nodes.Filter)):  # turn.get('x'), map(attribute='x')
        constants += [*call.args, *(keyword.value for keyword in call.kwargs)]
    constants += [node.expr for node in tree.find_all(nodes.Compare)]  # 'x' in turn
    fields |= {str(node.value) for node in constants if isinstance(node, nodes.Const)}
    turns = {"messages"}
    for node in tree.find_all((nodes.For, nodes.Assign)):  # a name is bound before it is used
        source = node.iter if isinstance(node, nodes.For) else node.node
        if _is_turn(source, turns) and isinstance(node.target, nodes.Name):
            turns.add(node.target.name)
    written = [part for node in tree.find_all((nodes.Output, nodes.Concat)) for part in node.nodes]
    written += [node.node for node in tree.find_all(nodes.Filter) if node.name in _WHOLE]
    written += [node.node for node in tree.find_all(nodes.Getattr) if node.attr == "items"]
    return frozenset(fields), any(_is_turn(part, turns) for part in written)


def field_reader(tokenizer: Any) -> Callable[[str], bool | None]:
    """Function that tells whether the tokenizer's template reads a field of turns; None: perhaps.

    A template for rows with tools counts, too.
    """
    templates = tokenizer.chat_template or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    found = [fields_read(text) for text in texts]

    def reads(field: str) -> bool | None:
        if any(field in fields for fields, _ in found):
            return True
        return None if any(whole for _, whole in found) else False

    return reads


_WHOLE = ("tojson", "string", "dictsort", "items", "pprint")
"""Filters that write an object with all of its fields."""


def _is_turn(node: Any, turns: set[str]) -> bool:
    """Whether ``node`` is one of the names, or an item, slice or filtered list of one."""
    while isinstance(node, nodes.Filter) or (
        isinstance(node, nodes.Getitem) and not isinstance(getattr(node.arg, "value", 0), str)
    ):
        node = node.node
    return isinstance(node, nodes.Name) and node.name in turns
