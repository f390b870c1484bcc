"""Which tokens of a forward count, and where its sequences start and end.

Losses, metrics and bias read the rows that attention reads (:mod:`moe_finetune.moe.layout`).
Nothing is copied to the host.

Q are sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_finetune.errors import CaptureError
from moe_finetune.moe.layout import Layout

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
    layout: Layout,
    *,
    pad_token_id: int | None = None,
    labels_BS: Tensor | None = None,
    count_labels: bool = False,
) -> Tokens:
    """Read the tokens from the rows that attention sees.

    Tokens that attention hides do not count, nor does padding after packed sequences. Sequences are
    the rows, or parts of a row that attention separates by positions, ``cu_seq_lens_q`` or a
    four-dimensional mask.

    Args:
        pad_token_id: distinguishes padding after packed sequences from one-token sequences.
        labels_BS: of the enclosing model.
        count_labels: count only tokens that predict a label.
    """
    rows, length = layout.like_BS.shape
    counted_BS = layout.counted_BS
    starts_BS = layout.starts_BS
    mask = layout.mask
    if isinstance(mask, Mapping):
        # One mask for each kind of layer: they hide the same tokens.
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        counted_BS = torch.ones(rows, length, dtype=torch.bool, device=layout.like_BS.device)
        if starts_BS is not None and layout.passes_positions:
            counted_BS = ~_padding_behind(layout, pad_token_id)
    elif not torch.is_tensor(mask):
        raise CaptureError(
            f"attention_mask is a {type(mask).__name__}, which does not show how many tokens "
            "count; call the model with a mask of shape (batch, length)"
        )
    elif mask.dim() == 4:
        counted_BS, starts_BS = _read_pairs(mask, rows, length)
    elif counted_BS is None:
        raise CaptureError(
            f"attention_mask has shape {tuple(mask.shape)}, expected (batch, length) or (batch, 1, "
            f"length, length) for {rows} rows of {length} tokens"
        )
    if count_labels:
        counted_BS = _predicting(labels_BS, rows, length)
    return Tokens(
        mask_T=counted_BS.reshape(-1),
        ids_T=None if layout.ids_BS is None else layout.ids_BS.reshape(-1),
        sequence_lengths=_lengths(starts_BS, layout.like_BS),
    )


def _predicting(labels_BS: Tensor | None, rows: int, length: int) -> Tensor:
    if labels_BS is None:
        raise CaptureError(
            "method.token_mask: labels needs labels in the model's call, but this trainer does "
            "not pass them; use token_mask: attention"
        )
    if labels_BS.shape != (rows, length):
        raise CaptureError(
            f"labels have shape {tuple(labels_BS.shape)} for {rows} rows of {length} tokens; "
            "use token_mask: attention"
        )
    # The token at t predicts label t+1; the last one predicts nothing.
    return torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=-100) != -100


def _padding_behind(layout: Layout, pad_token_id: int | None) -> Tensor:
    """Padding after a row's packed sequences: identical tokens, all at position 0.

    A single such token could be a one-token sequence; its id decides, if known.
    """
    ids_BS = layout.ids_BS
    assert layout.positions_BS is not None
    pads_BS = layout.positions_BS == 0
    pads_BS[:, 0] = False
    if ids_BS is not None:
        pads_BS &= ids_BS == ids_BS[:, -1:]
    behind_BS = pads_BS.flip(1).long().cumprod(1).flip(1).bool()
    if ids_BS is None or pad_token_id is None:
        return behind_BS
    known_B1 = ids_BS[:, -1:] == pad_token_id
    return behind_BS & (known_B1 | (behind_BS.sum(1, keepdim=True) > 1))


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
    starts_BS = torch.ones(rows, length, dtype=torch.bool, device=mask.device)
    starts_BS[:, 1:] = ~seen_BQK.diagonal(-1, 1, 2)
    return counted_BK, starts_BS


def _lengths(starts_BS: Tensor | None, like_BS: Tensor) -> Tensor:
    rows, length = like_BS.shape
    if starts_BS is None:
        return torch.full((rows,), length, device=like_BS.device)
    # As many places as tokens: only the device knows how many sequences there are.
    number_T = starts_BS.reshape(-1).long().cumsum(0) - 1
    return torch.zeros_like(number_T).scatter_add_(0, number_T, torch.ones_like(number_T))
