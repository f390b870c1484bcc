"""What a forward's arguments say of its rows, read once for attention, losses, bias and metrics.

Two readers of the same arguments would disagree one day: losses would then average over sequences
that attention does not see. Nothing is copied to the host here.

Shape legend: B rows, S positions of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError

_TEXT_AND_IMAGE_ROWS = 4
"""Rows of ``position_ids`` (4, B, S) of Qwen's vision models: of text, then time, height, width."""


@dataclass(frozen=True)
class Layout:
    """The rows of one forward.

    Attributes:
        ids_BS: input ids, or None if the model was called with embeddings.
        like_BS: the ids, or anything of their shape on their device.
        mask: ``attention_mask`` as passed: over tokens, over (query, key), or a mapping of these.
        positions_BS: each token's position in its sequence, as passed, or by ``cu_seq_lens_q``;
            None if the arguments have neither.
        counted_BS: bool, tokens that a mask over tokens does not hide; None without such a mask.
        starts_BS: bool, tokens with which a sequence starts, None if each row is one sequence;
            never within or after what the mask hides.
        cached: whether the forward continues a cache, with which attention ignores positions.
        passes_positions: whether ``position_ids`` were passed.
    """

    ids_BS: Tensor | None
    like_BS: Tensor
    mask: Any
    positions_BS: Tensor | None
    counted_BS: Tensor | None
    starts_BS: Tensor | None
    cached: bool
    passes_positions: bool

    def with_mask(self, mask: Any) -> "Layout":
        """The same rows, with ``mask`` in place of the one that was passed."""
        return _with_starts(replace(self, mask=mask, counted_BS=_counted(mask, self.like_BS)))


def read_layout(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], ids_BS: Tensor | None = None
) -> Layout:
    """Read the arguments of a model's or its backbone's forward.

    Args:
        ids_BS: input ids of the enclosing model; the backbone may get embeddings.
    """
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    embeddings = kwargs.get("inputs_embeds")
    fits = ids_BS is not None and embeddings is not None and ids_BS.shape == embeddings.shape[:2]
    ids_BS = input_ids if input_ids is not None else ids_BS if fits else None
    like_BS = ids_BS if ids_BS is not None else None if embeddings is None else embeddings[..., 0]
    if like_BS is None:
        raise CaptureError("the model was called with neither input_ids nor inputs_embeds")
    mask = kwargs.get("attention_mask")
    return _with_starts(
        Layout(
            ids_BS=ids_BS,
            like_BS=like_BS,
            mask=mask,
            positions_BS=_positions(kwargs, like_BS),
            counted_BS=_counted(mask, like_BS),
            starts_BS=None,
            # transformers 5.24 renamed the argument.
            cached=any(kwargs.get(name) is not None for name in ("past_key_values", "cache")),
            passes_positions=kwargs.get("position_ids") is not None,
        )
    )


def starts_of(positions_BS: Tensor, counted_BS: Tensor | None = None) -> Tensor:
    """Bool (B, S), tokens with which a sequence starts, as transformers reads positions."""
    starts_BS = torch.ones_like(positions_BS, dtype=torch.bool)
    starts_BS[:, 1:] = positions_BS.diff() != 1
    if counted_BS is not None:
        starts_BS[:, 1:] &= counted_BS[:, 1:] & counted_BS[:, :-1]
    return starts_BS


def replace_text_positions(position_ids: Tensor | None, positions_BS: Tensor) -> Tensor:
    """``position_ids`` with other positions of text; those of images stay."""
    if position_ids is None or not _has_image_rows(position_ids):
        return positions_BS
    images_3BS = position_ids[1:].expand(-1, *positions_BS.shape)
    return torch.cat([positions_BS[None].to(position_ids.dtype), images_3BS])


def _with_starts(layout: Layout) -> Layout:
    if layout.cached or layout.positions_BS is None:
        return replace(layout, starts_BS=None)
    return replace(layout, starts_BS=starts_of(layout.positions_BS, layout.counted_BS))


def _counted(mask: Any, like_BS: Tensor) -> Tensor | None:
    rows, length = like_BS.shape
    if not torch.is_tensor(mask) or mask.dim() != 2 or mask.shape[0] != rows:
        return None
    # Cached tokens come first.
    return mask[:, mask.shape[1] - length :] != 0 if mask.shape[1] >= length else None


def _positions(kwargs: Mapping[str, Any], like_BS: Tensor) -> Tensor | None:
    positions, ends = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    if torch.is_tensor(positions):
        if _has_image_rows(positions):
            positions = positions[0]
        fits = positions.dim() == 2 and positions.shape[1] == like_BS.shape[1]
        return positions.expand(like_BS.shape) if fits else None
    if not torch.is_tensor(ends):
        return None
    place_BS = torch.arange(like_BS.numel(), device=like_BS.device).view(like_BS.shape)
    # One place more than tokens: the last boundary is the end.
    starts = torch.zeros(like_BS.numel() + 1, dtype=torch.bool, device=like_BS.device)
    starts[ends.to(like_BS.device).long()] = True
    start_BS = place_BS * starts[:-1].view(like_BS.shape)
    start_BS[:, 0] = place_BS[:, 0]
    return place_BS - start_BS.cummax(1).values


def _has_image_rows(position_ids: Tensor) -> bool:
    return position_ids.dim() == 3 and position_ids.shape[0] == _TEXT_AND_IMAGE_ROWS
