"""A quantized weight is bitsandbytes' values in the shape of the weight that it stands for."""

import copy

import bitsandbytes.functional as reference
import pytest
import torch
from torch import nn

from moe_finetune.errors import QuantizationError
from moe_finetune.quantization.weight import QuantizedWeight, quantized

EXPERTS, ROWS, COLUMNS = 5, 34, 29
"""No expert's weights fill whole blocks of 64, and no row does."""


def stack(dtype=torch.float32):
    return torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)


def test_nf4_is_bitsandbytes_own_expert_by_expert():
    weight = stack()
    weight[3] *= 50  # a block that reached into the next expert would share its scale
    held = QuantizedWeight.of(weight).dequantize()
    for expert, matrix in enumerate(weight):
        wanted = reference.dequantize_4bit(
            *reference.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
        )
        assert torch.equal(held[expert], wanted), expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_views_and_moves_read_the_same_values(dtype):
    weight = QuantizedWeight.of(stack(dtype))
    whole = weight.dequantize()
    assert (weight.shape, weight.dtype) == (whole.shape, whole.dtype)
    assert torch.equal(weight[2], whole[2]) and torch.equal(weight[-1], whole[-1])
    assert torch.equal(weight[1:4], whole[1:4])
    assert torch.equal(weight[[3, 0]], whole[[3, 0]])
    assert torch.equal(weight.transpose(1, 2)[1:3], whole.transpose(1, 2)[1:3])
    lazy = weight[:, 3:20:2]
    assert quantized(lazy) and torch.equal(lazy[1:3], whole[1:3, 3:20:2])
    assert torch.equal(weight.mT[:, :7].dequantize(), whole.mT[:, :7])
    assert torch.equal(copy.deepcopy(nn.Parameter(weight, requires_grad=False)).dequantize(), whole)
    wide = weight.to(torch.float64)
    assert quantized(wide) and wide.dtype == torch.float64
    assert torch.equal(weight * 2, whole * 2)


def test_a_linear_layer_saves_the_packed_weight_for_its_backward():
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = nn.Parameter(QuantizedWeight.of(stack()[0]), requires_grad=False)
    saved: list[int] = []

    def note(tensor):
        saved.append(tensor.stored_bytes if quantized(tensor) else tensor.numel() * 4)
        return tensor

    x = torch.randn(7, COLUMNS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(x)
    assert sum(saved) < ROWS * COLUMNS  # a quarter of the float weight
    output.square().sum().backward()
    wanted = torch.autograd.grad((x @ layer.weight.dequantize().T).square().sum(), x)[0]
    assert torch.allclose(x.grad, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda weight: weight.add_(1.0), "cannot be changed; train an adapter"),
        (lambda weight: nn.init.normal_(weight), "cannot be changed"),
        (lambda weight: weight[:2].copy_(weight.dequantize()[:2]), "cannot be changed"),
        (lambda weight: torch.chunk(QuantizedWeight.of(stack()[0]), 2), "another number of"),
    ],
)
def test_writing_and_unaligned_parts_are_refused(what, words):
    with pytest.raises(QuantizationError, match=words), torch.no_grad():
        what(QuantizedWeight.of(stack()))


def test_a_slice_takes_nothing_else_along():
    """A slice from the first expert on is not a shard of FSDP2, whose padding moves with it."""
    weight = QuantizedWeight.of(torch.randn(EXPERTS, ROWS, COLUMNS))
    buffer = weight.new_zeros(weight.shape)
    shards = [buffer.narrow(0, 0, length) for length in (EXPERTS, EXPERTS - 1)]
    for whole in (weight, *shards, *(shard.to(torch.bfloat16) for shard in shards)):
        part = whole[:2]
        moved = part.to("meta")
        assert moved._packed.untyped_storage().nbytes() == part._packed.nbytes
        sent, _ = part.fsdp_pre_all_gather(None)
        assert [len(tensor) for tensor in sent] == [2, 2]


@pytest.mark.parametrize(
    ("size", "stride", "offset", "packed"),
    [
        ((EXPERTS, ROWS, COLUMNS), (ROWS * COLUMNS, COLUMNS, 1), 0, True),
        ((2, ROWS, COLUMNS), (ROWS * COLUMNS, COLUMNS, 1), 0, True),
        ((2, ROWS, COLUMNS), (ROWS * COLUMNS, COLUMNS, 1), ROWS * COLUMNS, False),
        ((EXPERTS, 3, COLUMNS), (ROWS * COLUMNS, COLUMNS, 1), 0, False),
        ((EXPERTS, COLUMNS, ROWS), (ROWS * COLUMNS, 1, COLUMNS), 0, False),
    ],
)
def test_a_strided_view_has_the_values_of_the_whole_weight(size, stride, offset, packed):
    weight = QuantizedWeight.of(stack())
    view = torch.as_strided(weight, size, stride, offset)
    assert quantized(view) is packed
    wanted = weight.dequantize().contiguous().as_strided(size, stride, offset)
    assert torch.equal(view.dequantize() if packed else view, wanted)


@pytest.mark.parametrize("shape", [(EXPERTS, ROWS, COLUMNS), (48, 24)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_ranks_gather_to_the_whole(shape, ranks):
    """As FSDP2 does it: split, pad to the first part's length, gather, cut to the size."""
    weight = QuantizedWeight.of(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    chunks = torch.chunk(weight, ranks)
    assert [quantized(chunk) for chunk in chunks] == [True] * ranks
    sent = []
    for chunk in chunks:
        buffer = weight.new_zeros(chunks[0].shape)
        buffer.narrow(0, 0, chunk.shape[0]).copy_(chunk)
        part = buffer.narrow(0, 0, chunk.shape[0])
        assert torch.equal(part.dequantize(), chunk.dequantize())
        moved = part.to(torch.bfloat16)  # as a shard that waits on the host comes to its device
        assert moved.dtype == torch.bfloat16 and moved.shape == part.shape
        elsewhere = part.to("meta")  # moved once: the shard is the head of what is gathered
        (gathered, _), _ = elsewhere.fsdp_pre_all_gather(None)
        storages = {p.untyped_storage()._cdata for p in (elsewhere._packed, gathered)}
        assert len(storages) == 1
        tensors, metadata = moved.fsdp_pre_all_gather(None)
        assert [len(t) for t in tensors] == [len(chunks[0]._packed)] * 2
        sent.append(tensors)
    gathered = tuple(torch.cat(parts) for parts in zip(*sent, strict=True))
    whole, _ = weight.fsdp_post_all_gather(gathered, metadata, torch.bfloat16)
    whole = torch.as_strided(whole, weight.shape, weight.stride(), 0)
    assert whole.shape == weight.shape and whole.dtype == torch.bfloat16
    assert torch.equal(whole.to(torch.float32).dequantize(), weight.dequantize())
