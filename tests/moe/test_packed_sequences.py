"""Sequences in one row do not see each other, nor padding: every family, with and without hooks."""

import inspect
import math
from functools import cache

import pytest
import torch
import transformers
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from moe_finetune.models import FAMILIES
from moe_finetune.models.family import Rows
from moe_finetune.moe.layout import read_layout
from moe_finetune.moe.packed_sequences import separate
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.training.specialization import Specialization
from tests.support import tiny, tiny_adapter, tiny_families

PAD, OTHER_PAD = 3, 9
LENGTHS = (13, 17, 5, 11)
BOUND = 1e-5
ROUNDED = 1e-4
"""Delta rules sum decays over chunks of 64, which padding moves."""

NAMES = sorted(FAMILIES)


def made(name, **changes):
    """A tiny model; in float64 no two experts' scores are nearly equal."""
    maker = tiny if name in tiny.FAMILY_NAMES and not changes else tiny_families
    model = maker.model(name, **changes)
    model.set_experts_implementation("eager")
    # A softmax in float32 turns an additive mask of float64 into nan; Inkling 2 casts to float32.
    single = ("granitemoe_swa", "inkling2", "inkling2_text")
    return model if name in single else model.double()


@cache
def sequences(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 260, (n,), generator=generator).tolist() for n in LENGTHS]


def changed():
    """The same but for all tokens of the first sequence."""
    first, *others = sequences()
    return [[(token + 7) % 250 + 10 for token in first], *others]


def flat(rows):
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)(
        [{"input_ids": row} for row in rows]
    )
    assert "attention_mask" not in batch and (batch["position_ids"] == 0).sum() == len(rows)
    del batch["labels"]
    return batch


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(input_ids=torch.as_tensor(ids), **{"use_cache": False} | inputs).logits


def packed(model, rows):
    """Logits of each sequence, of all in one row."""
    return logits(model, **{"ids": (batch := flat(rows)).pop("input_ids")}, **batch)[0].split(
        [len(row) for row in rows]
    )


def difference(one, other):
    return float((one - other).abs().max() / other.abs().max())


def differences(ones, others):
    return max(map(difference, ones, others))


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_do_not_see_each_other(name):
    model, rows = made(name), FAMILIES[name].rows
    try:
        stock = differences(packed(model, sequences())[1:], packed(model, changed())[1:])
    except ValueError as error:  # transformers 5.20 refuses what it would leak, without kernels
        assert "can't keep packed sequences apart" in str(error)
        stock = math.inf
    records = []
    with Specialization(model, "none") as method:
        method.recorder.change(observers=(lambda r, _: records.append(r),), observe="all")
        together = packed(model, sequences())
        assert differences(together[1:], packed(model, changed())[1:]) < BOUND
        alone = [logits(model, [row])[0] for row in sequences()]
        assert differences(together, alone) < BOUND
    assert records[0].sequence_lengths[: len(LENGTHS)].tolist() == list(LENGTHS)
    assert not records[0].sequence_lengths[len(LENGTHS) :].any()
    leaks = bool(rows.per_sequence) or not rows.masks_by_position
    assert stock > 1e-2 if leaks else stock < BOUND, "the family's `rows` are no longer true"


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_seen(name):
    model, facts = made(name), FAMILIES[name].rows
    row, other = sequences()[1], sequences()[0]
    gap = len(row) - len(other)
    ones = [[1] * len(row)]
    right = {"attention_mask": torch.tensor([*ones, [1] * len(other) + [0] * gap])}
    left = {"attention_mask": torch.tensor([*ones, [0] * gap + [1] * len(other)])}
    before, behind = [row, [PAD] * gap + other], [row, other + [PAD] * gap]
    alone = logits(model, [other])[0]
    stock = difference(logits(model, before, **left)[1, gap:], alone)
    assert stock < ROUNDED if facts.padding == "unseen" else stock > 1e-2
    records = []
    observers = [lambda record, _: records.append(record)]
    with Recorder(model, observers=observers, observe="all"):
        ends = logits(model, behind, **right)[1, : len(other)]
        begins = logits(model, before, **left)[1, gap:]
        again = logits(model, [row, [OTHER_PAD] * gap + other], **left)[1, gap:]
    assert difference(ends, alone) < BOUND
    assert difference(again, begins) < BOUND and difference(begins, alone) < ROUNDED
    for record, inputs in ((records[0], right), (records[-1], left)):
        assert torch.equal(record.mask_T, inputs["attention_mask"].reshape(-1).bool())


