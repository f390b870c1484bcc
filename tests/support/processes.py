"""Processes that a test does not own."""

from __future__ import annotations

import os
import select


def ended(pid: int) -> bool:
    """Wait for a process that is not our child, for up to a minute; return whether it ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    readable, _, _ = select.select([descriptor], [], [], 60)
    os.close(descriptor)
    return bool(readable)
