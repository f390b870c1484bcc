"""Convert published layouts of conversations to the turns that chat templates accept.

OpenAI's (``messages``, ``tools``, ``tool_calls`` with arguments as JSON text, per-turn ``weight``),
TRL's (arguments as objects, ``chat_template_kwargs``) and ShareGPT's (``from`` and ``value``,
``function_call``, ``observation``, a column ``system``) become one: ``role``, ``content`` (text, a
list of text parts, or null with a call), ``tool_calls``, ``reasoning_content`` and any other fields
of a turn. ``train: False`` marks an answer that is not learned.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.json_file import JsonError, parse_json
from moe_finetune.io.rows import Row, short

ROLES = ("system", "developer", "user", "assistant", "tool")
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_CALLS = ("function_call", "tool_call")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_SYNONYMS = ("weight", "training", "loss")
"""Keys of other layouts that decide whether a turn is learned."""
COLUMNS = ("messages", "tools", "system", "chat_template_kwargs")
"""Columns of a conversation."""


def conversation(
    where: str,
    turns: Any,
    row: Mapping[str, Any],
    field: str = "messages",
) -> Row:
    """Return ``messages``, and the template's ``tools`` and ``variables`` if the row has them.

    Args:
        where: the row's location, for messages.
        turns: the row's turns, unchecked.
        row: read for ``tools``, ``system`` and ``chat_template_kwargs``.
        field: where the row has the turns, for messages.

    Raises:
        DataError: anything cannot be used; names the location.
    """
    for column in _MEDIA:
        if row.get(column):
            raise DataError(
                f"{where}: '{column}': only text can be trained; remove the rows or the column"
            )
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: '{field}': must be a list of turns, not {short(turns)}")
    formed: Row = {"messages": []}
    for index, turn in enumerate(turns):
        checked = turn_of(f"{where}: {field}[{index}]", turn)
        calls = index and _is_call(turn) and _is_call(turns[index - 1])
        if calls and formed["messages"][-1].get("train") == checked.get("train"):
            # This layout has one turn per call; consecutive calls are one answer.
            formed["messages"][-1]["tool_calls"] += checked["tool_calls"]
        else:
            formed["messages"].append(checked)
    _name_results(formed["messages"])
    system = row.get("system")
    if system:
        if not isinstance(system, str):
            raise DataError(f"{where}: 'system': must be text, not {short(system)}")
        first = formed["messages"][0]
        if first["role"] != "system":
            formed["messages"].insert(0, {"role": "system", "content": system})
        elif first["content"] != system:
            raise DataError(
                f"{where}: 'system' and the first turn are two different system prompts; remove one"
            )
    tools = _tools(where, row)
    if tools:
        formed["tools"] = tools
    variables = row.get("chat_template_kwargs")
    if variables:
        if not isinstance(variables, dict):
            raise DataError(
                f"{where}: 'chat_template_kwargs': must be an object, not {short(variables)}"
            )
        formed["variables"] = variables
    return formed


def each_answer(formed: Row) -> list[Row]:
    """One example for each learned answer, with the turns before it."""
    turns = formed["messages"]
    examples = []
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant" and turn.get("train", True):
            context = [
                {**other, "train": False} if other["role"] == "assistant" else other
                for other in turns[:index]
            ]
            examples.append({**formed, "messages": [*context, turn]})
    return examples


def until_last_answer(formed: Row) -> Row:
    """The row without the turns after its last answer; unchanged if it has no answer."""
    turns = formed["messages"]
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    return formed if last in (-1, len(turns) - 1) else {**formed, "messages": turns[: last + 1]}


def unlearned(turns: Sequence[Row]) -> list[Row]:
    """``turns`` whose answers are not learned."""
    return [{**t, "train": False} if t.get("role") == "assistant" else t for t in turns]


def turn_of(where: str, turn: Any) -> Row:
    """One turn, checked; ``where`` is its location, for messages."""
    if not isinstance(turn, dict):
        raise DataError(f"{where}: expected {{role, content}}, got {short(turn)}")
    # A table adds null for fields that only other rows have.
    fields = {k: v for k, v in turn.items() if v is not None}
    named = fields.pop("role", None) or fields.pop("from", None)
    fields.pop("from", None)
    content = fields.pop("content", None)
    if content is None:
        content = fields.pop("value", None)
    role = _ALIASES.get(str(named), named)
    if named in _CALLS:
        role, fields["tool_calls"], content = "assistant", content, None
    if role not in ROLES:
        raise DataError(f"{where}: role {named!r}{did_you_mean(str(named), ROLES)}")
    if "function_call" in fields:  # OpenAI's layout before turns could have several calls
        fields["tool_calls"] = [fields.pop("function_call")]
    if fields.get("tool_calls"):
        if role != "assistant":
            raise DataError(
                f"{where}: 'tool_calls' in a turn of '{role}'; only the assistant may call tools"
            )
        calls = named if named in _CALLS else "tool_calls"
        fields["tool_calls"] = _calls(f"{where}: {calls}", fields["tool_calls"])
    else:
        fields.pop("tool_calls", None)
    if fields.get("train_detail"):
        raise DataError(
            f"{where}: 'train_detail': part of an answer cannot be learned; remove the field, or "
            "skip the answer with train: false"
        )
    train = _trained(where, role, fields)
    content = _content(where, role, content, fields)
    checked = {"role": role, "content": content, **fields}
    return checked if train else {**checked, "train": False}


def _name_results(turns: Sequence[Row]) -> None:
    """Name the tool of results that have only their call's id, which some templates cannot read."""
    names = {}
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            names[call.get("id")] = call["function"]["name"]
        id_ = turn.get("tool_call_id")
        if turn["role"] == "tool" and not turn.get("name") and id_ and id_ in names:
            turn["name"] = names[id_]


