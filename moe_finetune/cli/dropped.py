"""Verbs and options that no longer exist, each with what replaces it; for one release."""

from collections.abc import Sequence

VALIDATE = "python eval/validate.py of a checkout has a judge, blinded sheets and Cohen's kappa"

DETERMINANT = "eval/effects/determinantal.py of a checkout has the choice, as a context manager"

VERBS: dict[str, str] = {
    "chat": "serve the run, and talk to it with `vllm chat`",
    "permute": "python -m eval.placement permute of a checkout does it",
    "place": "python -m eval.placement plan of a checkout does it",
    "watch": "the run's tensorboard folder has its curves, metrics.jsonl its numbers",
}
"""A verb that was dropped -> what replaces it."""

OPTIONS: dict[str, dict[str, str]] = {
    "": {"--log-format": "a run's metrics.jsonl is for programs"},
    "eval": {
        "--judge": VALIDATE,
        "--judge-url": VALIDATE,
        "--sheets": VALIDATE,
        "--annotations": VALIDATE,
        "--key": VALIDATE,
        "--determinantal": DETERMINANT,
        "--candidates": DETERMINANT,
        "--parity": "run eval once per --backend with --dtype float32, and compare the two folders",
    },
    "inspect": {
        "--strength": "moe_finetune.measure_strength(model, method, batches) measures it in Python",
        "--quantization": "compare the first losses of two runs, or `eval` both",
    },
    "merge": {
        "--push": "upload with `hf upload OWNER/NAME OUTPUT`",
        "--private": "upload with `hf upload OWNER/NAME OUTPUT --private`",
    },
}
"""A verb, or "" for any -> its options that were dropped -> what replaces each."""


def refuse_dropped(arguments: Sequence[str]) -> None:
    """Refuse a verb or option that was dropped; words after ``--`` are another program's.

    Raises:
        ValueError: names what replaces it.
    """
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if verb in VERBS:
        raise ValueError(f"{verb}: this command was dropped; {VERBS[verb]}")
    options = {**OPTIONS[""], **OPTIONS.get(verb, {})}
    for word in arguments:
        if word == "--":
            return
        option = word.partition("=")[0]
        if option in options:
            name = option if option in OPTIONS[""] else f"{verb} {option}"
            raise ValueError(f"{name}: this option was dropped; {options[option]}")
