"""The experts' forward and its written-out backward against a loop over tokens and choices."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_finetune.moe.experts import forward as experts_module
from moe_finetune.moe.experts import grouped_products, sums_by_token
from moe_finetune.moe.experts.forward import Experts, LoraFactors, run_experts

TOKENS, EXPERTS, SELECTED, HIDDEN, WIDTH, RANK = 23, 7, 3, 10, 6, 2
IDLE = 4  # an expert that no token selects
NEEDS = [
    frozenset(),
    frozenset({"outputs_gram"}),
    frozenset({"activations_gram"}),
    frozenset({"outputs_gram", "activations_gram", "outputs", "activations"}),
]


def random(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def inputs(lora: tuple[str, ...], train_experts: bool) -> dict:
    torch.manual_seed(3)
    busy = [expert for expert in range(EXPERTS) if expert != IDLE]
    choices = [torch.randperm(len(busy))[:SELECTED] for _ in range(TOKENS)]
    made = {
        "hidden": random(TOKENS, HIDDEN),
        "index": torch.tensor(busy)[torch.stack(choices)],
        "weights": torch.rand(TOKENS, SELECTED, dtype=torch.float64).requires_grad_(),
        "gate_up": random(EXPERTS, 2 * WIDTH, HIDDEN, grad=train_experts),
        "down": random(EXPERTS, HIDDEN, WIDTH, grad=train_experts),
        "up_factors": (random(EXPERTS, RANK, HIDDEN), random(EXPERTS, 2 * WIDTH, RANK)),
        "down_factors": (random(EXPERTS, RANK, WIDTH), random(EXPERTS, HIDDEN, RANK)),
    }
    return {k: None if k.endswith("factors") and k not in lora else v for k, v in made.items()}


def leaves(given: dict) -> list[torch.Tensor]:
    flat = [t for v in given.values() if v is not None for t in (v if type(v) is tuple else (v,))]
    return [tensor for tensor in flat if tensor.requires_grad]


def by_loop(given: dict, activation: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that the experts can hand over, one choice of one token at a time."""

    def effective(weight, factors, scaling):
        if factors is None:
            return weight
        a, b = (one.expand(EXPERTS, *one.shape[-2:]) for one in factors)  # one may be all experts'
        return torch.stack([w + scaling * b @ a for w, a, b in zip(weight, a, b, strict=True)])

    gate_up = effective(given["gate_up"], given["up_factors"], 1.5)
    down = effective(given["down"], given["down_factors"], 0.7)
    activations, outputs = [], []
    for x, experts in zip(given["hidden"], given["index"].tolist(), strict=True):
        z = [activation(gate_up[e][:WIDTH] @ x) * (gate_up[e][WIDTH:] @ x) for e in experts]
        activations.append(torch.stack(z))
        outputs.append(torch.stack([down[e] @ v for e, v in zip(experts, z, strict=True)]))
    z, y = torch.stack(activations), torch.stack(outputs)
    return {
        "out": (given["weights"].unsqueeze(2) * y).sum(1),
        "activations": z,
        "outputs": y,
        "activations_gram": z @ z.transpose(1, 2),
        "outputs_gram": y @ y.transpose(1, 2),
    }


def by_groups(given: dict, activation: nn.Module, needs: frozenset[str]) -> dict:
    up, down = given["up_factors"], given["down_factors"]
    result = run_experts(
        given["hidden"],
        given["index"],
        given["weights"],
        Experts(
            given["gate_up"],
            given["down"],
            activation,
            LoraFactors(*up, scaling=1.5) if up else None,
            LoraFactors(*down, scaling=0.7) if down else None,
        ),
        needs,
    )
    found = {
        "out": result.out_TH,
        "activations": result.activations_TKD,
        "outputs": result.outputs_TKH,
        "activations_gram": result.activations_gram_TKK,
        "outputs_gram": result.outputs_gram_TKK,
    }
    assert {name for name, value in found.items() if value is not None} == {"out", *needs}
    return {name: value for name, value in found.items() if value is not None}


