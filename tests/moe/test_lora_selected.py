import copy
import json

import pytest
import torch

from moe_finetune.checkpoint.adapters.files import read_adapter, read_metadata
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import DataError
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.moe.experts.lora_on_chosen import SelectedExpertsLora, selected_experts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.recipe.sections import LoraSection
from tests.checkpoint.helpers import load, with_adapter
from tests.support import tiny
from tests.support.tiny_adapter import random_factors

pytestmark = pytest.mark.usefixtures("warm")  # for rehearsals of runs

EXPERTS, RANK = 12, 4
CHOSEN = {
    "qwen3_moe": {0: [7], 2: [10, 1, 4, 5, 0]},
    "deepseek_v2": {2: [3, 11]},
    "deepseek_v3": {1: [8, 0, 6, 2], 2: [5, 9, 1]},
}


@pytest.fixture
def selection(tmp_path):
    def write(family: str) -> LoraSection:
        file = tmp_path / f"{family}.json"
        ExpertSelection(CHOSEN[family], num_experts=EXPERTS).write(file)
        return LoraSection(rank=RANK, alpha=12.0, experts=str(file))

    return write


def randomize(model) -> None:
    torch.manual_seed(5)
    random_factors(model, 0.1)


def layer_of(name: str) -> int:
    return int(name.partition(".layers.")[2].partition(".")[0])


