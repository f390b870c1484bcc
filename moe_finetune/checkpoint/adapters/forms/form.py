"""What a form of an adapter is: one file with its names and packing, registered in one line."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.forms.expert_keys import Kind, expert_keys
from moe_finetune.checkpoint.adapters.updates import OpenAdapter
from moe_finetune.checkpoint.open import Checkpoint
from moe_finetune.errors import AdapterError
from moe_finetune.io.safetensors_header import TensorInfo
from moe_finetune.registry import Registry

Written = tuple[dict[str, Any], Mapping[str, TensorInfo]]
"""The config, and the tensors by key without PEFT's prefix."""


@dataclass(frozen=True)
class Form:
    """A form of an adapter.

    Attributes:
        programs: those that write or read it.
        loses: what an adapter loses when it is written so, in a clause.
        write: the adapter in this form; refused with the reason where it has none. None for a form
            that is only read.
        kinds: the kinds of experts' keys in its files; None where PEFT's own rules read it.
        named: whether an adapter without factors of experts has this form's names of other modules.
        read: an adapter in this form as PEFT's stacks over the base's class.
    """

    programs: str
    loses: str = ""
    write: Callable[[OpenAdapter], Written] | None = None
    kinds: frozenset[Kind] | None = None
    named: Callable[[Adapter, Checkpoint], bool] | None = None
    read: Callable[[Adapter, Checkpoint], Adapter] | None = None


FORMS: Registry[Form] = Registry("form of an adapter", AdapterError)
"""By the names of ``convert --to``."""


def losses_by_form(adapter: OpenAdapter) -> Iterator[tuple[str, str, str]]:
    """Each form that can be written: its name, the programs, and what ``adapter`` loses in it."""
    for name, form in FORMS.items():
        if form.write is None:
            continue
        try:
            form.write(adapter)
        except AdapterError as error:
            reason = str(error).removeprefix(f"{adapter.folder}: ")
            yield name, form.programs, f"not possible: {reason}"
        else:
            yield name, form.programs, form.loses


def in_class(stored: Adapter, base: Checkpoint) -> Adapter:
    """``stored`` in the form that PEFT's rules read, which it may have already.

    A file that mixes keys of several forms is refused.
    """
    by_kind: dict[Kind, str] = {}
    for key in expert_keys(stored):
        by_kind.setdefault(key.kind, key.key)
    kinds = by_kind.keys()
    form = next(
        (
            form
            for form in FORMS.values()
            if form.kinds == kinds
            or (not kinds and form.named is not None and form.named(stored, base))
        ),
        None,
    )
    if form is not None and form.read is not None:
        return form.read(stored, base)
    if kinds - {"peft", "per-expert"}:
        first, second = list(by_kind.values())[:2]
        raise AdapterError(
            f"{stored.folder}: adapter tensor '{first}' and '{second}' are in the forms of two "
            "programs; copy the adapter again, or save it with one of them"
        )
    return stored
