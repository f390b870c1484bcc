"""What of a reply is judged: the text after the model's thoughts.

One rule for chats in suites, rewards and programs. The answer begins after the last tag that closes
thoughts. A reply that was cut inside its thoughts has no answer. A reply that never closes the
thoughts which its prompt opened, but ended by itself, is an answer as a whole.
"""

TAGS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5, Nemotron 3
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""What opens thoughts, and what begins the answer, in the templates of published models."""


def opens_thoughts(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside thoughts."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in TAGS))


def judged(reply: str, prompt: str = "", cut: bool | None = None) -> str | None:
    """The part of ``reply`` that is judged; None without an answer.

    Args:
        reply: with its special tokens, where the thoughts' tags are some.
        prompt: as the chat template rendered it.
        cut: whether the reply ended because of its length; None if that is not known.
    """
    ends = [at + len(tag) for _, tag in TAGS if (at := reply.rfind(tag)) >= 0]
    if ends:
        return reply[max(ends) :].lstrip()
    begun = any(reply.lstrip().startswith(opening) for opening, _ in TAGS)
    if begun if cut is None else cut and (begun or opens_thoughts(prompt)):
        return None
    return reply
