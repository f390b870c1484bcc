"""Which tokens of a forward count, and where its sequences start and end.

Losses, metrics and bias share this reading of the backbone's arguments, which matches its
attention's. Nothing is copied to the host.

Q are sequences.
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
    ids_BS: Tensor | None = None,
    pad_token_id: int | None = None,
    labels_BS: Tensor | None = None,
    count_labels: bool = False,
) -> Tokens:
    """Read the tokens from the backbone's arguments.

    Tokens that attention hides do not count, nor does padding after packed sequences. Sequences are
    the rows, or parts of a row that attention separates by positions, ``cu_seq_lens_q`` or a
    four-dimensional mask.

    Args:
        ids_BS, labels_BS: of the enclosing model; the backbone may get embeddings.
        pad_token_id: distinguishes padding after packed sequences from one-token sequences.
        count_labels: count only tokens that predict a label.
    """
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    embeddings = kwargs.get("inputs_embeds")
    fits = ids_BS is not None and embeddings is not None and ids_BS.shape == embeddings.shape[:2]
    ids_BS = input_ids if input_ids is not None else ids_BS if fits else None
    like_BS = ids_BS if ids_BS is not None else None if embeddings is None else embeddings[..., 0]
    if like_BS is None:
        raise CaptureError("the model was called with neither input_ids nor inputs_embeds")
    rows, length = like_BS.shape
    counted_BS = torch.ones(rows, length, dtype=torch.bool, device=like_BS.device)
    starts_BS = None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Mapping):
        # One mask for each kind of layer: they hide the same tokens.
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        starts_BS = _starts_of_packed(kwargs, like_BS)
        if starts_BS is not None:
            positions = kwargs.get("position_ids")
            if positions is not None:
                counted_BS = ~_padding_behind(positions, ids_BS, like_BS.shape, pad_token_id)
    elif not torch.is_tensor(mask):
        raise CaptureError(
            f"attention_mask is a {type(mask).__name__}, which does not show how many tokens "
            "count; call the model with a mask of shape (batch, length)"
        )
    elif mask.dim() == 4:
        counted_BS, starts_BS = _read_pairs(mask, rows, length)
    elif mask.dim() == 2 and mask.shape[0] == rows and mask.shape[1] >= length:
        counted_BS = mask[:, mask.shape[1] - length :] != 0  # cached tokens come first
        starts_BS = _starts_of_packed(kwargs, like_BS)
        if starts_BS is not None:  # neither in padding nor behind it
            starts_BS[:, 1:] &= counted_BS[:, 1:] & counted_BS[:, :-1]
    else:
        raise CaptureError(
            f"attention_mask has shape {tuple(mask.shape)}, expected (batch, length) or (batch, 1, "
            f"length, length) for {rows} rows of {length} tokens"
        )
    if count_labels:
        counted_BS = _predicting(labels_BS, rows, length)
    return Tokens(
        mask_T=counted_BS.reshape(-1),
        ids_T=None if ids_BS is None else ids_BS.reshape(-1),
        sequence_lengths=_lengths(starts_BS, like_BS),
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


def _starts_of_packed(kwargs: Mapping[str, Any], like_BS: Tensor) -> Tensor | None:
    """Where positions, or else ``cu_seq_lens_q``, start a sequence inside a row."""
    positions, ends = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    if torch.is_tensor(positions) and positions.dim() == 2:
        positions_BS = positions.expand(like_BS.shape)
        starts_BS = torch.ones_like(positions_BS, dtype=torch.bool)
        starts_BS[:, 1:] = positions_BS.diff() != 1
        return starts_BS
    if torch.is_tensor(ends):
        # One place more than tokens: the last boundary is the end.
        starts = torch.zeros(like_BS.numel() + 1, dtype=torch.bool, device=like_BS.device)
        starts[ends.to(like_BS.device).long()] = True
        starts_BS = starts[:-1].view(like_BS.shape)
        starts_BS[:, 0] = True
        return starts_BS
    return None


def _padding_behind(
    positions: Tensor, ids_BS: Tensor | None, shape: torch.Size, pad_token_id: int | None
) -> Tensor:
    """Padding after a row's packed sequences: identical tokens, all at position 0.

    A single such token could be a one-token sequence; its id decides, if known.
    """
    pads_BS = positions.expand(shape) == 0
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
