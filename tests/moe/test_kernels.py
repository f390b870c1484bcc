"""The grouped path, which every GPU runs: equal to the loop, and never waiting for the device."""

import contextlib

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_finetune.errors import CaptureError
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.specialization import Specialization
from tests.support import tiny
from tests.support.objectives import objective_of
from tests.support.tiny_adapter import random_factors

BY_METHOD = ("qwen3_moe", "deepseek_v3")
RANK = 3  # not aligned: the grouped path fills it up


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    torch.manual_seed(5)
    save_file({"token_frequencies": torch.randn(tiny.VOCABULARY, 12).softmax(1)}, path)
    return str(path)


def methods(table):
    """Every preset with weights that are seen, and what no preset has."""
    for name, preset in PRESETS.items():
        options = preset.method()
        for term, chosen in options["terms"].items():
            chosen["weight"] = 0.02 if term == "z_loss" else 0.4
            if term == "supervised_routing":
                chosen["table"] = table
        yield name, options


def every_term(table):
    """The terms of all methods at once."""
    together = {}
    for _, options in methods(table):
        together |= options["terms"]
    return {"terms": together}


def adapted(family, lora=True, **config):
    torch.manual_seed(1)
    base = tiny.model(family, initializer_range=0.08, **config)
    if not lora:
        return base.train()
    model = add_lora(base, LoraSection(rank=RANK, alpha=7.0), "full").train()
    random_factors(model, 0.1)
    return model


def step(model, options, kernel, batch, dropout=0.1):
    """Values and gradients; strength, several backwards more, is left out."""
    model.zero_grad()
    options = {**options, "strength": {"first": False}}
    with Specialization(model, options, kernel=kernel, dropout=dropout) as method:
        torch.manual_seed(2)
        loss = model(**batch).loss
        loss.backward()
        method.step()
        return (
            {"loss": loss.item(), **method.read()},
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )


def assert_equal(grouped, loop):
    values, gradients = grouped
    wanted_values, wanted = loop
    assert values == pytest.approx(wanted_values, rel=1e-5, abs=1e-6)
    assert gradients.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        scale = value.abs().max().clamp_min(1e-6)
        assert (gradients[name] - value).abs().max() <= 2e-5 * scale, name


@pytest.fixture
def calls(monkeypatch):
    """How many grouped products ran."""
    from moe_finetune.moe.experts import grouped_products

    original, seen = grouped_products.grouped_mm, []
    monkeypatch.setattr(
        grouped_products, "grouped_mm", lambda *a, **k: (seen.append(1), original(*a, **k))[1]
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_grouped_equals_loop(family, table, calls, no_reach):
    """Every method on a softmax and on a sigmoid with biases; elsewhere every term at once."""
    batch = tiny.batch(rows=2, length=9)
    chosen = [("orthogonal_variance", every_term(table))]
    if family in BY_METHOD:
        chosen = list(methods(table))
    for lora in (True, False):
        model = adapted(family, lora)
        for name, options in chosen:
            if not lora and name not in ("orthogonal_variance", "erc"):
                continue
            loop = step(model, options, "loop", batch)
            assert not calls, name
            grouped = step(model, options, "grouped", batch)
            assert len(calls) >= 10, name
            calls.clear()
            assert_equal(grouped, loop)


@pytest.fixture
def no_reach(monkeypatch):
    """Leave out the checks before the first step: they read values, and cost more than the step."""
    monkeypatch.setattr("moe_finetune.training.reached_weights._of", lambda _: torch.zeros(3))


WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero",
    "aten::masked_select", "aten::bincount", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::histc", "aten::argwhere",
}  # fmt: skip
"""Operations that read a value on the host, or whose result has a size that depends on values."""


class NothingReadBack(TorchDispatchMode):
    """Refuse operations that wait for the device: values read, sizes that depend on values, and
    with ``copies`` those between host and device, which wait where memory is not pinned.
    """

    def __init__(self, copies: bool = False):
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        if any(t.device.type == "meta" for t in tensors):
            assert name not in WAITS, name
            sized = (kwargs or {}).get("output_size") is not None
            assert name != "aten::repeat_interleave" or sized, name
        output = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(output) if torch.is_tensor(t)] if self.copies else []
        devices = {t.device.type for t in (*tensors, *made) if t.dim() > 0}
        copied = not self.copies and name in ("aten::_to_copy", "aten::copy_")
        assert len(devices) < 2 or copied, (name, devices)
        return output


@pytest.fixture
def no_lists_to_device(monkeypatch):
    """``torch.tensor([...], device=...)`` copies from the host, out of sight of a dispatch mode."""
    make = torch.tensor

    def checked(data, *args, device=None, **kwargs):
        on_device = device is not None and torch.device(device).type == "meta"
        assert not on_device or not isinstance(data, list | tuple) or not data, data
        return make(data, *args, device=device, **kwargs)

    monkeypatch.setattr(torch, "tensor", checked)


