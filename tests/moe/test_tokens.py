"""Which tokens count and where sequences end: the same whatever the batch's layout."""

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from moe_finetune.errors import CaptureError
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.layout import read_layout
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.tokens import read_tokens
from tests.support import tiny
from tests.support.objectives import objective_of

PAD = 3
LENGTHS = (9, 5, 1, 12, 2)
TERMS = {
    "load_balance": {"weight": 0.9, "scope": "sequence"},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
}


def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in LENGTHS]


def collated(**options):
    collator = DataCollatorForLanguageModeling(pad_token_id=PAD, **options)
    return collator([{"input_ids": ids} for ids in sequences()])


def read(batch, **options):
    tokens = read_tokens(read_layout((), batch), pad_token_id=PAD, **options)
    lengths = tokens.sequence_lengths
    assert int(lengths.sum()) == tokens.mask_T.numel()
    ends = lengths.cumsum(0).tolist()
    counted = [
        int(tokens.mask_T[end - n : end].sum())
        for end, n in zip(ends, lengths.tolist(), strict=True)
    ]
    return [n for n in counted if n]


def pairs(batch, kind):
    """The mask over (query, key) of a padded batch: bool, or what is added to the logits."""
    mask = batch["attention_mask"].bool()
    length = mask.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, None, :]
    if kind == "bool":
        return seen
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min if kind == "float" else -1e9)


@pytest.mark.parametrize("multiple", [None, 8, 64])
@pytest.mark.parametrize("padding_free", [False, True])
def test_layouts_of_trl(padding_free, multiple):
    batch = collated(padding_free=padding_free, pad_to_multiple_of=multiple)
    assert read(batch) == list(LENGTHS)
    if padding_free:
        batch.pop("position_ids")  # cumulative lengths alone
        if multiple is None:
            assert read(batch) == list(LENGTHS)


@pytest.mark.parametrize("kind", ["bool", "float", "large"])
def test_masks_of_four_dimensions(kind):
    batch = collated(pad_to_multiple_of=8)
    assert read({**batch, "attention_mask": pairs(batch, kind)}) == list(LENGTHS)
    masks = {"full_attention": pairs(batch, kind), "sliding_attention": None}
    assert read({**batch, "attention_mask": masks}) == list(LENGTHS)


def test_padding_on_the_left_and_rows_opened_for_the_kernel():
    real = torch.zeros(2, 7, dtype=torch.bool)
    real[0, 3:], real[1, 1:] = True, True
    seen = torch.ones(7, 7, dtype=torch.bool).tril() & real[:, None, None, :]
    seen |= ~seen.any(-1, keepdim=True)  # an empty row would be NaN
    ids = torch.full((2, 7), 9)
    assert read({"input_ids": ids, "attention_mask": seen}) == [4, 6]
    assert read({"input_ids": ids, "attention_mask": real}) == [4, 6]


def test_sequences_packed_by_a_mask():
    block = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2), torch.ones(5, 5)).bool().tril()
    ids = torch.arange(11).unsqueeze(0)
    assert read({"input_ids": ids, "attention_mask": block[None, None]}) == [4, 2, 5]


def test_rows_end_sequences_wherever_their_positions_begin():
    ids = torch.arange(12).view(2, 6)
    begun = torch.tensor([[5, 6, 7, 0, 1, 2], [3, 4, 5, 6, 7, 8]])
    assert read({"input_ids": ids, "position_ids": begun}) == [3, 3, 6]
    assert read({"input_ids": ids, "position_ids": torch.arange(6)[None]}) == [6, 6]
    assert read({"input_ids": ids}) == [6, 6]


def test_a_last_sequence_of_one_token_is_not_padding():
    ids, positions = torch.tensor([[7, 8, 9, 11]]), torch.tensor([[0, 1, 2, 0]])
    assert read({"input_ids": ids, "position_ids": positions}) == [3, 1]
    ids[0, 3] = PAD
    assert read({"input_ids": ids, "position_ids": positions}) == [3]
    embeddings = {"inputs_embeds": torch.randn(1, 4, 5), "position_ids": positions}
    assert read(embeddings) == [3]


def test_labels_count_instead():
    ids = torch.arange(10).view(2, 5)
    labels = torch.tensor([[-100, -100, 2, 3, -100], [-100, 6, -100, 8, 9]])
    found = read_tokens(read_layout((ids,), {}), labels_BS=labels, count_labels=True)
    wanted = [[False, True, True, False, False], [True, False, True, True, False]]
    assert found.mask_T.view(2, 5).tolist() == wanted
    for wrong, message in (
        (None, "needs labels"),
        (labels[:, 1:], r"shape \(2, 4\) for 2 rows of 5"),
    ):
        with pytest.raises(CaptureError, match=message):
            read_tokens(read_layout((ids,), {}), labels_BS=wrong, count_labels=True)


def test_a_cache_before_the_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert read({"input_ids": torch.ones(2, 2).long(), "attention_mask": mask}) == [1, 2]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), "shape"),
        (torch.ones(2, 5, 5), "shape"),
        (torch.ones(2, 1, 5, 9), "shape"),
        (torch.ones(2, 1, 5, 5).long(), "dtype torch.int64"),
        (object(), "is a object"),
    ],
)
def test_masks_that_cannot_be_read_are_refused(mask, message):
    with pytest.raises(CaptureError, match=message):
        read_tokens(read_layout((), {"input_ids": torch.ones(2, 5).long(), "attention_mask": mask}))


def gradients(model, batch):
    """Of the terms alone, whose values go with them."""
    model.zero_grad()
    objective, values = objective_of(TERMS, model_facts(model)), []

    def note(record: RoutingRecord, loss) -> None:
        values.append(loss.values)

    batch = {k: v for k, v in batch.items() if k != "labels"}
    with Recorder(model, objective, observers=[note]):
        (model(**batch, use_cache=False).logits.sum() * 0.0).backward()
    return values, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_do_not_depend_on_the_layout():
    model = tiny.model("qwen3_moe", pad_token_id=PAD).train()
    padded = collated()
    values, wanted = gradients(model, padded)
    wanted = {name: grad.clone() for name, grad in wanted.items()}
    layouts = {
        f"free, {n}": collated(padding_free=True, pad_to_multiple_of=n) for n in (None, 8, 64)
    }
    layouts["pairs"] = {**padded, "attention_mask": pairs(padded, "bool")}
    for name, batch in layouts.items():
        again, got = gradients(model, batch)
        for one, two in zip(again, values, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)
        for parameter, value in wanted.items():
            error = (got[parameter] - value).abs().max()
            assert error <= 1e-4 * value.abs().max().clamp_min(1e-5), (name, parameter)
