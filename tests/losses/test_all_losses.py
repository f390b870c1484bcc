"""What holds for every loss: the formula, gradients, masks, odd sizes, symmetries, types."""

import pytest
import torch

from moe_finetune.losses import TERMS, functional
from moe_finetune.losses.base import LayerContext
from tests.losses import reference
from tests.losses.cases import CASES, SIZES, letters, make, map_axis, mask, record, relabel

MASKED = [case for case in CASES if case.masked]
POOLED = [case for case in CASES if not case.sequences]


def ids(cases):
    return [case.name for case in cases]


def leaves(case, values):
    """The values with fresh leaves where the loss sends gradients."""
    fresh = {name: values[name].detach().clone().requires_grad_() for name in case.grads}
    return {**values, **fresh}, list(fresh.values())


def gradients(case, values, upstream=1.0, run=None, **extra):
    values, inputs = leaves(case, values)
    loss = (run or case.run)(values, **extra)
    # A loop over no pairs has no graph; the inputs then get no gradient, which is zero.
    loss = loss + 0 * sum(x.nansum() for x in inputs)
    found = torch.autograd.grad(loss * upstream, inputs, allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)
    ]


def compare_with_the_slow_loop(case, values, **extra):
    loss, got = gradients(case, values, **extra)
    expected, wanted = gradients(case, values, run=case.reference, **extra)
    assert loss.dtype == torch.float64 and loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for mine, slow in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, slow, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_value_and_gradient_equal_the_slow_loop(case, size):
    compare_with_the_slow_loop(case, make(size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", MASKED, ids=ids(MASKED))
def test_masked_value_and_gradient_equal_the_slow_loop(case, size):
    values = make(size)
    compare_with_the_slow_loop(case, values, mask_T=mask(len(values["probs_TE"])))


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_zero_vectors_have_the_slow_loops_value_and_gradient(case):
    """A token with one zero vector, a token with only such, a row of the router."""
    values = make()
    for name in ("outputs_TKH", "activations_TKD"):
        values[name][0, 1] = values[name][2] = 0
    values["router_weight_EH"][3] = 0
    compare_with_the_slow_loop(case, values)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_gradcheck(case):
    values = make((5, 4, 3, 6, 7, 8), seed=5)
    extra = {"mask_T": mask(5)} if case.masked else {}
    values, inputs = leaves(case, values)

    def function(*tensors):
        return case.run({**values, **dict(zip(case.grads, tensors, strict=True))}, **extra)

    assert torch.autograd.gradcheck(function, inputs, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_gradient_follows_the_upstream_gradient(case):
    values = make()
    _, once = gradients(case, values)
    _, scaled = gradients(case, values, upstream=-3.7)
    assert any(g.abs().max() > 0 for g in once)
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(b, -3.7 * a)


@pytest.mark.parametrize("case", MASKED, ids=ids(MASKED))
def test_masked_tokens_change_nothing_whatever_they_hold(case):
    values = make()
    keep = mask(len(values["probs_TE"]))
    poisoned = dict(values)
    for name in case.inputs:
        if letters(name).startswith("T"):
            garbage = torch.nan if values[name].is_floating_point() else 10**6
            rows = ~keep.view(-1, *(1,) * (values[name].dim() - 1))
            poisoned[name] = values[name].masked_fill(rows, garbage)
    kept = map_axis(values, "T", lambda x, axis: x[keep])
    ends = values["sequence_lengths"].cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    kept["sequence_lengths"] = torch.tensor(
        [int(keep[a:b].sum()) for a, b in zip(starts, ends, strict=True)]
    )
    expected, wanted = gradients(case, kept)
    for inputs in (values, poisoned):
        loss, got = gradients(case, inputs, mask_T=keep)
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine[keep], theirs)
            assert (mine[~keep] == 0).all()


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("case", MASKED, ids=ids(MASKED))
def test_a_mask_of_any_type_counts_the_same(case, kind):
    values = make()
    keep = mask(len(values["probs_TE"]))
    assert torch.equal(case.run(values, mask_T=keep), case.run(values, mask_T=keep.to(kind)))


@pytest.mark.parametrize("case", MASKED, ids=ids(MASKED))
def test_all_masked_gives_zero_and_zero_gradients(case):
    values = make()
    for name in case.grads:
        values[name] = torch.full_like(values[name], torch.nan)
    nothing = torch.zeros(len(values["probs_TE"]), dtype=torch.bool)
    loss, got = gradients(case, values, mask_T=nothing)
    assert loss == 0
    assert all((g == 0).all() for g in got)


@pytest.mark.parametrize("case", MASKED, ids=ids(MASKED))
def test_no_tokens_give_zero(case):
    values = map_axis(make(), "T", lambda x, axis: x[:0])
    values["sequence_lengths"] = torch.zeros(2, dtype=torch.int64)
    assert case.run(values) == 0


@pytest.mark.parametrize("case", POOLED, ids=ids(POOLED))
def test_order_of_tokens_means_nothing(case):
    values = make()
    order = torch.randperm(len(values["probs_TE"]), generator=torch.Generator().manual_seed(1))
    moved = map_axis(values, "T", lambda x, axis: x[order])
    loss, got = gradients(case, values)
    again, moved_grads = gradients(case, moved)
    torch.testing.assert_close(again, loss)
    for name, a, b in zip(case.grads, got, moved_grads, strict=True):
        torch.testing.assert_close(b, a[order] if letters(name).startswith("T") else a)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_numbers_of_experts_mean_nothing(case):
    values = make()
    experts = values["probs_TE"].shape[1]
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(order, torch.arange(experts))
    torch.testing.assert_close(case.run(relabel(values, order)), case.run(values))


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_order_of_a_selection_means_nothing(case):
    values = make()
    shuffle = torch.rand(values["index_TK"].shape).argsort(-1)

    def change(x, axis):
        places = shuffle.view(*shuffle.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, places.expand_as(x))

    torch.testing.assert_close(case.run(map_axis(values, "K", change)), case.run(values))


@pytest.mark.parametrize("case", [c for c in CASES if c.pairs], ids=lambda c: c.name)
def test_one_choice_has_no_pairs(case):
    loss, got = gradients(case, make("one_choice"))
    assert abs(loss) < 1e-12
    assert all(g.abs().max() < 1e-12 for g in got)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_float32_and_bfloat16_give_a_float32_scalar_near_float64(case):
    values = make((401, 12, 3, 33, 24, 41), seed=4)
    # What bfloat16 can hold is the same number in all three types, so only arithmetic differs.
    for name in case.inputs:
        if torch.is_tensor(values[name]) and values[name].is_floating_point():
            values[name] = values[name].bfloat16().double()
    exact, wanted = gradients(case, values)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        narrow = {
            k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in values.items()
        }
        loss, got = gradients(case, narrow)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_autocast_does_not_narrow_the_arithmetic(case):
    values = make(dtype=torch.float32)

    def under_autocast(values):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.run(values)

    plain, wanted = gradients(case, values)
    loss, got = gradients(case, values, run=under_autocast)
    assert torch.equal(loss, plain)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_wrong_shapes_name_argument_got_and_wanted(case):
    values = make()
    for name in case.inputs:
        if name in ("top_k", "sequence_lengths"):
            continue
        wrong = {**values, name: values[name].unsqueeze(-1)}
        with pytest.raises(ValueError, match=rf"{name} has shape .*, expected \("):
            case.run(wrong)
        with pytest.raises(ValueError, match=rf"{name} is a ndarray, expected a torch\.Tensor"):
            case.run({**values, name: values[name].numpy()})
    if case.masked:
        with pytest.raises(ValueError, match=r"mask_T has shape \(16,\), expected \(T=17\)"):
            case.run(values, mask_T=torch.ones(16))
    if "index_TK" in case.inputs:
        with pytest.raises(ValueError, match=r"index_TK has shape \(16, 3\), expected \(T=17, K\)"):
            case.run({**values, "index_TK": values["index_TK"][:-1]})
        with pytest.raises(ValueError, match=r"index_TK has dtype torch\.float64"):
            case.run({**values, "index_TK": values["index_TK"].double()})


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_nothing_waits_for_the_accelerator(case):
    """On a device without data `.item()`, boolean indices and tensors made elsewhere fail."""
    values = {
        name: value.to("meta") if torch.is_tensor(value) else value
        for name, value in make(dtype=torch.float32).items()
    }
    extra = {"mask_T": torch.ones(17, dtype=torch.bool, device="meta")} if case.masked else {}
    loss, grads = gradients(case, values, **extra)
    assert all(tensor.device.type == "meta" for tensor in (loss, *grads))


SCORES = ("scores_TK",)
# Term, its options, the vectors it is about, and what its reference takes besides them.
ON_VECTORS = [
    ("orthogonality", {}, "outputs", SCORES),
    ("orthogonality", {"form": "cosine"}, "outputs", SCORES),
    ("orthogonality", {"tau_gate": 0.3}, "outputs", SCORES),
    ("specialization", {}, "activations", ()),
    ("dpp", {"eps": 1e-2}, "outputs", ()),
    ("ncl", {"normalize": True}, "outputs", ()),
]


@pytest.mark.parametrize(("name", "options", "kind", "more"), ON_VECTORS)
def test_terms_on_vectors_read_their_inner_products(name, options, kind, more):
    """Values and gradients of the vectors."""
    values, keep = make(), mask(17)
    field = "outputs_TKH" if kind == "outputs" else "activations_TKD"
    vectors = values[field] = values[field].requires_grad_()
    term = TERMS[name](TERMS[name].Options(weight=1.0, **options))
    assert term.needs == {f"{kind}_gram"}
    loss = term.loss(record(values, mask_T=keep), LayerContext())
    besides = [values[key] for key in more]
    slow = getattr(reference, name)(vectors, *besides, keep, **options)
    torch.testing.assert_close(loss, slow)
    direct = getattr(functional, f"{name}_loss")(vectors, *besides, keep, **options)
    gradients_ = [torch.autograd.grad(value, vectors)[0] for value in (loss, direct)]
    torch.testing.assert_close(*gradients_)
    assert gradients_[0].norm() > 0