def compare(given: dict, activation: nn.Module, needs: frozenset[str]) -> None:
    found, wanted = by_groups(given, activation, needs), by_loop(given, activation)
    torch.manual_seed(4)
    mixed = {name: torch.randn_like(value) for name, value in found.items()}
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10, msg=name)
    mine, theirs = (
        torch.autograd.grad(sum((results[k] * mixed[k]).sum() for k in mixed), leaves(given))
        for results in (found, wanted)
    )
    assert all(gradient.abs().max() > 1e-3 for gradient in theirs)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=["whole", "an expert at a time", "a few"])
def pieces(request, monkeypatch):
    """How much is taken at a time: rows of experts, and tokens."""
    row = HIDDEN * 8
    rows = {"whole": 10**6, "an expert at a time": 1, "a few": 25}[request.param]
    tokens = {"whole": 10**6, "an expert at a time": 1, "a few": 5}[request.param]
    monkeypatch.setattr(grouped_products, "PART_BYTES", rows * row)
    monkeypatch.setattr(sums_by_token, "CACHED_BYTES", tokens * SELECTED * row)


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(sorted(needs)) or "none")
@pytest.mark.parametrize("lora", [(), ("up_factors",), ("up_factors", "down_factors")])
def test_values_and_gradients(pieces, needs, lora):
    compare(inputs(lora, train_experts=not lora), nn.SiLU(), needs)


def test_experts_and_adapters_trained_together_with_another_activation(pieces):
    given = inputs(("up_factors", "down_factors"), train_experts=True)
    compare(given, nn.GELU(), NEEDS[-1])


def sharing_outer(given: dict) -> dict:
    """One A of gate and up, and one B of down, for all experts."""
    (a_up, b_up), (a_down, b_down) = given["up_factors"], given["down_factors"]
    shared = [one[0].detach().clone().requires_grad_() for one in (a_up, b_down)]
    return given | {"up_factors": (shared[0], b_up), "down_factors": (a_down, shared[1])}


@pytest.mark.parametrize("needs", NEEDS, ids=lambda needs: "+".join(sorted(needs)) or "none")
@pytest.mark.parametrize("train_experts", [False, True])
def test_a_factor_of_all_experts(pieces, needs, train_experts):
    given = inputs(("up_factors", "down_factors"), train_experts)
    compare(sharing_outer(given), nn.SiLU(), needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("grouped_kernel", "in_chunks"), [(False, False), (True, False), (True, True)]
)
def test_a_factor_of_all_experts_under_dropout_and_in_16_bits(
    monkeypatch, dtype, grouped_kernel, in_chunks
):
    """As with a copy for each expert, whose gradients add up; the same masks are drawn."""
    monkeypatch.setattr(grouped_products, "PART_BYTES", 1)
    monkeypatch.setattr(grouped_products, "DEQUANTIZED_BYTES", 1)
    monkeypatch.setattr(experts_module, "dequantized_when_read", lambda weight: in_chunks)
    given = inputs(("up_factors", "down_factors"), train_experts=False)
    given = sharing_outer(aligned(given, hidden=24, width=16, rank=8))

    def run(dtype: torch.dtype, copies: bool) -> list[torch.Tensor]:
        def cast(one: torch.Tensor) -> torch.Tensor:
            return (one.expand(EXPERTS, *one.shape[-2:]) if copies else one).to(dtype).contiguous()

        up, down = (tuple(map(cast, given[name])) for name in ("up_factors", "down_factors"))
        layer = Experts(
            given["gate_up"].to(dtype), given["down"].to(dtype), nn.SiLU(),
            LoraFactors(*up, scaling=1.5, dropout=0.4), LoraFactors(*down, 0.7, dropout=0.3),
            grouped=grouped_kernel,
        )  # fmt: skip
        torch.manual_seed(8)
        out = run_experts(given["hidden"].to(dtype), given["index"], given["weights"], layer).out_TH
        mixed = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
        return [out, *torch.autograd.grad((out * mixed).sum(), leaves(given))]

    shared, copied = (run(dtype, copies) for copies in (False, True))
    if dtype == torch.float32:
        assert far(shared, copied) < 1e-5
    else:
        exact = run(torch.float32, True)
        errors = [[far([a], [b]) for a, b in zip(got, exact, strict=True)]
                  for got in (shared, copied)]  # fmt: skip
        assert max(errors[0]) < 1.2 * max(errors[1]) < 0.08


