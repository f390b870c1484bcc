"""Which tokens of a forward count, and where its sequences start and end.

Losses, metrics and bias share this reading of the backbone's arguments, which matches its
attention's. Nothing is copied to the host.

Here L is a row's positions, and S are sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError

# An additive mask hides values below this: their exp is 0 in every float type.
HIDDEN_BELOW = -1000.0


@dataclass(frozen=True)
class Tokens:
    """The tokens of one forward.

    Attributes:
        mask_T: bool, True where a token counts.
        ids_T: input ids, or None if the model was called with embeddings.
        sequence_lengths: (S,) int64, in the order of T, summing to T. In packed batches S is T: the
            sequences' lengths, then zeros.
    """

    mask_T: Tensor
    ids_T: Tensor | None
    sequence_lengths: Tensor


def read_tokens(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ids_BL: Tensor | None = None,
    pad_token_id: int | None = None,
    labels_BL: Tensor | None = None,
    count_labels: bool = False,
) -> Tokens:
    """Read the tokens from the backbone's arguments.

    Tokens that attention hides do not count, nor does padding after packed sequences. Sequences are
    the rows, or parts of a row that attention separates by positions, ``cu_seq_lens_q`` or a
    four-dimensional mask.

    Args:
        ids_BL, labels_BL: of the enclosing model; the backbone may get embeddings.
        pad_token_id: distinguishes padding after packed sequences from one-token sequences.
        count_labels: count only tokens that predict a label.
    """
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    embeddings = kwargs.get("inputs_embeds")
    fits = ids_BL is not None and embeddings is not None and ids_BL.shape == embeddings.shape[:2]
    ids_BL = input_ids if input_ids is not None else ids_BL if fits else None
    like_BL = ids_BL if ids_BL is not None else None if embeddings is None else embeddings[..., 0]
    if like_BL is None:
        raise CaptureError("the model was called with neither input_ids nor inputs_embeds")
    rows, length = like_BL.shape
    counted_BL = torch.ones(rows, length, dtype=torch.bool, device=like_BL.device)
    starts_BL = None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Mapping):
        # One mask for each kind of layer: they hide the same tokens.
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        starts_BL = _starts_of_packed(kwargs, like_BL)
        if starts_BL is not None:
            positions = kwargs.get("position_ids")
            if positions is not None:
                counted_BL = ~_padding_behind(positions, ids_BL, like_BL.shape, pad_token_id)
    elif not torch.is_tensor(mask):
        raise CaptureError(
            f"attention_mask is a {type(mask).__name__}, which does not show how many tokens "
            "count; call the model with a mask of shape (batch, length)"
        )
    elif mask.dim() == 4:
        counted_BL, starts_BL = _read_pairs(mask, rows, length)
    elif mask.dim() == 2 and mask.shape[0] == rows and mask.shape[1] >= length:
        counted_BL = mask[:, mask.shape[1] - length :] != 0  # cached tokens come first
        starts_BL = _starts_of_packed(kwargs, like_BL)
        if starts_BL is not None:  # neither in padding nor behind it
            starts_BL[:, 1:] &= counted_BL[:, 1:] & counted_BL[:, :-1]
    else:
        raise CaptureError(
            f"attention_mask has shape {tuple(mask.shape)}, expected (batch, length) or (batch, 1, "
            f"length, length) for {rows} rows of {length} tokens"
        )
    if count_labels:
        counted_BL = _predicting(labels_BL, rows, length)
    return Tokens(
        mask_T=counted_BL.reshape(-1),
        ids_T=None if ids_BL is None else ids_BL.reshape(-1),
        sequence_lengths=_lengths(starts_BL, like_BL),
    )


def _predicting(labels_BL: Tensor | None, rows: int, length: int) -> Tensor:
    if labels_BL is None:
        raise CaptureError(
            "method.token_mask: labels needs labels in the model's call, but this trainer does "
            "not pass them; use token_mask: attention"
        )
    if labels_BL.shape != (rows, length):
        raise CaptureError(
            f"labels have shape {tuple(labels_BL.shape)} for {rows} rows of {length} tokens; "
            "use token_mask: attention"
        )
    # The token at t predicts label t+1; the last one predicts nothing.
    return torch.nn.functional.pad(labels_BL[:, 1:], (0, 1), value=-100) != -100


def _starts_of_packed(kwargs: Mapping[str, Any], like_BL: Tensor) -> Tensor | None:
    """Where positions, or else ``cu_seq_lens_q``, start a sequence inside a row."""
    positions, ends = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    if torch.is_tensor(positions) and positions.dim() == 2:
        positions_BL = positions.expand(like_BL.shape)
        starts_BL = torch.ones_like(positions_BL, dtype=torch.bool)
        starts_BL[:, 1:] = positions_BL.diff() != 1
        return starts_BL
    if torch.is_tensor(ends):
        # One place more than tokens: the last boundary is the end.
        starts = torch.zeros(like_BL.numel() + 1, dtype=torch.bool, device=like_BL.device)
        starts[ends.to(like_BL.device).long()] = True
        starts_BL = starts[:-1].view(like_BL.shape)
        starts_BL[:, 0] = True
        return starts_BL
    return None


def _padding_behind(
    positions: Tensor, ids_BL: Tensor | None, shape: torch.Size, pad_token_id: int | None
) -> Tensor:
    """Padding after a row's packed sequences: identical tokens, all at position 0.

    A single such token could be a one-token sequence; its id decides, if known.
    """
    pads_BL = positions.expand(shape) == 0
    pads_BL[:, 0] = False
    if ids_BL is not None:
        pads_BL &= ids_BL == ids_BL[:, -1:]
    behind_BL = pads_BL.flip(1).long().cumprod(1).flip(1).bool()
    if ids_BL is None or pad_token_id is None:
        return behind_BL
    known_B1 = ids_BL[:, -1:] == pad_token_id
    return behind_BL & (known_B1 | (behind_BL.sum(1, keepdim=True) > 1))


def _read_pairs(mask: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens that count and where sequences begin, from a mask over (query, key)."""
    fits = mask.shape[-2:] == (length, length) and mask.shape[0] in (1, rows)
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CaptureError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, expected "
            f"bool or float of shape ({rows}, 1, {length}, {length}), or (batch, length)"
        )
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN_BELOW
    seen_BQK = seen.any(1).expand(rows, length, length)
    # A query that sees later tokens is padding: its row was unmasked so that it is not empty.
    ahead_BQ1 = seen_BQK.triu(1).any(2, keepdim=True)
    counted_BK = (seen_BQK & ~ahead_BQ1).any(1)
    starts_BL = torch.ones(rows, length, dtype=torch.bool, device=mask.device)
    starts_BL[:, 1:] = ~seen_BQK.diagonal(-1, 1, 2)
    return counted_BK, starts_BL


def _lengths(starts_BL: Tensor | None, like_BL: Tensor) -> Tensor:
    rows, length = like_BL.shape
    if starts_BL is None:
        return torch.full((rows,), length, device=like_BL.device)
    # As many places as tokens: only the device knows how many sequences there are.
    number_T = starts_BL.reshape(-1).long().cumsum(0) - 1
    return torch.zeros_like(number_T).scatter_add_(0, number_T, torch.ones_like(number_T))
