"""Words in the number of what they count: ``1 row is``, ``2 rows are``."""

_SINGULAR = {
    **{"are": "is", "were": "was", "have": "has", "their": "its", "they": "it"},
    **{"begin": "begins", "call": "calls", "change": "changes", "end": "ends"},
}


def counted(count: int, noun: str) -> str:
    """``count`` with ``noun`` in its number, which takes an s: ``1 row``, ``1,200 rows``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def in_number(text: str, count: int) -> str:
    """``text`` with each ``{are}``, ``{have}``, ``{were}``, ... in the number of ``count``."""
    for plural, singular in _SINGULAR.items():
        text = text.replace(f"{{{plural}}}", singular if count == 1 else plural)
    return text