def test_an_expert_without_tokens_has_no_gradient(pieces):
    given = inputs(("up_factors", "down_factors"), train_experts=True)
    found = by_groups(given, nn.SiLU(), NEEDS[1])
    for gradient in torch.autograd.grad(sum(v.sum() for v in found.values()), leaves(given)[2:]):
        assert gradient[IDLE].abs().max() == 0 and gradient[IDLE - 1].abs().max() > 0


@pytest.mark.parametrize(
    ("grouped_kernel", "in_chunks"), [(False, False), (True, False), (True, True)]
)
def test_a_layer_that_runs_again_with_other_experts_has_their_gradients(
    monkeypatch, grouped_kernel, in_chunks
):
    """One token's last choice becomes another expert in the recomputation only."""
    given = inputs(("up_factors", "down_factors"), train_experts=True)
    given["index"] = given["index"].clone()
    if grouped_kernel:  # whose rows must be aligned
        monkeypatch.setattr(grouped_products, "DEQUANTIZED_BYTES", 1)
        monkeypatch.setattr(experts_module, "dequantized_when_read", lambda weight: in_chunks)
        given = aligned(given)
    other = given["index"].clone()
    other[TOKENS // 2, -1] = IDLE
    run = partial(gradients_of, given, grouped_kernel)
    assert far(run([other]), run([given["index"]])) > 1e-2
    first, again = run([given["index"], other]), run([other])
    assert far(first, again) < 1e-6


def aligned(given: dict, hidden: int = 12, width: int = 8, rank: int = 4) -> dict:
    """The same sizes in float32 with widths that are multiples of 16 bytes."""

    def wider(value, widths):
        if type(value) is tuple:
            return tuple(wider(part, size) for part, size in zip(value, widths, strict=True))
        old = value.detach().float()
        new = torch.randn(*old.shape[: -len(widths)], *widths) if widths else old
        return new.requires_grad_(value.requires_grad)

    widths = {
        "hidden": (hidden,),
        "weights": (),
        "gate_up": (2 * width, hidden),
        "down": (hidden, width),
        "up_factors": ((rank, hidden), (2 * width, rank)),
        "down_factors": ((rank, width), (hidden, rank)),
    }
    return {k: v if k == "index" else wider(v, widths[k]) for k, v in given.items()}


def gradients_of(given: dict, grouped_kernel: bool, visits: list) -> list[torch.Tensor]:
    """Gradients of a checkpointed call whose visits select the experts in ``visits`` in turn."""
    up, down, indices = given["up_factors"], given["down_factors"], iter(visits)

    def visit(hidden, weights):
        layer = Experts(
            given["gate_up"], given["down"], nn.SiLU(),
            LoraFactors(*up, scaling=1.5), LoraFactors(*down, scaling=0.7), grouped=grouped_kernel,
        )  # fmt: skip
        result = run_experts(hidden, next(indices), weights, layer, NEEDS[-1])
        return result.out_TH, result.activations_gram_TKK, result.outputs_gram_TKK

    arguments = given["hidden"], given["weights"]
    if len(visits) == 2:
        results = checkpoint(visit, *arguments, use_reentrant=False)
    else:
        results = visit(*arguments)
    torch.manual_seed(4)
    total = sum((torch.randn_like(value) * value).sum() for value in results)
    return torch.autograd.grad(total, leaves(given))


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative difference of two lists of gradients."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((mine - other).norm() / other.norm()) for mine, other in pairs)


def test_parts_cover_all_rows_once():
    index = torch.tensor([[0, 5], [5, 2], [0, 5]])
    groups = grouped_products.Groups.of(index, EXPERTS, grouped=False, in_chunks=False)
    parts = groups.parts(grouped_products.PART_BYTES // 2, matrix_bytes=1)
    assert [part.rows for part in parts] == [slice(0, 2), slice(2, 3), slice(3, 6)]
    assert [part.experts for part in parts] == [slice(0, 2), slice(2, 5), slice(5, 7)]
    assert [part.sizes for part in parts] == [[2, 0], [1, 0, 0], [3, 0]]
    torch.testing.assert_close(torch.cat([part.slots_P for part in parts]), groups.slots_S)
    whole = groups.parts(1, matrix_bytes=1)
    assert len(whole) == 1 and whole[0].sizes == [2, 0, 1, 0, 0, 3, 0]
