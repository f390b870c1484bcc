"""Per-token operations on the K experts' vectors: weighted sums and Gram matrices.

On a CPU a few tokens are processed at a time, so that their vectors stay in its cache.
"""

import torch
from torch import Tensor

CACHED_BYTES = 2**20


def combine(weights_TK: Tensor, y_TKH: Tensor, want_gram: bool) -> tuple[Tensor, Tensor | None]:
    """Weighted sums ``out_TH`` of the outputs, and their Gram matrices (T, K, K) if requested."""
    tokens, selected, hidden = y_TKH.shape
    out_TH = y_TKH.new_empty(tokens, hidden)
    gram_TKK = None
    if want_gram:
        gram_TKK = y_TKH.new_empty(tokens, selected, selected, dtype=gram_dtype(y_TKH))
    for span, _ in _spans(y_TKH):
        out_TH[span] = _weighted_sum(weights_TK[span], y_TKH[span])
        if gram_TKK is not None:
            gram_TKK[span] = gram(y_TKH[span])
    return out_TH, gram_TKK


def outputs_gradient(
    grad_out_TH: Tensor | None,
    grad_gram_TKK: Tensor | None,
    grad_y_TKH: Tensor | None,
    weights_TK: Tensor,
    y_TKH: Tensor,
    rows_S: Tensor,
) -> Tensor:
    """Gradient (S, H) of the outputs, from weighted sums, Gram matrices and direct uses.

    Args:
        rows_S: flat pair ``t*K + k`` -> row of the result (S, H).
    """
    dy_SH = y_TKH.new_empty(rows_S.numel(), y_TKH.shape[2])
    for span, rows in _spans(y_TKH):
        dy = _vectors_gradient(grad_gram_TKK, grad_y_TKH, span, y_TKH[span])
        if grad_out_TH is not None:
            weights_TK1 = weights_TK[span].to(dy.dtype).unsqueeze(2)
            dy.addcmul_(weights_TK1, grad_out_TH[span].to(dy.dtype).unsqueeze(1))
        dy_SH.index_copy_(0, rows_S[rows], dy.flatten(0, 1))
    return dy_SH


def activations_gradient_(
    grad_gram_TKK: Tensor | None, grad_z_TKD: Tensor | None, z_SD: Tensor, rows_S: Tensor
) -> Tensor:
    """Overwrite the activations with their gradient, from Gram matrices and direct uses."""
    grad = grad_gram_TKK if grad_gram_TKK is not None else grad_z_TKD
    assert grad is not None
    shape = (*grad.shape[:2], z_SD.shape[1])
    for span, rows in _spans(z_SD.view(shape)):
        z_TKD = z_SD.index_select(0, rows_S[rows]).view(-1, *shape[1:])
        dz = _vectors_gradient(grad_gram_TKK, grad_z_TKD, span, z_TKD)
        z_SD.index_copy_(0, rows_S[rows], dz.flatten(0, 1))
    return z_SD


def sum_over_choices(rows_SH: Tensor, rows_S: Tensor, shape_TK: torch.Size) -> Tensor:
    """Sum (T, H) of the K rows of each token: the gradient of gathering its row K times.

    A gather and a sum, so the result is deterministic.
    """
    out_TH = rows_SH.new_empty(shape_TK[0], rows_SH.shape[1])
    for span, rows in _spans(rows_SH.view(*shape_TK, rows_SH.shape[1])):
        chosen_TKH = rows_SH.index_select(0, rows_S[rows]).view(-1, shape_TK[1], out_TH.shape[1])
        torch.sum(chosen_TKH, 1, out=out_TH[span])
    return out_TH


def _vectors_gradient(
    grad_gram_TKK: Tensor | None, grad_TKX: Tensor | None, span: slice, vectors_TKX: Tensor
) -> Tensor:
    if grad_gram_TKK is None:
        assert grad_TKX is not None
        return grad_TKX[span].clone()
    grad = gram_gradient(grad_gram_TKK[span], vectors_TKX)
    return grad if grad_TKX is None else grad.add_(grad_TKX[span])


def gram_dtype(vectors: Tensor) -> torch.dtype:
    """float32, or float64 for float64 vectors."""
    return torch.promote_types(vectors.dtype, torch.float32)


def gram(vectors_TKX: Tensor) -> Tensor:
    """Inner products (T, K, K) of each token's vectors, at least float32."""
    if vectors_TKX.dtype in (torch.float32, torch.float64):
        return torch.bmm(vectors_TKX, vectors_TKX.transpose(1, 2))
    if vectors_TKX.device.type == "cuda":
        return torch.bmm(vectors_TKX, vectors_TKX.transpose(1, 2), out_dtype=torch.float32)
    wide = vectors_TKX.float()
    return torch.bmm(wide, wide.transpose(1, 2))


def gram_gradient(grad_TKK: Tensor, vectors_TKX: Tensor) -> Tensor:
    """Gradient of a Gram matrix with respect to its vectors: ``(G + G^T) V``.

    The product rule on ``V V^T``; the incoming ``G`` need not be symmetric, as a loss may read one
    triangle only.
    """
    return torch.bmm((grad_TKK + grad_TKK.transpose(1, 2)).to(vectors_TKX.dtype), vectors_TKX)


def _spans(like_TKX: Tensor) -> list[tuple[slice, slice]]:
    """Slices of tokens and of their pairs: 1 MiB of vectors each on a CPU, all on a GPU."""
    tokens, selected, width = like_TKX.shape
    step = tokens
    if like_TKX.device.type == "cpu":
        step = CACHED_BYTES // (selected * width * like_TKX.element_size())
    step = max(1, step)
    starts = range(0, tokens, step)
    spans = [slice(start, min(start + step, tokens)) for start in starts]
    return [(span, slice(span.start * selected, span.stop * selected)) for span in spans]


def _weighted_sum(weights_TK: Tensor, y_TKH: Tensor) -> Tensor:
    if weights_TK.dtype == y_TKH.dtype == torch.float32:
        return torch.bmm(weights_TK.unsqueeze(1), y_TKH).squeeze(1)
    # Sum in float32 (float64 stays) without a float32 copy of all outputs.
    wide = torch.promote_types(torch.promote_types(weights_TK.dtype, y_TKH.dtype), torch.float32)
    out = torch.zeros(y_TKH.shape[0], y_TKH.shape[2], dtype=wide, device=y_TKH.device)
    for k in range(y_TKH.shape[1]):
        out.addcmul_(y_TKH[:, k], weights_TK[:, k, None])
    return out.to(y_TKH.dtype)
