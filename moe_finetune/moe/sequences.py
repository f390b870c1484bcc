"""Packed rows: several sequences in a row that must not see each other.

transformers' classes separate them only by the attention mask built from positions. That fails if
the class builds its mask without positions, with a cache, and in modules that carry something else
from token to token (states, convolutions, compressed keys). A family declares these in
:class:`~moe_finetune.models.base.Rows`, and this module corrects the forward: it builds the mask
for the class, and runs each such module one sequence at a time.

Shape legend: B rows, L tokens per row, T = B x L, S sequences of similar length, N tokens of the
longest one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from moe_finetune.models.base import Rows

_OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keyword arguments that tell kernels where sequences start in a packed row."""


@dataclass(frozen=True)
class Group:
    """Sequences of similar length.

    Attributes:
        index_SN: positions in T; a shorter sequence's last one is repeated.
        real_SN: bool, False for repeated positions.
    """

    index_SN: Tensor
    real_SN: Tensor


class Sequences:
    """The sequences of packed rows; not a container, so wrappers do not copy it.

    Args:
        starts_BL: bool, True where a sequence starts.
        counted_BL: bool, True for tokens that belong to a sequence; None for all.
    """

    def __init__(self, starts_BL: Tensor, counted_BL: Tensor | None = None):
        self.rows, self.length = starts_BL.shape
        number_T = starts_BL.reshape(-1).long().cumsum(0) - 1
        place_T = torch.arange(number_T.numel(), device=number_T.device)
        if counted_BL is not None:
            place_T = place_T[counted_BL.reshape(-1)]
            number_T = number_T[place_T]
        lengths_S = torch.bincount(number_T)
        ends_S = lengths_S.cumsum(0)
        # All sequences of a group are longer than half the longest: at most half is repeated.
        sizes = [int(length).bit_length() for length in lengths_S.tolist()]
        self.groups = []
        for size in sorted({size for size in sizes if size}):
            chosen = [number for number, other in enumerate(sizes) if other == size]
            chosen_S = torch.tensor(chosen, device=number_T.device)
            lengths_S1 = lengths_S[chosen_S, None]
            offset_N = torch.arange(int(lengths_S1.max()), device=number_T.device)
            first_S1 = ends_S[chosen_S, None] - lengths_S1
            index_SN = place_T[first_S1 + torch.minimum(offset_N, lengths_S1 - 1)]
            self.groups.append(Group(index_SN, offset_N < lengths_S1))

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``forward`` one sequence at a time and return its combined result.

        Tensors of shape (B, L, ...) and masks of shape (B, heads, L, L) are split. Repeated
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
        return rows.flatten(0, 1)[group.index_SN]

    def _apart_pairs(self, mask: Tensor, group: Group) -> Tensor:
        """Split a mask over (query, key), additive or bool, and hide repeated positions."""
        mask = mask.expand(self.rows, *mask.shape[1:])
        row_S11 = (group.index_SN[:, :1] // self.length)[:, :, None]
        column_SN = group.index_SN % self.length
        # Indices on both sides of the heads bring (S, N, N) to the front.
        pairs_SNNh = mask.transpose(1, 2).transpose(2, 3)[
            row_S11, column_SN[:, :, None], column_SN[:, None, :]
        ]
        pairs_ShNN = pairs_SNNh.movedim(-1, 1)
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return pairs_ShNN.masked_fill(~group.real_SN[:, None, None, :], hidden)

    def _together(self, outputs: list[Any]) -> Any:
        first = outputs[0]
        if isinstance(first, tuple):
            return tuple(self._together(list(parts)) for parts in zip(*outputs, strict=True))
        # Of four dimensions are weights over (query, key) and states: nothing reads them.
        if not torch.is_tensor(first) or first.dim() == 4:
            return None
        place_T = torch.cat([group.index_SN[group.real_SN] for group in self.groups])
        values = torch.cat(
            [part[group.real_SN] for part, group in zip(outputs, self.groups, strict=True)]
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


def tell_positions(kwargs: Mapping[str, Any], ids_BL: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward; for packed rows, in a form every class reads.

    Rows are packed if positions, or else ``cu_seq_lens_q``, restart between two tokens that the
    mask does not hide. They get positions but no mask or cache, with which a class would ignore
    positions. A token that the mask hid becomes a separate sequence.

    Args:
        kwargs: keyword arguments of the model or its backbone.
        ids_BL: input ids, or anything of their shape on their device.
    """
    kwargs = dict(kwargs)
    if _has_cache(kwargs):
        return kwargs
    positions_BL, counted_BL = _positions(kwargs, ids_BL), _counted(kwargs, ids_BL)
    if positions_BL is None or not _breaks(positions_BL, counted_BL).any():
        return kwargs
    if counted_BL is not None:
        kwargs["attention_mask"] = None
        kwargs["position_ids"] = positions_BL.masked_fill(~counted_BL, 0)
    elif kwargs.get("position_ids") is None:
        kwargs["position_ids"] = positions_BL
    return kwargs | {"use_cache": False}


def separate(
    kwargs: Mapping[str, Any], ids_BL: Tensor, config: Any, dtype: torch.dtype, facts: Rows
) -> tuple[dict[str, Any], Sequences | None, bool]:
    """Return backbone arguments that keep sequences separate, and the sequences.

    Sequences are None if no module has to run them one at a time in this forward. The last value is
    whether any row has several.

    Args:
        kwargs: keyword arguments of the backbone.
        ids_BL: input ids, or anything of their shape on their device.
        dtype: the model's dtype, used for an additive mask.
    """
    kwargs = tell_positions(kwargs, ids_BL)
    if _has_cache(kwargs):
        return kwargs, None, False
    counted_BL, positions_BL = _counted(kwargs, ids_BL), _positions(kwargs, ids_BL)
    if counted_BL is not None:
        return *_beside_padding(kwargs, counted_BL, facts), False
    if positions_BL is None or not (breaks := _breaks(positions_BL)).any():
        return kwargs, None, False
    if kwargs.get("attention_mask") is None and not facts.masks_by_position:
        like_BLH = torch.empty(*ids_BL.shape, 0, device=ids_BL.device, dtype=dtype)
        kwargs["attention_mask"] = create_masks_for_generate(
            config, like_BLH, None, None, positions_BL
        )
    starts_BL = torch.nn.functional.pad(breaks, (1, 0), value=True)
    if "flash" in (config._attn_implementation or ""):
        # Of more than one row its kernels take this and not positions.
        kwargs = _for_kernels(starts_BL) | kwargs
    return kwargs, Sequences(starts_BL) if facts.per_sequence else None, True


def _beside_padding(
    kwargs: dict[str, Any], counted_BL: Tensor, facts: Rows
) -> tuple[dict[str, Any], Sequences | None]:
    """For rows that are not packed: positions and sequences that left padding would shift."""
    if facts.padding == "unseen":
        return kwargs, None
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = (counted_BL.long().cumsum(1) - 1).clamp(min=0)
    if facts.padding == "moves" or bool(counted_BL[:, 0].all()):
        return kwargs, None
    kwargs["use_cache"] = False
    starts_BL = torch.zeros_like(counted_BL)
    starts_BL[:, 0] = True
    return kwargs, Sequences(starts_BL, counted_BL)


def _for_kernels(starts_BL: Tensor) -> dict[str, Any]:
    """Cumulative lengths of the sequences, as flash attention takes them."""
    starts_S = starts_BL.reshape(-1).nonzero()[:, 0]
    ends = torch.nn.functional.pad(starts_S, (0, 1), value=starts_BL.numel()).int()
    longest = int(ends.diff().max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    """Whether a forward continues a cache; transformers 5.24 renamed the argument."""
    return any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))


def _counted(kwargs: Mapping[str, Any], ids_BL: Tensor) -> Tensor | None:
    """Bool (B, L), tokens that a mask over tokens does not hide; None without such a mask."""
    mask = kwargs.get("attention_mask")
    return mask != 0 if torch.is_tensor(mask) and mask.shape == ids_BL.shape else None


def _positions(kwargs: Mapping[str, Any], ids_BL: Tensor) -> Tensor | None:
    positions, ends = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    if torch.is_tensor(positions):
        if positions.dim() == 3 and positions.shape[0] == 4:
            positions = positions[0]  # of text; the other rows are of images
        fits = positions.dim() == 2 and positions.shape[1] == ids_BL.shape[1]
        return positions.expand(ids_BL.shape) if fits else None
    if not torch.is_tensor(ends):
        return None
    place_T = torch.arange(ids_BL.numel(), device=ids_BL.device)
    start_T = torch.zeros_like(place_T)
    inner = ends[ends < ids_BL.numel()].to(ids_BL.device).long()
    start_T[inner] = inner
    start_BL = start_T.view(ids_BL.shape)
    start_BL[:, 0] = place_T.view(ids_BL.shape)[:, 0]
    return place_T.view(ids_BL.shape) - start_BL.cummax(1).values


def _breaks(positions_BL: Tensor, counted_BL: Tensor | None = None) -> Tensor:
    """Bool (B, L - 1): whether a sequence ends between two tokens, as transformers reads it."""
    breaks = positions_BL.diff() != 1
    if counted_BL is not None:
        breaks &= counted_BL[:, 1:] & counted_BL[:, :-1]
    return breaks
