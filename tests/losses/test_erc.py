import warnings

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import silu

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS, erc
from moe_finetune.losses.base import LayerContext, ModelFacts
from moe_finetune.losses.functional import erc_from_table, erc_loss, erc_table
from moe_finetune.losses.record import ProjectionFactors
from tests.losses import reference
from tests.losses.cases import make, record

TERM = TERMS["erc"]
EXPERTS, HIDDEN, WIDTH, RANK = 7, 5, 6, 2


def term(**options):
    return TERM(TERM.Options(weight=1.0, **options))


def factors(dtype=torch.float64, lora=True):
    """Projections with adapters, gate and up as views of one fused stack."""
    g = torch.Generator().manual_seed(8)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    fused, down = normal(EXPERTS, 2 * WIDTH, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)
    a_up, b_up = normal(EXPERTS, RANK, HIDDEN), normal(EXPERTS, 2 * WIDTH, RANK)
    a_down, b_down = normal(EXPERTS, RANK, WIDTH), normal(EXPERTS, HIDDEN, RANK)
    parts = {
        "gate": (fused[:, :WIDTH], a_up, b_up[:, :WIDTH]),
        "up": (fused[:, WIDTH:], a_up, b_up[:, WIDTH:]),
        "down": (down, a_down, b_down),
    }

    def get(name):
        weight, a, b = parts[name]
        return ProjectionFactors(weight, a, b, 0.7) if lora else ProjectionFactors(weight)

    return get, (fused, a_up, b_up, down, a_down, b_down)


def built(get, name):
    part = get(name)
    return part.weight_EOI + part.scaling * part.b_EOr @ part.a_ErI


def test_worked_by_hand():
    # Widths 1: M[i, j] = |w_j · R_i| = [[2, 3], [1, 4]].
    router = torch.eye(2, dtype=torch.float64)
    gate = torch.tensor([[[2.0, 1.0]], [[3.0, 4.0]]], dtype=torch.float64)
    assert erc_table(router, gate).tolist() == [[2, 3], [1, 4]]
    # i=0: max(3-2, 0) + max(1-2, 0); i=1: max(1-4, 0) + max(3-4, 0).
    assert erc_loss(router, gate, noise=False).item() == pytest.approx(1 / 4)
    # α = 1/4: i=0: 2.5 + 0.5; i=1: 0 + 2.
    assert erc_loss(router, gate, 0.25, noise=False).item() == pytest.approx(5 / 4)


def test_noise_is_bounded_by_the_nearest_row_and_has_no_gradient():
    values = make()
    router, gate = values["router_weight_EH"].requires_grad_(), values["gate_weight_EDH"]
    uniform = torch.rand(router.shape, dtype=torch.float64)
    epsilon = reference.erc_epsilon(router).unsqueeze(1)
    delta = 1 + epsilon * (2 * uniform - 1)
    proxies = erc.perturbed(router, uniform)
    torch.testing.assert_close(proxies, router * delta)
    torch.testing.assert_close(
        torch.autograd.grad(proxies.sum(), router)[0], delta, msg="δ must be constant"
    )
    got = erc_loss(router, gate, generator=torch.Generator().manual_seed(4))
    drawn = torch.rand(
        router.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    table = reference.erc_table(router, gate, 1 + epsilon * (2 * drawn - 1))
    torch.testing.assert_close(got, reference.erc_from_table(table))
    assert got != erc_loss(router, gate, noise=False)


def test_equal_and_zero_rows_give_no_noise():
    router = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])
    assert torch.equal(erc.perturbed(router, torch.rand(3, 2)), router)
    loss = erc_loss(router.requires_grad_(), torch.randn(3, 4, 2))
    assert torch.autograd.grad(loss, router)[0].isfinite().all()


def test_default_generator_repeats_with_the_seed():
    values = make()
    inputs = (values["router_weight_EH"], values["gate_weight_EDH"])
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(erc_loss(*inputs))
    assert losses[0] == losses[1] != losses[2]


def test_router_grad_false_trains_the_gate_alone():
    values = make()
    router = values["router_weight_EH"].requires_grad_()
    gate = values["gate_weight_EDH"].requires_grad_()
    loss = erc_loss(router, gate, noise=False, router_grad=False)
    torch.testing.assert_close(loss, erc_loss(router, gate, noise=False))
    grads = torch.autograd.grad(loss, (router, gate), allow_unused=True)
    assert grads[0] is None and grads[1].norm() > 0
    assert term(router_grad=False).trains == {"experts"}
    assert term().trains == {"router", "experts"}


