"""The Hugging Face hub where it cannot be reached: its cache is read, without retries."""

from __future__ import annotations

import os
import sys
from functools import cache

from moe_finetune.io.terminal import terminal

SECONDS = 10.0
"""To wait for the hub's first answer."""


@cache
def check_hub() -> None:
    """Ask the hub once in a process; where it does not answer, go offline and print one line.

    Its client retries every request for about 20 seconds otherwise. Processes that are started from
    now on are offline too. Nothing happens where ``HF_HUB_OFFLINE`` is set.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of the client's own library, and of the system below it
        terminal().say(
            f"{constants.ENDPOINT} cannot be reached ({error}); only cached models and data are "
            "available",
            "warning",
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # which copies it at its import
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
