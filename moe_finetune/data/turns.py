"""Convert published layouts of conversations to the turns that chat templates accept.

OpenAI's (``messages``, ``tools``, ``tool_calls`` with arguments as JSON text), TRL's (arguments as
objects, ``chat_template_kwargs``) and ShareGPT's (``from`` and ``value``, ``function_call``,
``observation``, a column ``system``) become one: ``role``, ``content`` (text, or null with a call),
``tool_calls``, ``reasoning_content`` and any other fields of a turn. ``train: False`` marks an
answer that is not learned; :data:`MASKS` has the fields by which other trainers say so.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.counted import counted, in_number
from moe_finetune.io.json_file import JsonError, parse_json
from moe_finetune.io.row_files import Row, short

ROLES = ("system", "developer", "user", "assistant", "tool")
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_CALLS = ("function_call", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
COLUMNS = ("messages", "tools", "system", "chat_template_kwargs")
"""Columns of a conversation."""
_UNREAD = ("functions", "image", "images", "video", "videos", "audio", "audios")
MASKS = {
    "train": True,
    "trainable": True,  # agent trajectories of AReaL, rLLM
    "loss_mask": True,  # verl, slime, ScaleSWE
    "step_loss_mask": True,  # slime
    "train_on_turn": True,  # torchtune's and axolotl's datasets
    "masked": False,  # torchtune's Message
    "weight": True,  # OpenAI, Together
    "training": True,  # axolotl's message_field_training
    "loss": True,  # ms-swift
    "loss_scale": True,  # ms-swift
    "loss_weight": True,
}
"""Field of a turn -> whether a true value means that the turn is learned; with who writes it."""
_WEIGHTS = ("weight", "training", "loss", "loss_scale", "loss_weight")
"""Of these, 1 is a usual value in turns of any role."""
_AMBIGUOUS = ("mask", "train_detail")
"""These mean opposite things in different layouts, or a part of a turn."""
_RENDERING = (
    "messages", "conversation", "conversations", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "tokenize",
)  # fmt: skip
"""Arguments with which a template is rendered."""
_KNOWN = {"role", "content", "tool_calls", "train", *REASONING}


def conversation(
    where: str,
    turns: Any,
    row: Mapping[str, Any],
    field: str = "messages",
) -> Row:
    """``messages``, and the template's ``tools`` and ``variables`` if the row has them.

    Answers that a field of another trainer excludes are counted in ``hidden``; ``where`` and
    ``field`` are the turns' place, for messages.
    """
    for column in _UNREAD:
        if row.get(column):
            raise DataError(
                f"{where}: '{column}': only text can be trained, with the column 'tools'; rename "
                "or remove the column"
            )
    if isinstance(turns, str):  # Parquet gives all objects one's fields, so many write text
        turns = _parsed(f"{where}: '{field}'", turns)
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: '{field}': must be a list of turns, not {short(turns)}")
    checked: list[Row] = []
    hidden: Counter[str] = Counter()
    for index, turn in enumerate(turns):
        formed = turn_of(f"{where}: {field}[{index}]", turn, hidden)
        calls = index and _is_call(turn) and _is_call(turns[index - 1])
        if calls and checked[-1].get("train") == formed.get("train"):
            # This layout has one turn per call; consecutive calls are one answer.
            checked[-1]["tool_calls"] += formed["tool_calls"]
        else:
            checked.append(formed)
    _name_results(checked)
    system = row.get("system")
    if system:
        if not isinstance(system, str):
            raise DataError(f"{where}: 'system': must be text, not {short(system)}")
        if checked[0]["role"] != "system":
            checked.insert(0, {"role": "system", "content": system})
        elif checked[0]["content"] != system:
            raise DataError(
                f"{where}: 'system' and the first turn are two different system prompts; remove one"
            )
    variables = row.get("chat_template_kwargs")
    if variables and not isinstance(variables, dict):
        raise DataError(
            f"{where}: 'chat_template_kwargs': must be an object, not {short(variables)}"
        )
    for name in variables or ():
        if name in _RENDERING:
            raise DataError(
                f"{where}: 'chat_template_kwargs': '{name}' is no variable of a template; remove it"
            )
    tools = _tools(f"{where}: 'tools'", row.get("tools"))
    if variables and "tools" in variables:  # which transformers passes on like the column
        variables = dict(variables)
        others = _tools(f"{where}: 'chat_template_kwargs': 'tools'", variables.pop("tools"))
        if tools and others and tools != others:
            raise DataError(
                f"{where}: 'tools' and those of 'chat_template_kwargs' differ; remove one"
            )
        tools = tools or others
    for index, turn in enumerate(checked):  # DeepSeek-V3.2's layout has them in the first turn
        if not tools and turn["role"] in ("system", "developer") and "tools" in turn:
            tools = _tools(f"{where}: {field}[{index}]: 'tools'", turn.pop("tools"))
    beside = {"tools": tools, "variables": variables, "hidden": dict(hidden)}
    return {"messages": checked, **{name: value for name, value in beside.items() if value}}


def each_answer(formed: Row) -> list[Row]:
    """One example for each learned answer, with the turns before it.

    ``opening`` marks one without a user's turn, which many templates refuse.
    """
    turns = formed["messages"]
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    return [
        {
            **formed,
            "messages": [*unlearned(turns[:index]), turn],
            **({"opening": True} if index < first < len(turns) else {}),
        }
        for index, turn in enumerate(turns)
        if turn["role"] == "assistant" and turn.get("train", True)
    ]


def until_last_answer(formed: Row) -> Row:
    """The row without the turns after its last answer; unchanged if it has no answer."""
    turns = formed["messages"]
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    return formed if last in (-1, len(turns) - 1) else {**formed, "messages": turns[: last + 1]}


def unlearned(turns: Sequence[Row]) -> list[Row]:
    """``turns`` whose answers are not learned."""
    return [{**t, "train": False} if t.get("role") == "assistant" else t for t in turns]


@dataclass
class TurnCounts:
    """Counts over rows: turns hidden by a field of :data:`MASKS`, turns with other fields, and rows
    that call tools without definitions.
    """

    hidden: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    undefined: int = 0

    def add(self, formed: Row, tools: Any = None) -> None:
        """Count a row of :func:`conversation`, which may have its ``tools`` elsewhere."""
        turns = formed["messages"]
        self.hidden.update(formed.get("hidden", {}))
        for turn in turns:
            # The rule that names a result reads its call's id and its name.
            known = {*_KNOWN, "name", "tool_call_id"} if turn["role"] == "tool" else _KNOWN
            self.fields.update(turn.keys() - known)
        called = any(turn.get("tool_calls") for turn in turns)
        self.undefined += called and not (tools or formed.get("tools"))

    def lines(self, reads: Callable[[str], bool | None]) -> list[str]:
        """Sentences for the log.

        Args:
            reads: whether the chat template reads a field of turns; None if it may.
        """
        unlearned = "{are} not learned, because of {their} field"
        lines = [
            f"{counted(count, 'answer')} {in_number(unlearned, count)} '{name}'"
            for name, count in sorted(self.hidden.items())
        ]
        for answer, text in ((False, "not used"), (None, "perhaps used (the template reads turns "
                                                         "whole)")):  # fmt: skip
            names = [name for name in sorted(self.fields) if reads(name) is answer]
            places = ", ".join(
                f"{name} (in {counted(self.fields[name], 'turn')})" for name in names
            )
            lines += [f"fields of turns {text}: {places}"] if names else []
        if self.undefined:
            calls = in_number("{call} tools that no 'tools' define", self.undefined)
            lines.append(f"{counted(self.undefined, 'row')} {calls}")
        return lines


def turn_of(where: str, turn: Any, hidden: Counter[str] | None = None) -> Row:
    """One turn, checked; ``where`` is its location, for messages.

    ``hidden`` counts fields of other trainers that exclude an answer.
    """
    if not isinstance(turn, dict):
        raise DataError(f"{where}: expected {{role, content}}, got {short(turn)}")
    # A table adds null for fields that only other rows have.
    fields = {key: value for key, value in turn.items() if value is not None}
    named, content = fields.get("role") or fields.get("from"), fields.get("content")
    content = fields.get("value") if content is None else content
    for key in ("role", "from", "content", *(["value"] if "content" not in fields else [])):
        fields.pop(key, None)
    role = _ALIASES.get(str(named), named)
    if role not in ROLES:
        raise DataError(f"{where}: role {named!r}{did_you_mean(str(named), ROLES)}")
    if named in _CALLS:
        fields["tool_calls"] = _parsed(f"{where}: {named}", content)
        content = None
    if "function_call" in fields:  # OpenAI's layout before turns could have several calls
        fields["tool_calls"] = [fields.pop("function_call")]
    calls = fields.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise DataError(
                f"{where}: 'tool_calls' in a turn of '{role}'; only the assistant may call tools"
            )
        fields["tool_calls"] = _calls(f"{where}: tool_calls", calls)
    train = _trained(where, role, fields, hidden if hidden is not None else Counter())
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


def _trained(where: str, role: str, fields: Row, hidden: Counter[str]) -> bool:
    """Return whether the turn is learned; remove the keys that decide this from ``fields``."""
    remedy = "for an answer that is context only, write train: false"
    for name in _AMBIGUOUS:
        if name in fields:
            raise DataError(f"{where}: '{name}': is not read; {remedy}")
    learned = True
    for name, polarity in MASKS.items():
        value = fields.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            must = "must be true or false" if name == "train" else "is not read; it must be 0 or 1"
            raise DataError(f"{where}: '{name}': {must}, not {short(value)}; {remedy}")
        if role != "assistant":
            if bool(value) is polarity and name not in _WEIGHTS:
                raise DataError(
                    f"{where}: '{name}' is set on a turn of '{role}', as if it were learned; only "
                    "the assistant's turns are; remove the field"
                )
        elif bool(value) is not polarity:
            learned = False
            hidden.update([] if name == "train" else [name])
    return learned


def _content(where: str, role: str, content: Any, fields: Row) -> str | None:
    """The turn's content as one text; null with a call."""
    if isinstance(content, list):
        for i, part in enumerate(content if role == "assistant" else ()):
            _refuse_mask(f"{where}: content[{i}]", part)
        content = "".join(_part(f"{where}: content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise DataError(f"{where}: content: must be text, not {short(content)}")
    if role != "assistant" or fields.get("tool_calls"):
        return content
    if not (content or "").strip() and not any(fields.get(name) for name in REASONING):
        raise DataError(f"{where}: the assistant's content is empty")
    return content or ""


def _refuse_mask(where: str, part: Any) -> None:
    """Raise an error for a field by which another trainer excludes a part of a turn."""
    for name, value in part.items() if isinstance(part, dict) else ():
        learned = isinstance(value, bool | int | float) and value == MASKS.get(name)
        if value is None or learned or name not in {*MASKS, *_AMBIGUOUS}:
            continue
        raise DataError(
            f"{where}: '{name}': a turn is learned as a whole, or not at all; for an answer that "
            "is context only, write train: false in its turn"
        )


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise DataError(f"{where}: expected {{type, text}}, got {short(part)}")
    kind = str(part.get("type", "text" if "text" in part else None))
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return part["text"]
    raise DataError(
        f"{where}: a part of type '{kind}'; only text can be trained; remove the rows or the part"
    )


def _calls(where: str, calls: Any) -> list[Row]:
    """Calls as ``{type, function: {name, arguments}}``, arguments as an object.

    Arguments that were JSON text are also kept as ``arguments_text``, for templates that write text
    unchanged.
    """
    calls = _parsed(where, calls)
    calls = [calls] if isinstance(calls, dict) else calls
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
        _refuse_mask(location, call)
        _refuse_mask(location, call.get("function"))
        function = call.pop("function", None)
        if function is None:
            function = {k: call.pop(k) for k in ("name", "arguments", "parameters") if k in call}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{location}: the call has no function name: {short(function)}")
        written = function.get("arguments", function.get("parameters"))
        if isinstance(written, str) and not written.strip():  # a tool without parameters
            written = None
        arguments = {} if written is None else _parsed(f"{location}: arguments", written)
        if not isinstance(arguments, dict):
            raise DataError(f"{location}: arguments: must be an object, not {short(written)}")
        function = {"name": function["name"], "arguments": arguments}
        function |= {"arguments_text": written} if isinstance(written, str) else {}
        checked.append({"type": "function", **call, "function": function})
    return checked


def _tools(where: str, tools: Any) -> list[Row]:
    tools = _parsed(where, tools) if not isinstance(tools, str) or tools.strip() else None
    if not tools:
        return []
    if isinstance(tools, list):  # tables have each schema as text, since their fields differ
        tools = [
            _parsed(f"{where}[{index}]", tool) if isinstance(tool, str) else tool
            for index, tool in enumerate(tools)
        ]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: must be a list of JSON schemas, not {short(tools)}")
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
    fields = {k: v for k, v in value.items() if v is not None or k in ("default", "description")}
    return {
        k: "" if v is None and k == "description" else _without_nulls(v) for k, v in fields.items()
    }


def _parsed(where: str, value: Any) -> Any:
    """``value``, which may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except JsonError as error:
        raise DataError(f"{where}: {error.problem}: {short(value)}") from None
