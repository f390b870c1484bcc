"""Every kind of family through train, evaluate, save and forward, with presets it can have."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.files import BIAS_FILE
from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.training.specialization import Specialization
from tests.families.cases import EACH_KIND, NAMES, NEEDS_A_FILE, STANDARD_WEIGHTS, adapted, batch
from tests.support import tiny_families as tiny

pytestmark = pytest.mark.usefixtures("p0_released")

# Every preset meets a family, and every family two presets and its own bias.
OTHERS = sorted({*PRESETS, "orthogonal_variance_released"} - NEEDS_A_FILE - {"loss_free"})
EACH = 2
BIASED = {"preset": "loss_free", "bias_update": 0.5}


def presets_of(family):
    at = EACH_KIND.index(family)
    names = {OTHERS[(EACH * at + i) % len(OTHERS)] for i in range(EACH)}
    facts = model_facts(tiny.model(family))
    carried = {}
    for name in names:
        options = PRESETS[name].method()
        if not (facts.has_gate and facts.shared_input_space):
            options["terms"].pop("erc", None)
        carried[name] = options
    if family in STANDARD_WEIGHTS:
        carried["loss_free"] = dict(BIASED)
    return {name: {**method, "strength": {"first": False}} for name, method in carried.items()}


def logits(model):
    with torch.no_grad():
        return model.eval()(**batch()).logits


@pytest.mark.parametrize("family", EACH_KIND)
def test_train_evaluate_save_forward(family, tmp_path):
    model = adapted(family, router="full")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    for name, method in presets_of(family).items():
        torch.manual_seed(4)
        before = logits(model)
        with Specialization(model, method, dropout=0.1, total_steps=2) as work:
            model.train()(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            work.step()
            during = logits(model)
            work.rest()
            after = logits(model)
            if work.balancer is not None:
                with Recorder(model, perturbation=work.balancer, observe="all", observers=[seen]):
                    wanted = logits(model)
                model.save_pretrained(tmp_path / name, save_embedding_layers=False)
                saved = load_file(tmp_path / name / BIAS_FILE)
                assert saved.keys() == work.balancer.state_dict().keys(), name
                assert torch.allclose(after, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
        scale = float(after.abs().max())
        assert torch.allclose(during, after, rtol=0, atol=2e-5 * scale), name
        assert float((after - before).abs().max()) > 1e-4 * scale, name
        left = logits(model)
        if work.balancer is None:
            assert torch.equal(after, left), name
        else:
            assert float((after - left).abs().max()) > 1e-4 * scale, "the bias selects others"


def seen(record, loss):
    """An observer, so that the recorder records in evaluation."""


def test_every_preset_is_met():
    met = {name for family in EACH_KIND for name in presets_of(family)}
    assert met == set(PRESETS) - NEEDS_A_FILE
    assert {"jamba", "granitemoehybrid"} <= set(STANDARD_WEIGHTS)


PUBLISHED = {"kimi_linear": "mlp", "minimax_m3_vl": "mlp"}
"""Families whose dense layers transformers writes under the name of MoE layers."""


def published(family, folder):
    """The family's tiny checkpoint with the names of its releases."""
    tiny.model(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, dense = load_file(file), PUBLISHED.get(family)
    if dense is not None:
        of_moe = {n.partition(".block_sparse_moe.")[0] for n in tensors if ".experts." in n}
        renamed = {
            n.replace("..", ".").replace("block_sparse_moe", dense): n
            for n in tensors
            if ".block_sparse_moe." in n and n.partition(".block_sparse_moe.")[0] not in of_moe
        }
        assert renamed
        tensors = {n: t for n, t in tensors.items() if n not in renamed.values()} | {
            new: tensors[old] for new, old in renamed.items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", NAMES)
def test_a_whole_model_is_saved_with_the_names_of_its_base(family, tmp_path):
    base = published(family, tmp_path / "base")
    model = load_model(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in base.items()}
    again = load_model(tmp_path / "saved").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value), name