def test_alpha_out_of_range():
    values = make()
    inputs = (values["router_weight_EH"], values["gate_weight_EDH"])
    with pytest.raises(ValueError, match=r"alpha is -0\.1, expected a number in \[0, 1\]"):
        erc_loss(*inputs, alpha=-0.1)
    with pytest.raises(ValidationError, match="alpha"):
        TERM.Options(weight=1.0, alpha=-0.1)
    with pytest.warns(UserWarning, match="alpha 1.5 is above 1"):
        erc_loss(*inputs, alpha=1.5)
    with pytest.warns(UserWarning, match="alpha 2.0 is above 1"):
        term(alpha=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        term(alpha=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at_a_time", [1, 3, EXPERTS])
@pytest.mark.parametrize("batched", [False, True])
def test_product_by_experts_equals_the_plain_one(batched, at_a_time, dtype, monkeypatch):
    """Float32 weights under float64 proxies take the path of bfloat16 under float32."""
    monkeypatch.setattr(erc, "WIDENED_BYTES", at_a_time * WIDTH * HIDDEN * 8)
    g = torch.Generator().manual_seed(3)
    shape = (EXPERTS, 4, HIDDEN) if batched else (4, HIDDEN)
    inputs = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    fused = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=g, dtype=dtype).requires_grad_()
    upstream = torch.randn(EXPERTS, 4, WIDTH, generator=g, dtype=torch.float64)
    got = erc._Product.apply(inputs, fused[:, WIDTH:])
    plain = inputs @ fused[:, WIDTH:].double().mT
    torch.testing.assert_close(got, plain)
    mine = torch.autograd.grad(got, (inputs, fused), upstream)
    theirs = torch.autograd.grad(plain, (inputs, fused), upstream)
    torch.testing.assert_close(mine, theirs)
    assert mine[1].dtype == dtype


@pytest.mark.parametrize("activation", ["gate", "up", "silu_gate", "swiglu", "output"])
def test_term_with_unbuilt_adapters_equals_built_weights(activation):
    values = make()
    get, trained = factors()
    router = values["router_weight_EH"].requires_grad_()
    got = term(activation=activation, noise=False, alpha=0.8).loss(
        record(values, expert_factors=get), LayerContext()
    )
    gate, up, down = (built(get, name) for name in ("gate", "up", "down"))
    rows = []
    for i in range(EXPERTS):
        row = []
        for j in range(EXPERTS):
            g, u = gate[j] @ router[i], up[j] @ router[i]
            z = silu(g) * u
            made = {"gate": g, "up": u, "silu_gate": silu(g), "swiglu": z, "output": down[j] @ z}
            row.append(made[activation].norm())
        rows.append(torch.stack(row))
    expected = erc_from_table(torch.stack(rows), 0.8)
    torch.testing.assert_close(got, expected)
    inputs = (router, *trained)
    mine = torch.autograd.grad(got, inputs, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b)
    assert mine[1].norm() > 0 and mine[2].norm() > 0


def test_frozen_weights_get_no_gradient_and_their_adapters_do():
    values = make()
    get, (fused, a_up, b_up, *_) = factors()
    fused.requires_grad_(False)
    record_ = record(values, expert_factors=get)
    loss = term().loss(record_, LayerContext())
    grads = torch.autograd.grad(loss, (a_up, b_up))
    assert all(grad.norm() > 0 for grad in grads)
    get, (fused, *_) = factors(lora=False)
    loss = term().loss(record(values, expert_factors=get), LayerContext())
    assert torch.autograd.grad(loss, fused)[0][:, :WIDTH].norm() > 0


def test_bfloat16_weights_are_widened():
    values = make(dtype=torch.bfloat16)
    get, trained = factors(torch.bfloat16)
    got = term(noise=False).loss(record(values, expert_factors=get), LayerContext())
    assert got.dtype == torch.float32
    exact = {
        name: ProjectionFactors(
            get(name).weight_EOI.double(), get(name).a_ErI.double(), get(name).b_EOr.double(), 0.7
        )
        for name in ("gate", "up", "down")
    }
    expected = erc_loss(values["router_weight_EH"].double(), built(exact.get, "gate"), noise=False)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(got, trained[0])[0].dtype == torch.bfloat16


def test_no_copy_of_the_weights_waits_for_backward():
    values = make(dtype=torch.bfloat16)
    get, trained = factors(torch.bfloat16)
    own = {tensor.untyped_storage().data_ptr() for tensor in trained}
    kept = []

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        term(activation="output").loss(record(values, expert_factors=get), LayerContext())
    assert kept and not {s for s in kept if sorted(s) == sorted((EXPERTS, WIDTH, HIDDEN))}


def test_noise_is_drawn_once_a_forward_and_met_again():
    values = make()
    get, _ = factors()
    layer = record(values, expert_factors=get)
    context = LayerContext()
    first = term().loss(layer, context)
    again = term().loss(layer, LayerContext(draws=context.draws))
    assert torch.equal(first, again)
    assert not torch.equal(first, term().loss(layer, LayerContext()))
    torch.manual_seed(6)
    seeded = term().loss(layer, LayerContext())
    torch.manual_seed(6)
    assert torch.equal(seeded, term().loss(layer, LayerContext()))


def test_experts_without_a_gate():
    facts = ModelFacts(moe_layers=(1, 2), num_experts=7, top_k=3, vocab_size=13, has_gate=False)
    for activation in ("gate", "silu_gate", "swiglu", "output"):
        with pytest.raises(ObjectiveError, match="this model's experts have none"):
            term(activation=activation).check(facts)
    term(activation="up").check(facts)


def test_it_reads_the_experts_factors():
    assert term().needs == {"expert_factors"}
