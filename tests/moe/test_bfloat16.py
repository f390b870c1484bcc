"""Every kind of family and term in bfloat16, as a GPU trains them, beside the same in float32.

The tolerances are a few times what rounding to 8 bits alone does: transformers' own forward without
any loss of ours is up to 0.2 off in the gradients of the adapters (all of them as one vector,
relative to its norm), since a token near the edge selects another expert.
"""

import contextlib

import pytest
import torch
from safetensors.torch import save_file

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.families.cases import KINDS
from tests.support import tiny, tiny_adapter, tiny_families
from tests.support.places import places

LOSS, VALUE, GRADIENT = 1.5e-2, 0.08, 0.35
UNDER_AUTOCAST = {"inkling_mm_model"}
"""Stock classes that multiply by a float32 router, which a trained one is, without a cast."""

EVERY_TERM = {
    "load_balance": {"weight": 0.1},
    "z_loss": {"weight": 1e-3},
    "orthogonality": {"weight": 0.1},
    "variance": {"weight": 0.1},
    "specialization": {"weight": 0.1},
    "coupling": {"weight": 0.1},
    "erc": {"weight": 0.1, "noise": False},
    "router_orthogonality": {"weight": 0.1},
    "dpp": {"weight": 0.1},
    "ncl": {"weight": 0.1},
}


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Leave out the checks before the first step, which cost more than the step."""
    monkeypatch.setattr("moe_finetune.training.reached_weights._of", lambda _: torch.zeros(3))


def adapted(base, dtype, router="full"):
    """The model in ``dtype``, its weights rounded to bfloat16 in any case."""
    lora = LoraSection(rank=4, alpha=8.0)
    return tiny_adapter.adapted(base.bfloat16().to(dtype), router, lora).train()


def batch():
    ids = torch.randint(4, 260, (3, 21), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def step(model, options=None, kernel="loop", autocast=False):
    """Loss, the terms' values and the gradients of one step; without ``options``, a stock one."""
    model.zero_grad()
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    work = contextlib.nullcontext()
    if options is not None:
        options = {**options, "strength": {"first": False}}
        work = Specialization(model, options, kernel=kernel)
    torch.manual_seed(2)
    with work as method:
        with cast:
            loss = model(**batch()).loss
        loss.backward()
        if method is not None:
            method.step()
        read = {} if method is None else method.read()
    terms = {key: value for key, value in read.items() if key.startswith("losses/")}
    return (
        loss.item(),
        terms,
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def distance(found, wanted):
    """Of all gradients as one vector, relative to the norm of those expected."""
    assert found.keys() == wanted.keys() and wanted
    apart = sum((found[name] - gradient).square().sum() for name, gradient in wanted.items())
    return float((apart / sum(g.square().sum() for g in wanted.values())).sqrt())


def assert_near(found, wanted, what, gradient=GRADIENT):
    loss, terms, gradients = found
    wanted_loss, wanted_terms, wanted_gradients = wanted
    assert loss == pytest.approx(wanted_loss, rel=LOSS), what
    assert terms == pytest.approx(wanted_terms, rel=VALUE, abs=1e-3), what
    apart = distance(gradients, wanted_gradients)
    assert apart < gradient, (what, apart)


def copied(result):
    loss, terms, gradients = result
    return loss, terms, {name: gradient.clone() for name, gradient in gradients.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_family(family, tmp_path):
    """Stock and recorded, with every term at once.

    Autocast ends where the experts' forward begins: each kernel meets one setting of it.
    """
    home = tiny if family in tiny.FAMILY_NAMES else tiny_families
    exact = adapted(home.model(family), torch.float32)
    terms = dict(EVERY_TERM)
    if not places(family).gated:
        del terms["erc"]  # reads the gate projection
    if home is tiny:
        table_of_tokens = tmp_path / "table.safetensors"
        generator = torch.Generator().manual_seed(5)
        rows_VE = torch.rand(tiny.VOCABULARY, 12, generator=generator).softmax(1)
        save_file({"token_frequencies": rows_VE}, table_of_tokens)
        terms["supervised_routing"] = {"weight": 0.1, "table": str(table_of_tokens)}
    wanted = copied(step(exact, {"terms": terms}))
    assert set(wanted[1]) == {f"losses/{name}" for name in terms}
    plain = step(exact)
    model = adapted(home.model(family), torch.bfloat16)
    # What the class itself loses; a sparse attention that selects its keys may lose a lot.
    casts = (True,) if family in UNDER_AUTOCAST else (False, True)
    stock = {cast: distance(step(model, autocast=cast)[2], plain[2]) for cast in casts}
    for kernel, cast in zip(("loop", "grouped"), (casts[0], casts[-1]), strict=True):
        found = step(model, {"terms": terms}, kernel, cast)
        assert_near(found, wanted, (kernel, cast), max(GRADIENT, 2 * stock[cast]))


@pytest.mark.parametrize("router", ["full", "lora", "frozen"])
def test_ours_is_as_near_to_float32_as_stock(router):
    """The forward beside the stack rounds no more than PEFT's, which builds W + BA."""
    off = {}
    for way in ("stock", "ours"):
        options = {"preset": "none"} if way == "ours" else None
        wanted = copied(step(adapted(tiny.model("qwen3_moe"), torch.float32, router), options))
        model = adapted(tiny.model("qwen3_moe"), torch.bfloat16, router)
        found = step(model, options, "grouped")[2]
        errors = [(found[n] - g).norm() / g.norm() for n, g in wanted[2].items()]
        off[way] = torch.stack(errors).median()
    assert off["ours"] < 1.5 * off["stock"]


def test_a_router_that_trains_alone_takes_bfloat16():
    base = tiny_families.model("gpt_oss").bfloat16()  # whose router has a bias
    model = add_lora(base, LoraSection(rank=4, targets=[]), "full").train()
    found = step(model)[2]
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert len(found) == tiny_families.LAYERS
