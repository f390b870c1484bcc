"""Build HTML and SVG: all text is escaped unless it is already :class:`Markup`."""

import html
import math
from collections.abc import Iterable
from typing import Any, TypeGuard

DASH = "–"
VOID = {"meta", "br", "hr", "input", "img", "link", "wbr"}


class Markup(str):
    """Text that is already HTML; all other text is escaped."""

    __slots__ = ()


def escape(child: Any) -> str:
    """Return ``child`` as HTML: None is empty, lists are joined, plain values are escaped."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return str(child)
    if isinstance(child, (list, tuple)):
        return "".join(escape(c) for c in child)
    return html.escape(str(child), quote=True)


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return one element. ``class_`` is ``class``, ``aria_label`` is ``aria-label``.

    Attributes that are None or False are omitted; True is written without a value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{html.escape(str(value), quote=True)}"')
    opening = f"<{' '.join(parts)}>"
    if name in VOID:
        return Markup(opening)
    return Markup(f"{opening}{escape(children)}</{name}>")


def join(parts: Iterable[Any]) -> Markup:
    """Return the parts concatenated; plain text is escaped."""
    return Markup("".join(escape(p) for p in parts))


def breakable(name: str) -> Markup:
    """Return a name such as orthogonal_variance that may break after an underscore."""
    return Markup(escape(name).replace("_", "_<wbr>"))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is an int or float (NaN included, bool excluded)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value: Any, digits: int = 3) -> str:
    """Return a number as text with ``digits`` significant digits; ``–`` for a missing one.

    Integers are written in full with thin spaces; very large and very small numbers get an
    exponent.
    """
    if not is_number(value) or math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if isinstance(value, int) or (size >= 10**digits and size < 1e7):
        text = f"{round(value):,}".replace(",", "\u202f")
    elif size == 0:
        text = "0"
    elif size >= 1e7 or size < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        # a fixed number of decimals that gives `digits` significant ones
        text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
    return text.replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign and ``digits`` decimals."""
    if math.isnan(value):
        return DASH
    text = f"{value:+.{digits}f}"
    return (text[1:] if float(text) == 0 else text).replace("-", "−")
