"""Packed rows: several sequences in a row that must not see each other.

transformers' classes separate them only by the attention mask built from positions. That fails if
the class builds its mask without positions, with a cache, and in modules that carry something else
from token to token (states, convolutions, compressed keys). A family declares these in
:class:`~moe_finetune.models.family.Rows`, and this module corrects the forward: it builds the mask
for the class, and runs each such module one sequence at a time.

Shape legend: B rows, S positions of a row, T = B x S, Q sequences of similar length, N tokens of
the longest one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from moe_finetune.models.family import Rows
from moe_finetune.moe.layout import Layout, replace_text_positions, starts_of

_OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keyword arguments that tell kernels where sequences start in a packed row."""


@dataclass(frozen=True)
class Group:
    """Sequences of similar length.

    Attributes:
        index_QN: positions in T; a shorter sequence's last one is repeated.
        real_QN: bool, False for repeated positions.
    """

    index_QN: Tensor
    real_QN: Tensor


class Sequences:
    """The sequences of packed rows; not a container, so wrappers do not copy it.

    Args:
        starts_BS: bool, True where a sequence starts.
        counted_BS: bool, True for tokens that belong to a sequence; None for all.
    """

    def __init__(self, starts_BS: Tensor, counted_BS: Tensor | None = None):
        self.rows, self.length = starts_BS.shape
        number_T = starts_BS.reshape(-1).long().cumsum(0) - 1
        place_T = torch.arange(number_T.numel(), device=number_T.device)
        if counted_BS is not None:
            place_T = place_T[counted_BS.reshape(-1)]
            number_T = number_T[place_T]
        lengths_Q = torch.bincount(number_T)
        ends_Q = lengths_Q.cumsum(0)
        # All sequences of a group are longer than half the longest: at most half is repeated.
        sizes = [int(length).bit_length() for length in lengths_Q.tolist()]
        self.groups = []
        for size in sorted({size for size in sizes if size}):
            chosen = [number for number, other in enumerate(sizes) if other == size]
            chosen_Q = torch.tensor(chosen, device=number_T.device)
            lengths_Q1 = lengths_Q[chosen_Q, None]
            offset_N = torch.arange(int(lengths_Q1.max()), device=number_T.device)
            first_Q1 = ends_Q[chosen_Q, None] - lengths_Q1
            index_QN = place_T[first_Q1 + torch.minimum(offset_N, lengths_Q1 - 1)]
            self.groups.append(Group(index_QN, offset_N < lengths_Q1))

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``forward`` one sequence at a time and return its combined result.

        Tensors of shape (B, S, ...) and masks of shape (B, heads, S, S) are split. Repeated
        positions come after the sequence, where a causal module does not see them.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_KERNELS}
        outputs = [
            forward(
                *(self._apart(value, group) for value in args),
                **{name: self._apart(value, group) for name, value in kwargs.items()},
            )
            for group in self.groups
        ]
        return self._together(outputs)

    def _apart(self, value: Any, group: Group) -> Any:
        if isinstance(value, Mapping):
            return {name: self._apart(part, group) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._apart(part, group) for part in value)
        if not torch.is_tensor(value) or value.dim() < 2 or value.shape[0] not in (1, self.rows):
            return value
        if value.dim() == 4 and value.shape[2:] == (self.length, self.length):
            return self._apart_pairs(value, group)
        if value.shape[1] != self.length:
            return value
        rows = value.expand(self.rows, *value.shape[1:])
        return rows.flatten(0, 1)[group.index_QN]

    def _apart_pairs(self, mask: Tensor, group: Group) -> Tensor:
        """Split a mask over (query, key), additive or bool, and hide repeated positions."""
        mask = mask.expand(self.rows, *mask.shape[1:])
        row_Q11 = (group.index_QN[:, :1] // self.length)[:, :, None]
        column_QN = group.index_QN % self.length
        # Indices on both sides of the heads bring (Q, N, N) to the front.
        pairs_QNNh = mask.transpose(1, 2).transpose(2, 3)[
            row_Q11, column_QN[:, :, None], column_QN[:, None, :]
        ]
        pairs_QhNN = pairs_QNNh.movedim(-1, 1)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return pairs_QhNN.masked_fill(~group.real_QN[:, None, None, :], hidden)

    def _together(self, outputs: list[Any]) -> Any:
        first = outputs[0]
        if isinstance(first, tuple):
            return tuple(self._together(list(parts)) for parts in zip(*outputs, strict=True))
        # Of four dimensions are weights over (query, key) and states: nothing reads them.
        if not torch.is_tensor(first) or first.dim() == 4:
            return None
        place_T = torch.cat([group.index_QN[group.real_QN] for group in self.groups])
        values = torch.cat(
            [part[group.real_QN] for part, group in zip(outputs, self.groups, strict=True)]
        )
        flat = values.new_zeros(self.rows * self.length, *values.shape[1:])
        return flat.index_copy(0, place_T, values).unflatten(0, (self.rows, self.length))


class InLayer:
    """The sequences of a decoder layer's current forward, for the modules inside it."""

    def __init__(self) -> None:
        self.sequences: Sequences | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.sequences is None:
            return forward(*args, **kwargs)
        return self.sequences.run(forward, args, kwargs)


def runs_alone(module: nn.Module, facts: Rows) -> bool:
    """Whether the module runs one sequence at a time, also under FSDP2's class."""
    return any(kind.__name__ in facts.per_sequence for kind in type(module).__mro__)


def is_packed(layout: Layout) -> bool:
    """Whether any row has several sequences; the host waits for the device here."""
    return layout.starts_BS is not None and bool(layout.starts_BS[:, 1:].any())


def tell_positions(kwargs: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Keyword arguments of a packed forward in a form that every class reads.

    They get positions but no mask or cache, with which a class would ignore positions. A token that
    the mask hid becomes a separate sequence.

    Args:
        kwargs: keyword arguments of the model or its backbone.
    """
    kwargs = dict(kwargs)
    if layout.counted_BS is not None:
        kwargs["attention_mask"] = None
        positions_BS = _of_separate_sequences(layout)
        kwargs["position_ids"] = replace_text_positions(kwargs.get("position_ids"), positions_BS)
    elif kwargs.get("position_ids") is None:
        kwargs["position_ids"] = layout.positions_BS
    return kwargs | {"use_cache": False}


def separate(
    kwargs: Mapping[str, Any], layout: Layout, config: Any, dtype: torch.dtype, facts: Rows
) -> tuple[dict[str, Any], Sequences | None, bool]:
    """Return backbone arguments that keep sequences separate, and the sequences.

    Sequences are None if no module has to run them one at a time in this forward. The last value is
    whether any row has several.

    Args:
        kwargs: keyword arguments of the backbone.
        layout: what they say of its rows.
        dtype: the model's dtype, used for an additive mask.
    """
    if not is_packed(layout):
        if layout.cached or layout.counted_BS is None:
            return dict(kwargs), None, False
        return *_beside_padding(dict(kwargs), layout.counted_BS, facts), False
    kwargs, positions_BS = tell_positions(kwargs, layout), _of_separate_sequences(layout)
    if kwargs.get("attention_mask") is None and not facts.masks_by_position:
        like_BSH = torch.empty(*positions_BS.shape, 0, device=positions_BS.device, dtype=dtype)
        kwargs["attention_mask"] = create_masks_for_generate(
            config, like_BSH, None, None, positions_BS
        )
    starts_BS = starts_of(positions_BS)
    if "flash" in (config._attn_implementation or ""):
        # Of more than one row its kernels take this and not positions.
        kwargs = _for_kernels(starts_BS) | kwargs
    return kwargs, Sequences(starts_BS) if facts.per_sequence else None, True


def _of_separate_sequences(layout: Layout) -> Tensor:
    """Positions of packed rows; a hidden token is at position 0, so it is a separate sequence."""
    assert layout.positions_BS is not None
    if layout.counted_BS is None:
        return layout.positions_BS
    return layout.positions_BS.masked_fill(~layout.counted_BS, 0)


def _beside_padding(
    kwargs: dict[str, Any], counted_BS: Tensor, facts: Rows
) -> tuple[dict[str, Any], Sequences | None]:
    """For rows that are not packed: positions and sequences that left padding would shift."""
    if facts.padding == "unseen":
        return kwargs, None
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (counted_BS.long().cumsum(1) - 1).clamp(min=0)
    if facts.padding == "moves" or bool(counted_BS[:, 0].all()):
        return kwargs, None
    kwargs["use_cache"] = False
    starts_BS = torch.zeros_like(counted_BS)
    starts_BS[:, 0] = True
    return kwargs, Sequences(starts_BS, counted_BS)


def _for_kernels(starts_BS: Tensor) -> dict[str, Any]:
    """Cumulative lengths of the sequences, as flash attention takes them."""
    starts_Q = starts_BS.reshape(-1).nonzero()[:, 0]
    ends = torch.nn.functional.pad(starts_Q, (0, 1), value=starts_BS.numel()).int()
    longest = int(ends.diff().max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