def _is_call(turn: Mapping[str, Any]) -> bool:
    """Return whether the turn's role marks a call, as in ShareGPT's ``function_call``."""
    return (turn.get("role") or turn.get("from")) in _CALLS


def _trained(where: str, role: str, fields: Row) -> bool:
    """Return whether the turn is learned; remove the keys that decide this from ``fields``."""
    for name in _SYNONYMS:
        if fields.pop(name, 1) != 1:
            raise DataError(
                f"{where}: '{name}': only 1 or true is read; for an answer that is context only, "
                "write train: false"
            )
    train = fields.pop("train", None)
    if train not in (None, 0, 1):
        raise DataError(f"{where}: 'train': must be true or false, not {short(train)}")
    if train and role != "assistant":
        raise DataError(
            f"{where}: 'train' is set on a turn of '{role}'; only the assistant's turns are learned"
        )
    return train is None or bool(train) or role != "assistant"


def _content(where: str, role: str, content: Any, fields: Row) -> Any:
    if isinstance(content, list):
        content = _parts(f"{where}: content", content)
    if content is not None and not isinstance(content, str | list):
        raise DataError(f"{where}: content: must be text, not {short(content)}")
    text = content if isinstance(content, str) else "".join(p["text"] for p in content or ())
    thought = any(fields.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    if role != "assistant":
        if content is None:
            raise DataError(f"{where}: content: must be text, not None")
    elif not text.strip() and not fields.get("tool_calls") and not thought:
        raise DataError(f"{where}: the assistant's content is empty")
    elif content is None and not fields.get("tool_calls"):
        return ""
    return content


def _parts(where: str, parts: list[Any]) -> list[Row]:
    checked = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise DataError(f"{where}[{index}]: expected {{type, text}}, got {short(part)}")
        kind = str(part.get("type", "text" if "text" in part else None))
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            checked.append({"type": "text", "text": part["text"]})
            continue
        raise DataError(
            f"{where}[{index}]: a part of type '{kind}'; only text can be trained; remove the "
            "rows or the part"
        )
    return checked


def _calls(where: str, calls: Any) -> list[Row]:
    """Calls as ``{type, function: {name, arguments}}``, arguments as an object.

    Arguments that were JSON text are also kept as ``arguments_text``, for templates that write text
    unchanged.
    """
    if isinstance(calls, str):
        calls = _parsed(where, calls)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise DataError(f"{where}: must be a list of calls, not {short(calls)}")
    checked = []
    for index, call in enumerate(calls):
        location = f"{where}[{index}]"
        if not isinstance(call, dict):
            raise DataError(
                f"{location}: expected {{function: {{name, arguments}}}}, got {short(call)}"
            )
        call = {key: value for key, value in call.items() if value is not None}
        function = call.pop("function", None)
        if function is None:
            function = {k: call.pop(k) for k in ("name", "arguments", "parameters") if k in call}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{location}: the call has no function name: {short(function)}")
        arguments = function.get("arguments", function.get("parameters"))
        function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        if isinstance(arguments, str):
            function["arguments"] = _parsed(f"{location}: arguments", arguments)
            function["arguments_text"] = arguments
        if not isinstance(function["arguments"], dict):
            raise DataError(f"{location}: arguments: must be an object, not {short(arguments)}")
        checked.append({"type": "function", **call, "function": function})
    return checked


def _tools(where: str, row: Mapping[str, Any]) -> list[Row]:
    if row.get("functions"):
        raise DataError(f"{where}: 'functions': rename the column to 'tools'")
    tools = row.get("tools")
    if not tools:
        return []
    if isinstance(tools, str):
        tools = (_parsed(f"{where}: 'tools'", tools) if tools.strip() else None) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: 'tools': must be a list of JSON schemas, not {short(tools)}")
    tools = [_without_nulls(tool) for tool in tools]
    return [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


def _without_nulls(value: Any) -> Any:
    """A schema without keys of null, which a table adds; some templates need a description."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if v is not None or k in ("default", "description")}
    return {
        k: "" if v is None and k == "description" else _without_nulls(v) for k, v in kept.items()
    }


def _parsed(where: str, text: str) -> Any:
    try:
        return parse_json(text)
    except JsonError as error:
        raise DataError(f"{where}: {error.problem}: {short(text)}") from None


def as_text(formed: Mapping[str, Any]) -> str:
    """A formed conversation as JSON, in the order of its fields; a table would add nulls.

    Raises:
        TypeError, ValueError: a value is not valid in JSON, such as bytes.
    """
    return json.dumps(dict(formed), allow_nan=False)
