"""Copies of offloaded experts without a GPU."""

import torch


class HostTransfers:
    """Copies within the host's memory, for tests of the logic."""

    device = torch.device("cpu")

    def keep(self, stack):
        return stack

    def begin(self, stacks):
        """Copies made at once."""
        copies = {name: stack.clone() for name, stack in stacks.items()}
        return lambda: copies
