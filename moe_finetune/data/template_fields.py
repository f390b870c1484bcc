"""Which fields of turns a chat template reads, from its syntax tree."""

import functools
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from moe_finetune.models.tokenizer import Tokenizer


def compiled_template(template: str) -> Any:
    """The template as transformers compiles it, once: its environment and its globals."""
    return _compile_jinja_template(template)


@functools.lru_cache(maxsize=8)
def fields_read(template: str) -> tuple[frozenset[str], bool]:
    """Fields that a template may read of a turn, and whether it writes a turn as a whole.

    From its syntax tree, so that a field in a branch that no row takes counts, too. What it reads
    of a tool, of a call or of another field of a turn does not.
    """
    tree = compiled_template(template).environment.parse(template)
    is_other = _no_turns(tree)
    read = [(node.node, nodes.Const(node.attr)) for node in tree.find_all(nodes.Getattr)]
    read += [(node.node, node.arg) for node in tree.find_all(nodes.Getitem)]
    for call in tree.find_all((nodes.Call, nodes.Filter)):  # turn.get('x'), map(attribute='x')
        is_method = isinstance(call, nodes.Call) and isinstance(call.node, nodes.Getattr)
        of = call.node.node if is_method else call.node
        read += [(of, arg) for arg in (*call.args, *(keyword.value for keyword in call.kwargs))]
    read += [(node.ops[0].expr, node.expr) for node in tree.find_all(nodes.Compare)]  # 'x' in turn
    fields = {
        str(name.value) for of, name in read if isinstance(name, nodes.Const) and not is_other(of)
    }
    turns = {"messages"}
    for node in tree.find_all((nodes.For, nodes.Assign)):  # a name is bound before it is used
        source = node.iter if isinstance(node, nodes.For) else node.node
        if _is_turn(source, turns) and isinstance(node.target, nodes.Name):
            turns.add(node.target.name)
    written = [part for node in tree.find_all((nodes.Output, nodes.Concat)) for part in node.nodes]
    written += [node.node for node in tree.find_all(nodes.Filter) if node.name in _WHOLE]
    written += [node.node for node in tree.find_all(nodes.Getattr) if node.attr == "items"]
    return frozenset(fields), any(_is_turn(part, turns) for part in written)


def _no_turns(tree: nodes.Template) -> Callable[[Any], bool]:
    """Function that tells whether an expression is surely no turn.

    A tool, a namespace, a field of anything, or a name that is bound to nothing else: turns are in
    ``messages`` alone.
    """
    bound: dict[str, list[Any]] = {}
    pairs: list[tuple[Any, Any]] = [(n.target, n.iter) for n in tree.find_all(nodes.For)]
    pairs += [(node.target, node.node) for node in tree.find_all(nodes.Assign)]
    macros = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            pairs += zip(macros[call.node.name], call.args, strict=False)
            pairs += [(nodes.Name(given.key, "param"), given.value) for given in call.kwargs]
    for target, source in pairs:  # each name of `for key, value in ...`
        for name in target.find_all(nodes.Name) if isinstance(target, nodes.Tuple) else [target]:
            bound.setdefault(name.name, []).append(source)
    spaces = {"loop"} | {n for n, sources in bound.items() if any(map(_is_namespace, sources))}

    def is_other(node: Any, seen: frozenset[str] = frozenset()) -> bool:
        if isinstance(node, nodes.Name):
            if node.name == "messages" or node.name in spaces | seen:
                return node.name != "messages"
            sources = bound.get(node.name, [])  # a variable of the template has none
            return all(is_other(source, seen | {node.name}) for source in sources)
        if isinstance(node, nodes.Filter) or _is_item(node):
            return is_other(node.node, seen)
        if isinstance(node, (nodes.CondExpr, nodes.Or, nodes.Const, nodes.List)):
            return all(is_other(part, seen) for part in node.iter_child_nodes(exclude=("test",)))
        if isinstance(node, nodes.Call):  # turn.get('tool_calls')
            return isinstance(node.node, nodes.Getattr) and is_other(node.node, seen)
        if isinstance(node, (nodes.Getattr, nodes.Getitem)):  # loop.previtem may be a turn
            return not (isinstance(node.node, nodes.Name) and node.node.name in spaces)
        return False

    return is_other


def _is_namespace(node: Any) -> bool:
    return isinstance(node, nodes.Call) and getattr(node.node, "name", None) == "namespace"


def _is_item(node: Any) -> bool:
    """Whether ``node`` is an item of a list, or a slice of one."""
    return isinstance(node, nodes.Getitem) and not isinstance(getattr(node.arg, "value", 0), str)


def field_reader(tokenizer: Tokenizer) -> Callable[[str], bool | None]:
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
    while isinstance(node, nodes.Filter) or _is_item(node):
        node = node.node
    return isinstance(node, nodes.Name) and node.name in turns
