"""A checkpointed layer that runs again takes the experts of its first visit.

On ranks: ``tests/training/ranks/test_sharded.py``.
"""

from contextlib import nullcontext

import pytest
import torch

from moe_finetune.errors import CaptureError
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models import newer_families
from moe_finetune.moe.choice.kept_choice import in_backward
from moe_finetune.moe.layers import backbone_of, moe_layers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.training.specialization import Specialization
from tests.families.cases import NEEDS_A_FILE
from tests.moe.cases import TERMS, gradients
from tests.support import tiny, tiny_adapter, tiny_families
from tests.support.near_ties import adapted, far, step

pytestmark = pytest.mark.usefixtures("p0_released")

LATER = [family.name for family in newer_families.FAMILIES if family.available]
EVERY_TERM = {
    name: {"weight": 1e-3 if name == "z_loss" else 0.1}
    for name in (
        *("load_balance", "z_loss", "orthogonality", "variance", "specialization", "coupling"),
        *("router_orthogonality", "dpp", "ncl"),
    )
}
METHODS = {
    "none": "none",
    "terms": {"terms": TERMS},
    "coupling": {"terms": {"coupling": {"weight": 2.0}}},
    "gshard": "gshard",
    "loss_free": "loss_free",
    "shares": {
        "terms": {
            "orthogonality": {"share": 0.4},
            "variance": {"share": 0.3},
            "load_balance": {"share": 0.2},
        }
    },
}


def packed_batch() -> dict:
    batch = tiny.batch(rows=2, length=24)
    del batch["attention_mask"]
    starts = torch.arange(24) % 9
    return {**batch, "position_ids": starts.expand(2, -1), "labels": batch["input_ids"]}


@pytest.mark.parametrize(
    ("family", "how", "method"),
    [
        *(("olmoe", "transformers", method) for method in METHODS),
        ("deepseek_v3", "transformers", "terms"),
        ("deepseek_v3", "transformers", "loss_free"),
        *(
            ("qwen3_moe", how, "terms")
            for how in ("wrapper", "nested", "selective", "on the host", "packed")
        ),
    ],
)
def test_gradients_are_those_without_checkpointing(family, how, method):
    batch = packed_batch() if how == "packed" else tiny.batch()
    backwards = 2 if method == "shares" else 1
    host = torch.autograd.graph.save_on_cpu() if how == "on the host" else nullcontext()
    wanted, logged = step(adapted(family, None), METHODS[method], batch, backwards=backwards)
    assert "routing/changed_in_recomputation" not in logged
    with host:
        kept, logged = step(adapted(family, how), METHODS[method], batch, backwards=backwards)
    assert logged["routing/changed_in_recomputation"] > 0.05
    assert far(kept, wanted) < 1e-4
    repeated, _ = step(adapted(family, how), METHODS[method], batch, False, backwards)
    assert far(repeated, wanted) > 1e-2


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text", "inkling_text", "phimoe"])
def test_a_choice_that_is_not_kept_is_one_consistent_choice(name, caplog):
    """One token's experts change in the recomputation; the first family does not keep it here."""

    def run(disturbed: str) -> tuple[dict, list]:
        model = tiny_families.model(name).train()
        layers = backbone_of(model).layers
        if disturbed == "again":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        last = moe_layers(model)[-1]

        def other_token(module, args):
            if disturbed == "always" or (disturbed == "again" and in_backward()):
                other = torch.zeros_like(args[0])
                other.view(-1, other.shape[-1])[4] = -2 * args[0].reshape(-1, other.shape[-1])[4]
                return (args[0] + other.detach(), *args[1:])

        last.router.register_forward_pre_hook(other_token)
        outputs, choices = [], []
        layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
        with Recorder(model) as recorder:
            recorder.change(
                keeps_choice=False, note_repeated=lambda changed, _: choices.append(changed)
            )
            torch.manual_seed(5)
            model(input_ids=tiny.batch(rows=2, length=7)["input_ids"], use_cache=False)
            output = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
            torch.manual_seed(6)
            (output * torch.randn_like(output)).sum().backward()
        return gradients(model), choices

    wanted, _ = run("always")
    again, choices = run("again")
    assert far(run("never")[0], wanted) > 1e-3
    assert [int(changed) for changed in choices] == [1] + [0] * (len(choices) - 1)
    assert far(again, wanted) < 1e-5
    assert ("cannot keep those of the forward" in caplog.text) == (name != "gpt_oss")


def test_a_decoder_layer_that_is_the_block_keeps_nothing_for_its_losses():
    """Gemma 4: its losses, too, are evaluated inside of what runs again."""

    def kept(method) -> int:
        model = tiny_families.model("gemma4_text").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        sizes = []
        with (
            Specialization(model, method),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda tensor: tensor
            ),
        ):
            output = model(**tiny.batch(rows=2, length=7), use_cache=False)
        assert output.loss.requires_grad
        return sum(sizes)

    assert kept({"terms": TERMS, "strength": {"first": False}}) == kept("none") > 0


@pytest.mark.parametrize(
    "preset", sorted({*PRESETS, "orthogonal_variance_released"} - NEEDS_A_FILE)
)
def test_every_preset_has_the_gradients_without_checkpointing(preset):
    method = {**PRESETS[preset].method(), "strength": {"first": False}}
    expected, actual = (
        step(adapted("olmoe", how), method, tiny.batch())[0] for how in (None, "transformers")
    )
    assert far(actual, expected) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", "gemma4_text", *LATER])
def test_every_term_at_once_has_the_gradients_without_checkpointing(name):
    """All families of later transformers versions that are installed, too."""

    def run(checkpointing: bool) -> dict:
        model = tiny_adapter.adapted(tiny_families.model(name)).train()
        model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = {**packed_batch(), "use_cache": False}
        return step(model, {"terms": EVERY_TERM, "strength": {"first": False}}, batch)[0]

    assert far(run(True), wanted := run(False)) < 1e-6
    model = tiny_adapter.adapted(tiny_families.model(name)).train()
    assert far(step(model, "none", {**packed_batch(), "use_cache": False})[0], wanted) > 1e-3


def test_a_layer_that_runs_twice_in_a_forward_is_refused():
    model = tiny.model("olmoe", use_cache=False).train()
    with Specialization(model, "orthogonal_variance"):
        model.model.layers.append(model.model.layers[1])
        model.config.num_hidden_layers = 4
        with pytest.raises(CaptureError, match="layer 1 of OlmoeDecoderLayer runs more than once"):
            model(**tiny.batch())
