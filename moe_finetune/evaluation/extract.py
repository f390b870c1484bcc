r"""Rule-based extraction of final answers, and their comparison as numbers.

Numbers are compared as exact fractions, so ``1,000`` is ``1000.00``, ``0.5`` is ``1/2`` is
``\frac{1}{2}``, ``$18`` is ``18`` and ``50%`` is ``50`` (GSM8K writes percentages without the
sign). Text after the number (units, a period, another sentence) does not matter.
"""

import re
from fractions import Fraction

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
# A minus is a sign only if no operand precedes it: 10-5 and 10 - 5 contain 10 and 5.
_SIGN = r"(?<![\w.)\]}%])(?:[-\u2212\u2013](?=\S)|(?<![\w.)\]}%]\s)[-\u2212\u2013]\s)"
_CURRENCY = r"\\?[$€£¥]\s?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?:{_CURRENCY}(?P<inner>[-\u2212])?)?"
    rf"(?:\\[dt]?frac\{{(?P<top>-?\d+)\}}\{{(?P<bottom>\d+)\}}"
    rf"|(?P<whole>{_UNSIGNED})(?:\s+(?P<mixed>\d+/\d+))?(?:\s?/\s?(?P<over>{_UNSIGNED}))?)"
)
_STRICT = re.compile(r"####\s*")
_ANNOUNCED = re.compile(r"answer\s*(?:is|=|:)\s*:?\s*(?:\*\*)?\s*", re.IGNORECASE)


def _value(match: re.Match[str]) -> Fraction | None:
    try:
        if match["top"] is not None:
            value = Fraction(int(match["top"]), int(match["bottom"]))
        else:
            value = Fraction(match["whole"].replace(",", ""))
            if match["mixed"]:
                value += Fraction(match["mixed"])
            elif match["over"]:
                value /= Fraction(match["over"].replace(",", ""))
    except (ZeroDivisionError, ValueError):
        return None  # ValueError: more digits than Python reads (4,300)
    return -value if (match["sign"] is None) != (match["inner"] is None) else value


def numbers(text: str) -> list[Fraction]:
    """Return every number in ``text`` in order, as exact fractions."""
    return [v for m in _NUMBER.finditer(text) if (v := _value(m)) is not None]


def _number_at(text: str, start: int) -> Fraction | None:
    # The sign rule looks back, so the number is cut out before it is matched.
    line = text[start:].split("\n", 1)[0]
    match = _NUMBER.match(line.lstrip("*_ (\\"))
    return _value(match) if match else None


def strict_number(text: str) -> Fraction | None:
    """Return the number right after the first ``####``, or None."""
    mark = _STRICT.search(text)
    return _number_at(text, mark.end()) if mark else None


def final_number(text: str) -> Fraction | None:
    r"""Return the final answer of a free-form solution, or None.

    In this order: the number after ``####``; in the last ``\boxed{}``; after the last "answer is";
    the last number of the text.
    """
    if (value := strict_number(text)) is not None:
        return value
    if (inside := boxed(text)) is not None and (found_inside := numbers(inside)):
        return found_inside[-1]
    for mark in reversed(list(_ANNOUNCED.finditer(text))):
        if (value := _number_at(text, mark.end())) is not None:
            return value
    all_numbers = numbers(text)
    return all_numbers[-1] if all_numbers else None


_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?P<bare>[^{}$\n]{1,80})(?=\$))")


def boxed(text: str) -> str | None:
    r"""Return the content of the last balanced ``\boxed{...}`` (or ``\fbox{...}``), or None.

    MATH also writes ``\boxed 5$``, without braces.
    """
    for mark in reversed(list(_BOX.finditer(text))):
        if mark["bare"] is not None:
            return mark["bare"].strip().rstrip(".")
        depth = 1
        for i in range(mark.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[mark.end() : i].strip()
    return None


_DROP = re.compile(r"\\left|\\right|\\[,;:! ]|\\displaystyle|\\mathrm|\^\{?\\circ\}?|\s|\\?[$%]")


def normalize_math(answer: str) -> str:
    """Return a MATH-style answer without layout: spaces, sizes, units in text, currency."""
    answer = answer.strip().rstrip(".")
    answer = re.sub(r"\\(?:text|mbox)\{\s*([^}]*)\}", _text, answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", answer)
    answer = _DROP.sub("", answer)
    answer = re.sub(r"^[a-zA-Z]=", "", answer)
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)


def _text(match: re.Match[str]) -> str:
    # "5\text{ cm}" is a unit and goes; "\text{Monday}" is the answer and stays.
    return "" if match.string[: match.start()].strip() else match[1]


def math_equal(answer: str | None, reference: str) -> bool:
    """Return whether two MATH-style answers are equal after normalization or as numbers."""
    if answer is None:
        return False
    normalized, target = normalize_math(answer), normalize_math(reference)
    if normalized == target:
        return bool(normalized)
    a, b = _NUMBER.fullmatch(normalized), _NUMBER.fullmatch(target)
    return bool(a and b) and _value(a) is not None and _value(a) == _value(b)  # type: ignore[arg-type]


def math_answer(text: str) -> str | None:
    r"""Return the final answer of a MATH-style solution: the last ``\boxed{}``, else the sentence.

    The fallback is the text after the last "answer is" to the end of its line, without ``$``; a
    one-line reply is the answer itself.
    """
    if (inside := boxed(text)) is not None:
        return inside
    marks = list(_ANNOUNCED.finditer(text))
    start = marks[-1].end() if marks else 0
    if not marks and "\n" in text.strip():
        return None
    line = text[start:].strip().split("\n", 1)[0].strip()
    return re.split(r"\.(?:\s|$)", line, maxsplit=1)[0].strip().strip("$").strip() or None
