"""What ``adapter_config.json`` may say before PEFT or a merge follows it.

PEFT matches some of its values as regular expressions against every module's name; one with nested
repeats takes years. Only expressions whose time grows gently are let through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from moe_finetune.errors import AdapterError

MAX_PATTERN = 2_000
MAX_PATTERNS = 2_000
MAX_REPEATS = 5
MAX_RANK = 1 << 16
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, getattr(codes, "POSSESSIVE_REPEAT", None))
_ASSERTIONS = (codes.ASSERT, codes.ASSERT_NOT)


def check_adapter_config(config: Mapping[str, Any], place: object) -> None:
    """Check the values of a LoRA config; ``place`` begins the messages.

    Raises:
        AdapterError: names the key: a rank that is not a whole number, an alpha that is not finite,
            a list of something else than names, or an expression that is wrong or too costly.
    """
    ranks, alphas = (_patterns(config, f"{key}_pattern", place) for key in ("rank", "alpha"))
    for key, rank in {"r": config.get("r"), **ranks}.items():
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise AdapterError(
                f"{place}: '{key:.80}' must be a positive number (a rank of at most {MAX_RANK:,}), "
                f"got {rank!r:.60}"
            )
    for key, alpha in {"lora_alpha": config.get("lora_alpha"), **alphas}.items():
        if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise AdapterError(
                f"{place}: '{key:.80}' must be a positive number (an alpha), got {alpha!r:.60}"
            )
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = config.get(key)
        if isinstance(value, str):
            check_pattern(value, f"{place}: {key}", MAX_REPEATS)
        else:
            _names(value, key, place)
    for pattern in config.get("layers_pattern") or ():
        check_pattern(pattern, f"{place}: layers_pattern", 0)
    for key in ("target_parameters", "modules_to_save"):
        _names(config.get(key), key, place)
    layers = config.get("layers_to_transform")
    if not all(type(n) is int for n in (layers if isinstance(layers, list) else [layers or 0])):
        raise AdapterError(f"{place}: layers_to_transform: wanted numbers, got {layers!r:.60}")
    start = config.get("init_lora_weights", True)
    if start not in (True, False, None, "gaussian", "orthogonal"):
        raise AdapterError(
            f"{place}: init_lora_weights is {start!r:.60}, which changes the base's weights too; "
            "convert the adapter to an ordinary one with PEFT"
        )


def check_pattern(pattern: Any, place: object, most: int) -> int:
    """Number of repeats of an expression that matches names in little time.

    Raises:
        AdapterError: it is none; it has a repeat inside a repeat, a choice inside a repeat, a
            reference back to a group, or more than ``most`` repeats.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise AdapterError(f"{place}: {pattern!r:.60} is not a short text")
    try:
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as problem:
        reason = f"is not a regular expression ({problem})"
        raise AdapterError(f"{place}: {pattern!r:.80} {reason}") from None
    try:
        repeats = _repeats(parsed, inside=False)
    except (_CostlyError, RecursionError):
        repeats = most + 1
    if repeats > most:
        raise AdapterError(
            f"{place}: {pattern!r:.80} may take very long to match (repeats inside repeats, or "
            f"more than {most} of them); list the modules' names instead"
        )
    return repeats


class _CostlyError(Exception):
    """A repeat or a choice inside a repeat, or a reference back."""


def _repeats(parsed: Any, inside: bool) -> int:
    """Repeats in a parsed expression, ``inside`` another or not."""
    count = 0
    for code, argument in parsed:
        if code in _REPEATS:
            if inside:
                raise _CostlyError
            # What may be there once (`?`) is tried both ways, but may hold a choice.
            count += 1 + _repeats(argument[2], inside=argument[1] > 1)
        elif code is codes.BRANCH:
            if inside:
                raise _CostlyError
            count += sum(_repeats(branch, inside) for branch in argument[1])
        elif code is codes.SUBPATTERN:
            count += _repeats(argument[-1], inside)
        elif code in _ASSERTIONS:
            count += _repeats(argument[1], inside)
        elif code in (codes.GROUPREF, codes.GROUPREF_EXISTS):
            raise _CostlyError
        elif code is getattr(codes, "ATOMIC_GROUP", ""):
            count += _repeats(argument, inside)
    return count


def _patterns(config: Mapping[str, Any], key: str, place: object) -> dict[str, Any]:
    """``rank_pattern`` or ``alpha_pattern``: all its expressions are tried on every name."""
    value = config.get(key) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise AdapterError(f"{place}: {key}: wanted a small object, got {type(value).__name__}")
    left = 2 * MAX_REPEATS
    for pattern in value:
        left -= check_pattern(pattern, f"{place}: {key}", min(left, 2))
    return value


def _names(value: Any, key: str, place: object) -> None:
    if value is not None and not (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ):
        raise AdapterError(f"{place}: {key}: wanted a list of names, got {value!r:.60}")
