r"""Rule-based extraction of final answers, and their comparison as numbers.

Numbers are compared as exact fractions, so ``1,000`` is ``1000.00``, ``0.5`` is ``1/2`` is
``\frac{1}{2}``, ``$18`` is ``18`` and ``50%`` is ``50`` (GSM8K writes percentages without the
sign). Text after the number (units, a period, another sentence) does not matter.
"""

import re
from fractions import Fraction

# An exponent has at most three digits, so that a number stays small enough to compute.
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
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
# What ends an equation in a sentence: punctuation, or a word that begins another statement.
_ENDS_EQUATION = re.compile(
    r"[\n;:]|[.,](?=\s|$)|[!?](?=\s+[^\s=]|\s*$)|\b(?:after|and|as|because|but|for|from|given|if|not"
    r"|or|since|so|that|when|where|which|with)\b",
    re.IGNORECASE,
)
_BEFORE_NUMBER = "*_ (\\"
_EQUALS = re.compile(r"(?<![<>=!:])=(?!=)")
_OPERATOR = re.compile(
    r"[\w)\]}%]\s*(?:[+/\u00d7\u00f7^\u2212\u2013-]|\*{1,2}|\\(?:times|cdot|div)\b)\s*[\d(\[{$.\\]"
    r"|\d\s+(?:x|times|plus|minus)\s+\d"
)


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
    match = _NUMBER.match(line.lstrip(_BEFORE_NUMBER))
    return _value(match) if match else None


def _equation_value(text: str) -> Fraction | None:
    """The result of the equation with which ``text`` begins: 7 of ``10 - 3 = 7 apples, because``.

    The result is the last side that is a number, not a computation. None without an equation: a
    number whose sentence goes on to another one ("12, since x = 3") is the answer itself.
    """
    end = _ENDS_EQUATION.search(text)
    sides = _EQUALS.split(text[: end.start()] if end else text)
    if len(sides) == 1 or sides[0].count("(") > sides[0].count(")"):
        return None
    values = [_number_at(side, 0) for side in sides if not _is_computation(side)]
    return next((value for value in reversed(values) if value is not None), None)


def _is_computation(side: str) -> bool:
    """Whether a side of an equation computes: 10 - 3 does, and the fraction 3/4 is a number."""
    side = side.lstrip(_BEFORE_NUMBER)
    match = _NUMBER.match(side)
    return _OPERATOR.search(side, match.end() - 1 if match else 0) is not None


def _announced(text: str, start: int) -> Fraction | None:
    """The answer at ``start``: the result of an equation, else the number right there."""
    if (value := _equation_value(text[start:])) is not None:
        return value
    return _number_at(text, start)


def strict_number(text: str) -> Fraction | None:
    """Return the number right after the first ``####``, or None."""
    mark = _STRICT.search(text)
    return _number_at(text, mark.end()) if mark else None


def final_number(text: str) -> Fraction | None:
    r"""Return the final answer of a free-form solution, or None.

    In this order: the number after ``####``; in the last ``\boxed{}``; after the last "answer is";
    the last number of the text. Of an equation there, its result.
    """
    if (mark := _STRICT.search(text)) and (value := _announced(text, mark.end())) is not None:
        return value
    if (inside := boxed(text)) is not None and (inside_numbers := numbers(inside)):
        result = _equation_value(inside)
        return inside_numbers[-1] if result is None else result
    for mark in reversed(list(_ANNOUNCED.finditer(text))):
        if (value := _announced(text, mark.end())) is not None:
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
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([^()]*\))?")


def normalize_math(answer: str) -> str:
    """Return a MATH-style answer without layout: spaces, sizes, units in text, currency."""
    answer = answer.strip().rstrip(".")
    answer = re.sub(r"\\(?:text|mbox)\{\s*([^}]*)\}", _text, answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", answer)
    # Before spaces go: "3, 400" are two numbers, as are those of the point or interval (2,100).
    answer = answer.replace(r"\!", "").replace("{,}", ",")
    answer = _THOUSANDS.sub(_joined, answer)
    return _DROP.sub("", answer)


def _text(match: re.Match[str]) -> str:
    # "5\text{ cm}" is a unit and goes; "\text{Monday}" is the answer and stays.
    return "" if match.string[: match.start()].strip() else match[1]


def _joined(match: re.Match[str]) -> str:
    prefix = match.string[: match.start()]
    enclosed = any(prefix.count(a) > prefix.count(b) for a, b in ("()", "[]", (r"\{", r"\}")))
    return match[0] if enclosed else match[0].replace(",", "")


def assigned(text: str) -> set[str]:
    """The names of an equation such as ``x = 5``: its sides that are one; empty without one."""
    sides = _EQUALS.split(normalize_math(text))
    return {side for side in sides if len(sides) == 2 and _NAME.fullmatch(side)}


def names_differ(answer: str, reference: str) -> bool:
    """Return whether both are equations of a name, and of different ones: ``a=5`` and ``b=5``."""
    names, others = assigned(answer), assigned(reference)
    return bool(names and others) and not names & others


def _value_of(normalized: str) -> str:
    """What an equation says its name or computation is; anything else as it is.

    Several equations, as ``x=1,x=2``, are not one.
    """
    sides = _EQUALS.split(normalized)
    if len(sides) == 1 or "," in normalized:
        return normalized
    values = [side for side in sides if not _NAME.fullmatch(side)]
    plain = [side for side in values if _NUMBER.fullmatch(side)]
    return (plain or values or sides)[-1]


def math_equal(answer: str | None, reference: str) -> bool:
    """Return whether two MATH-style answers are equal after normalization or as numbers.

    Where both are equations, they are compared side by side; where one is, its value counts.
    """
    if answer is None:
        return False
    normalized, target = normalize_math(answer), normalize_math(reference)
    if normalized == target:
        return bool(normalized)
    if _EQUALS.search(normalized) and _EQUALS.search(target):
        return _EQUALS.split(normalized) == _EQUALS.split(target)[::-1]
    normalized = _value_of(normalized)
    target = re.sub(r"^[a-zA-Z]=", "", target)
    if normalized == target:
        return bool(normalized)
    if "," in normalized + target:
        return False  # a list: thousands were joined above
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