def restricted(name: str, full: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """The chosen experts' part of PEFT's packed factors of a whole stack, by its definition."""
    if "lora_A" in name:
        rows = [e * RANK + r for e in chosen for r in range(RANK)]
        return full[rows]
    return full[:, [r * EXPERTS + e for r in range(RANK) for e in chosen]]


def twins(family: str, lora: LoraSection):
    """A selective model, and a full one with its factors and zeros for the other experts."""
    selective = add_lora(tiny.model(family), lora, "full")
    randomize(selective)
    full = add_lora(tiny.model(family), LoraSection(rank=RANK, alpha=12.0), "full")
    factors = dict(selective.named_parameters())
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            if "lora_" not in name:
                continue
            if ".experts." not in name:
                parameter.copy_(factors[name])
                continue
            parameter.zero_()
            chosen = CHOSEN[family].get(layer_of(name))
            if chosen is None:
                assert name not in factors
                continue
            count = len(chosen)
            assert factors[name].shape == restricted(name, parameter, chosen).shape
            if "lora_A" in name:
                parameter.view(EXPERTS, RANK, -1)[chosen] = factors[name].view(count, RANK, -1)
            else:
                packed = factors[name].view(-1, RANK, count)
                parameter.view(-1, RANK, EXPERTS)[:, :, chosen] = packed
    return selective, full


@pytest.mark.parametrize("recorded", [True, False], ids=["recorder", "peft"])
@pytest.mark.parametrize("family", CHOSEN)
def test_gradients_are_those_of_full_lora_at_the_chosen_experts(family, recorded, selection):
    selective, full = twins(family, selection(family))
    losses = []
    for model in (selective, full):
        model.train()
        if recorded:
            with Recorder(model):
                losses.append(model(**tiny.batch()).loss)
        else:
            losses.append(model(**tiny.batch()).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    wanted = dict(full.named_parameters())
    compared = 0
    for name, parameter in selective.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = wanted[name].grad
        if ".experts." in name:
            gradient = restricted(name, gradient, CHOSEN[family][layer_of(name)])
            compared += bool(gradient.abs().max() > 0)
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=atol)
    assert compared == 4 * len(CHOSEN[family])


def test_only_the_chosen_experts_have_parameters(selection):
    lora = selection("qwen3_moe")
    model = add_lora(tiny.model("qwen3_moe"), lora, "frozen")
    full = add_lora(tiny.model("qwen3_moe"), LoraSection(rank=RANK, alpha=12.0), "frozen")
    assert selected_experts(model) == {k: tuple(v) for k, v in CHOSEN["qwen3_moe"].items()}
    assert selected_experts(full) is None
    groups = lora_coverage(model).groups, lora_coverage(full).groups
    ours, whole = (group["routed experts"] for group in groups)
    assert ours.trained_parameters * 3 * EXPERTS == whole.trained_parameters * 6
    assert ours.reached_parameters * 3 * EXPERTS == ours.parameters * 6
    assert groups[0]["attention"] == groups[1]["attention"]
    wrappers = [m for m in model.modules() if isinstance(m, SelectedExpertsLora)]
    assert len(wrappers) == 2 * 2
    for wrapper in wrappers:  # as PEFT begins: no update, and factors that can learn
        assert not wrapper.lora_B["default"].weight.any()
        assert wrapper.lora_A["default"].weight.std() > 0.01


def test_bfloat16_and_meta(selection):
    lora = selection("qwen3_moe")
    model = add_lora(tiny.model("qwen3_moe", dtype=torch.bfloat16), lora, "full")
    kinds = {p.dtype for name, p in model.named_parameters() if "lora_" in name}
    assert kinds == {torch.float32}  # as PEFT keeps adapters
    with torch.device("meta"):
        empty = add_lora(tiny.model("qwen3_moe").to("meta"), lora, "full")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes


def test_experts_alone(selection):
    lora = selection("qwen3_moe").model_copy(update={"targets": ["experts"]})
    model = add_lora(tiny.model("qwen3_moe"), lora, "frozen")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8 and all(".experts." in name for name in trained)


@pytest.mark.parametrize("family", CHOSEN)
def test_trained_saved_merged(family, tmp_path, tiny_checkpoint, selection):
    from transformers import set_seed

    from moe_finetune.training.save_and_resume.save_trained import save_trained

    base, lora = tiny_checkpoint(family), selection(family)
    set_seed(3)
    model = add_lora(load(base), lora, "full").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with Recorder(model):
        for seed in range(3):
            model(**tiny.batch(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(
            {
                "model": {"path": str(base), "dtype": "float32"},
                "lora": lora.model_dump(),
                "data": {"train": "x.jsonl"},
            }
        )
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    adapter = save_trained(model, tiny.tokenizer(), recipe, tmp_path / "run")
    chosen = {k: tuple(v) for k, v in CHOSEN[family].items()}
    metadata = read_metadata(adapter)
    assert metadata.experts is None and metadata.extra["chosen_experts"] == {
        str(layer): list(ids) for layer, ids in chosen.items()
    }
    assert load_tokenizer(adapter).get_vocab() == tiny.tokenizer().get_vocab()
    card = (adapter / "README.md").read_text()
    assert "library_name: peft" in card and f"adapter for `{base.name}`" in card
    assert str(base.parent) not in card
    shapes = {
        key: info.shape for key, info in read_adapter(adapter).tensors.items() if ".experts." in key
    }
    # An ordinary adapter: zeros for the experts that were not chosen, in every layer.
    experts = open_checkpoint(base).experts
    assert len(shapes) == 4 * len(experts) > 4 * len(chosen) - 1
    for key, shape in shapes.items():
        assert shape["lora_B" in key] == RANK * experts[layer_of("." + key)]
    stock = with_adapter(base, adapter)
    merge_adapter(base, adapter, tmp_path / "merged")
    report = verify_merge(base, adapter, tmp_path / "merged")
    assert report.layers and report.error < 1e-4
    model.eval()
    with torch.no_grad():
        trained = model(input_ids=tiny.batch()["input_ids"]).logits
        merged = load(tmp_path / "merged")(input_ids=tiny.batch()["input_ids"]).logits
        unmerged = stock(input_ids=tiny.batch()["input_ids"]).logits
        plain = load(base)(input_ids=tiny.batch()["input_ids"]).logits
    assert torch.allclose(trained, unmerged, rtol=0, atol=1e-4 * float(trained.abs().max()))
    torch.testing.assert_close(merged, trained, rtol=1e-3, atol=1e-3)
    assert (trained - plain).abs().max() > 0.1


def test_disabled_and_merged_in_place(selection):
    model, _ = twins("qwen3_moe", selection("qwen3_moe"))
    plain = copy.deepcopy(tiny.model("qwen3_moe"))
    ids = tiny.batch()["input_ids"]
    model.eval()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        merged = model.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"experts": {}}, "no experts; leave"),
        ({"experts": {"7": [1]}}, r"layers \[7\] are not MoE layers"),
        ({"experts": {"1": [12]}}, "names expert 12"),
        ({"experts": {"1": [1]}, "model_type": "olmoe"}, "made for model type 'olmoe'"),
        ({"experts": {"1": [2, 2]}}, "listed twice"),
    ],
)
def test_a_selection_that_does_not_fit(tmp_path, document, said):
    file = tmp_path / "selection.json"
    file.write_text(json.dumps(document))
    lora = LoraSection(rank=RANK, alpha=12.0, experts=str(file))
    with pytest.raises(DataError, match=said):
        add_lora(tiny.model("qwen3_moe"), lora, "full")
    lora = lora.model_copy(update={"experts": str(tmp_path / "nowhere.json")})
    with pytest.raises(DataError, match="nowhere"):
        add_lora(tiny.model("qwen3_moe"), lora, "full")