@pytest.mark.parametrize("name", NAMES)
def test_generation_beside_padding(name):
    """``generates_padded``: a token after a padded prompt, with its cache."""
    model, facts = made(name), FAMILIES[name].rows
    row, other = sequences()[1], sequences()[0]
    gap = len(row) - len(other)
    mask = torch.tensor([[1] * len(row) + [1], [0] * gap + [1] * len(other) + [1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        prompt = model(
            input_ids=torch.tensor([row, [PAD] * gap + other]),
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            use_cache=True,
        )
        following = model(
            input_ids=torch.tensor([[40], [41]]),
            attention_mask=mask,
            position_ids=positions[:, -1:],
            past_key_values=prompt.past_key_values,
            use_cache=True,
        )
    wanted = logits(model, [[*other, 41]])[0, -1]
    found = difference(following.logits[1, -1], wanted)
    assert found < ROUNDED if facts.generates_padded else found > 1e-2


HEADS = {"index_n_heads": 48}
"""So many that no two scores of the indexer are equal; of few, all may be cut to 0."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("axk2", {"index_topk": 4} | HEADS),
        ("deepseek_v32", {"index_topk": 4} | HEADS),
        ("glm_moe_dsa", {"index_topk": 4} | HEADS),
        ("hy_v4", {"index_topk": 4} | HEADS),
        ("deepseek_v4", {"index_topk": 2, "sliding_window": 6} | HEADS),
        ("glm5_next", {"index_topk": 8} | HEADS),
        ("qwen4_exp_text", {"indexer_budget": 8}),
        (
            "qwen4_exp_text",
            {
                "ple_layer_ids": [1, 3],
                "ple_embed_dim": 24,
                "ngram_size": 3,
                "heads_per_ngram": 2,
                "ngram_vocab_size_base": 101,
            },
        ),
        ("gpt_oss", {"sliding_window": 6}),
        ("afmoe", {"sliding_window": 6}),
        ("mixtral", {"sliding_window": 6}),
    ],
)
def test_what_a_class_selects_and_looks_up_stays_in_its_sequence(name, changes):
    model = made(name, **changes)
    with Recorder(model):
        together = packed(model, sequences())
        alone = [logits(model, [row])[0] for row in sequences()]
        assert differences(together, alone) < BOUND


# A mask for the class, states, convolutions, compressed keys; sdpa's masks and eager ones.
KINDS = ("afmoe", "gpt_oss", "qwen3_next", "nemotron_h", "inkling_text", "deepseek_v4", "glm5_next")


def two_rows():
    """Two rows of two sequences each, of one length."""
    a, b, c, d = sequences()
    rows = [a + b, [*c, *d, *sequences(6)[0], 77]]
    starts = [[0, len(a)], [0, len(c), len(c) + len(d)]]
    return rows, starts


def positions_of(rows, starts):
    places = []
    for row, begins in zip(rows, starts, strict=True):
        ends = [*begins[1:], len(row)]
        places.append([i for b, e in zip(begins, ends, strict=True) for i in range(e - b)])
    return torch.tensor(places)


@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_gradients_of_packed_rows_are_those_of_each_sequence(name):
    model = tiny_adapter.adapted(made(name)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rows, starts = two_rows()
    vocabulary = model.config.get_text_config().vocab_size
    pull = torch.randn(2, len(rows[0]), vocabulary, generator=torch.Generator().manual_seed(8))

    def gradients(forwards):
        model.zero_grad()
        for ids, positions, part in forwards:
            given = {} if positions is None else {"position_ids": positions}
            out = model(input_ids=ids, use_cache=False, **given).logits
            (out * part).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    separate_ones = [
        (torch.tensor([row[b:e]]), None, pull[i : i + 1, b:e])
        for i, (row, begins) in enumerate(zip(rows, starts, strict=True))
        for b, e in zip(begins, [*begins[1:], len(row)], strict=True)
    ]
    with Recorder(model):
        found = gradients([(torch.tensor(rows), positions_of(rows, starts), pull)])
        wanted = gradients(separate_ones)
    assert found.keys() == wanted.keys() and len(found) > 20
    for parameter, gradient in wanted.items():
        scale = float(gradient.abs().max()) + 1e-5
        assert float((found[parameter] - gradient).abs().max()) < 2e-4 * scale, parameter


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss", "gemma4"])
def test_boundaries_are_taken_however_they_are_given(name):
    model, batch = made(name), flat(sequences())
    ids, positions = batch["input_ids"], batch["position_ids"]
    kernels = {key: value for key, value in batch.items() if key.startswith(("cu_", "max_"))}
    with Recorder(model):
        wanted = logits(model, ids, position_ids=positions)
        for inputs in (
            {"position_ids": positions, "attention_mask": torch.ones_like(ids)},
            {"position_ids": positions, "use_cache": True},
            kernels,
        ):
            assert difference(logits(model, ids, **inputs), wanted) < BOUND


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gemma4"])
def test_packed_rows_with_padding(name):
    """In front and behind; positions of padding are arbitrary."""
    model, records = made(name), []
    a, b, *_ = sequences()
    ids = [[PAD] * 3 + a + b + [PAD] * 4]
    places = [[1] * 3 + list(range(len(a))) + list(range(len(b))) + [1] * 4]
    mask = torch.tensor([[0] * 3 + [1] * len(a + b) + [0] * 4])
    with Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"):
        found = logits(model, ids, attention_mask=mask, position_ids=torch.tensor(places))[0]
        alone = [logits(model, [row])[0] for row in (a, b)]
    assert differences(found[3 : 3 + len(a + b)].split([len(a), len(b)]), alone) < BOUND
    assert torch.equal(records[0].mask_T, mask[0].bool())


IMAGE_ROWS = (
    "glm4v_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text",
)  # fmt: skip
"""Families whose classes take positions of text and of images in one tensor (4, B, S)."""


def with_image_rows(positions):
    """Positions of text first, then three rows that no text has."""
    return torch.cat([positions[None], torch.stack([positions // n for n in (2, 3, 4)])])


def test_no_other_family_reads_image_rows():
    classes = {name: getattr(transformers, FAMILIES[name].class_name, None) for name in NAMES}
    reading = [
        name
        for name, kind in classes.items()
        if kind and "position_ids.shape[0] == 4" in inspect.getsource(inspect.getmodule(kind))
    ]
    assert tuple(reading) == IMAGE_ROWS


@pytest.mark.parametrize("name", IMAGE_ROWS)
@pytest.mark.parametrize("masked", [False, True])
def test_positions_of_text_separate_sequences_also_beside_those_of_images(name, masked):
    model, records, (a, b, *_) = made(name), [], sequences()
    ids = torch.tensor([a + b + [PAD] * 5])
    places = torch.tensor([[*range(len(a)), *range(len(b)), *[0] * 5]])
    inputs = {"position_ids": with_image_rows(places)}
    if masked:
        inputs["attention_mask"] = (ids != PAD).long()
    with Recorder(model, observers=[lambda r, _: records.append(r)], observe="all"):
        found = logits(model, ids, **inputs)[0, : len(a + b)].split([len(a), len(b)])
        alone = [
            logits(model, [row], position_ids=with_image_rows(torch.arange(len(row))[None]))[0]
            for row in (a, b)
        ]
    assert differences(found, alone) < BOUND
    assert torch.equal(records[0].mask_T, (ids != PAD).view(-1))
    ends = records[0].sequence_lengths.cumsum(0)
    counted = torch.tensor_split(records[0].mask_T, ends[:-1])
    assert [int(part.sum()) for part in counted if part.any()] == [len(a), len(b)]


def test_flash_attention_gets_lengths_of_every_row():
    rows, starts = two_rows()
    config = tiny.config("qwen3_moe")
    config._attn_implementation = "flash_attention_2"
    ids, positions = torch.tensor(rows), positions_of(rows, starts)
    given = {"position_ids": positions}
    layout = read_layout((ids,), given)
    inputs, _, several = separate(given, layout, config, torch.float32, Rows())
    assert several and inputs["use_cache"] is False and inputs.get("attention_mask") is None
    assert inputs["cu_seq_lens_q"].tolist() == [0, 13, 30, 35, 46, 60]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_k"] == 17


def test_other_forwards_are_left_alone():
    """A cache, rows of one sequence, images' positions."""
    config, ids = tiny.config("qwen3_moe"), torch.tensor(two_rows()[0])
    positions = positions_of(*two_rows())
    several = torch.stack([torch.arange(30).expand(2, 30) // 2] * 3)
    for inputs in (
        {"position_ids": positions, "past_key_values": object()},
        {"position_ids": positions, "cache": object()},
        {"position_ids": torch.arange(4, 34)[None]},
        {"position_ids": several},
        {"attention_mask": torch.ones(2, 30)},
        {},
    ):
        layout = read_layout((ids,), inputs)
        found = separate(inputs, layout, config, torch.float32, Rows(per_sequence=("Any",)))
        assert found == (inputs, None, False)


def test_the_model_is_as_before(name="qwen3_next"):
    model = made(name)
    before = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
    stock = logits(model, sequences()[:1])
    with Recorder(model):
        pass
    assert {n: m.__dict__.get("forward") for n, m in model.named_modules()} == before
    assert difference(logits(model, sequences()[:1]), stock) == 0
