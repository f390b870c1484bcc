"""What of a reply is judged: the text after the model's thoughts.

One rule for chats in suites, rewards and programs. The answer begins after the last tag that closes
thoughts. A reply that was cut inside its thoughts, also in later ones, has no answer. A reply that
never closes the thoughts which its prompt opened, but ended by itself, is an answer as a whole.

Blank lines after thoughts go, the first line's indentation stays: a program's body begins with it.
Who compares texts strips them.
"""

import re

from moe_finetune.data.thought_tags import ANSWER, OPENING

_ANSWER = re.compile(ANSWER)
# Not in quotes: an answer, or a program, may speak of the tags.
_OPENED = re.compile(rf"(?<![`'\"]){OPENING}")
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
_ENDS_OPEN = re.compile(rf"{OPENING}\s*\Z")


def opens_thoughts(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside thoughts."""
    return _ENDS_OPEN.search(prompt) is not None


def judged(reply: str, prompt: str = "", cut: bool | None = None) -> str | None:
    """The part of ``reply`` that is judged; None without an answer.

    Args:
        reply: with its special tokens, where the thoughts' tags are some.
        prompt: as the chat template rendered it.
        cut: whether the reply ended because of its length; None if that is not known.
    """
    closed = 0
    for tag in _ANSWER.finditer(reply):
        closed = tag.end()
    begun = _OPENED.search(reply, closed) is not None
    if begun if cut is None else cut and (begun or (not closed and opens_thoughts(prompt))):
        return None
    return _BLANK_LINES.sub("", reply[closed:]) if closed else reply