@pytest.fixture
def no_autocast(monkeypatch):
    """``torch.autocast`` knows no meta device; transformers switches it off around its rope."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


def on_meta(family):
    """In bfloat16 with float32 adapters and routers: what ``grouped_mm`` takes there."""
    model = adapted(family)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model.to("meta")


def meta_step(model, options, batch, later=False):
    """Training steps that a GPU would queue from end to end without an answer.

    ``later``: a first step moved the method's tensors to the device; nothing is copied any more.
    """
    # Measuring strength, once, compares numbers on the host.
    options = {**options, "strength": {"first": False}}
    work = Specialization(model, options, kernel="grouped", dropout=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    work.install()
    try:
        for step in range(later + 1):
            with NothingReadBack(copies=later) if step >= later else contextlib.nullcontext():
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                work.step()
    finally:
        work.restore()
    assert work.statistics._forwards == later + 1
    return set(work.statistics._losses)


@pytest.mark.usefixtures("no_autocast", "no_reach", "no_lists_to_device")
def test_a_step_with_lora_on_some_experts_never_waits_for_the_device(tmp_path):
    model = tiny.model("olmoe")
    file = tmp_path / "selection.json"
    chosen = {layer: [1, 4, 5] for layer in range(model.config.num_hidden_layers)}
    ExpertSelection(chosen, num_experts=model.config.num_experts).write(file)
    lora = LoraSection(rank=RANK, alpha=7.0, experts=str(file))
    model = add_lora(model, lora, "full").train()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    options = {"terms": {"erc": {"weight": 1.0}}}
    assert meta_step(model.to("meta"), options, batch, later=True) == {"erc"}


@pytest.mark.usefixtures("no_autocast", "no_reach", "no_lists_to_device")
@pytest.mark.parametrize("bias_update", [None, 1e-3])
def test_a_later_step_copies_nothing_to_the_device(bias_update, table):
    options = every_term(table) | ({"bias_update": bias_update} if bias_update else {})
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    terms = meta_step(on_meta("deepseek_v3"), options, batch, later=True)
    assert terms == set(options["terms"])


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_a_step_never_waits_for_the_device(family, table, no_autocast, no_reach):
    """Every method on one family; on the others every term at once."""
    model = on_meta(family)
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    every = [("every term", every_term(table))]
    chosen = methods(table) if family == BY_METHOD[0] else every
    for name, options in chosen:
        terms = meta_step(model, options, {"input_ids": ids, "labels": ids})
        assert terms == set(options["terms"]), name


def test_the_step_would_notice(no_autocast, table):
    """Negative control: the loop reads group sizes, an observer may read values."""
    model = on_meta("olmoe")
    ids = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    with Recorder(model, kernel="loop"), pytest.raises((RuntimeError, NotImplementedError)):
        model(input_ids=ids)
    reading = [lambda record, _: record.mask_T.sum().item()]
    with (
        Recorder(model, observers=reading, kernel="grouped"),
        NothingReadBack(),
        pytest.raises(AssertionError, match="_local_scalar_dense"),
    ):
        model(input_ids=ids)


@pytest.mark.parametrize("experts", [12, 24])
def test_kernels_of_a_layer(experts, calls, no_reach):
    """Gate and up are one product, LoRA's thin products are grouped, however many experts."""
    model = adapted("olmoe", num_experts=experts)
    batch = tiny.batch(rows=1, length=7)
    layers = model.config.num_hidden_layers
    with Recorder(model, kernel="grouped"):
        loss = model(**batch).loss
        # x W, x A, (x A) B for gate and up together; z V, z A, (z A) B for down.
        assert len(calls) == 6 * layers
        calls.clear()
        loss.backward()
    # For each of the two: what the weight sends on, the product with B, both factors' gradients,
    # and what A sends on.
    assert len(calls) == 10 * layers


class RowCopies(TorchDispatchMode):
    """Counts the copies into tensors of some shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::copy_" and tuple(args[0].shape) == self.shape
        return func(*args, **(kwargs or {}))


def test_one_product_of_all_rows_is_not_copied():
    """A loss on outputs has a buffer of their gradient, which only parts of the rows reuse."""
    model, batch = adapted("olmoe"), tiny.batch(rows=1, length=7)
    config = model.config
    objective = objective_of({"orthogonality": {"weight": 1.0}}, model_facts(model))
    copies = RowCopies((7 * config.num_experts_per_tok, config.hidden_size))
    with Recorder(model, objective, kernel="grouped"):
        loss = model(**batch).loss
        with copies:
            loss.backward()
    assert copies.count == 0


def test_what_the_grouped_kernel_cannot_take_is_refused():
    for model in (tiny.model("olmoe", intermediate_size=22), tiny.model("olmoe").double()):
        with (
            pytest.raises(CaptureError, match="cannot use the grouped kernel"),
            Recorder(model, kernel="grouped"),
        ):
            pass
        with Recorder(model), torch.no_grad():
            model(**tiny.batch())
    with pytest.raises(CaptureError, match="kernel is 'fast', expected one of auto, grouped, loop"):
        Recorder(tiny.model("olmoe"), kernel="fast").install()
