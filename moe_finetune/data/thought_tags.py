"""The tags around the thoughts of models, in templates and in replies."""

_NAME = r"(?:\w+:)?\w*think\w*|thought|reasoning"  # <think>, <seed:think>, <longcat_think>
_TAGS = (
    (rf"<(?i:{_NAME})>", rf"</(?i:{_NAME})>"),
    (r"\[THINK\]", r"\[/THINK\]"),  # Magistral
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Command A
    (r"◁think▷", r"◁/think▷"),  # Kimi-VL
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThinker
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    (r"<\|channel>thought", r"<channel\|>"),  # Gemma 4
    (r"<unused94>thought", r"<unused95>"),  # MedGemma, as Google's quick start takes them apart
)
# gpt-oss opens a channel for its thoughts, and another one for its answer.
_CHANNEL, _FINAL = r"<\|channel\|>analysis<\|message\|>", r"<\|channel\|>final<\|message\|>"
OPENING = "(?:{})".format("|".join([*(opening for opening, _ in _TAGS), _CHANNEL]))
"""Pattern of what opens thoughts."""
CLOSING = "(?:{})".format("|".join(closing for _, closing in _TAGS))
"""Pattern of a tag that closes thoughts."""
ANSWER = f"(?:{CLOSING}|{_FINAL})"
"""Pattern of what an answer follows."""
