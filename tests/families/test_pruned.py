"""A checkpoint without some of its experts computes what the whole one does whose router gives
them minus infinity, before the score function and in the choice.
"""

import json
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.prune import prune_experts
from moe_finetune.errors import DataError
from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import class_of
from moe_finetune.models.expert_groups import ExpertGroups
from moe_finetune.moe.layers import moe_layers
from tests.families.cases import NAMES
from tests.support import tiny
from tests.support import tiny_families as tiny_table

EVERY = (*tiny.FAMILY_NAMES, *NAMES)
BY_TOKEN = {"deepseek_v4"}


def tiny_model(family):
    return tiny.model(family) if family in tiny.FAMILY_NAMES else tiny_table.model(family)


def some_experts(family, model, per_group=1):
    """Experts by layer, others in each, all but ``per_group`` of every group."""
    places = FAMILIES[family].places(model.config)
    groups = ExpertGroups.of(FAMILIES[family], model.config.get_text_config()).groups
    size = places.num_experts // groups
    generator = torch.Generator().manual_seed(3)
    return {
        layer: sorted(
            group * size + expert
            for group in range(groups)
            for expert in torch.randperm(size, generator=generator)[per_group:].tolist()
        )
        for layer in places.moe_layers
    }


class Masked(TorchFunctionMode):
    """Minus infinity for experts of a layer, in the router's logits and in every choice."""

    def __init__(self, weight, dropped, total, groups):
        super().__init__()
        self.weight, self.dropped, self.total, self.groups = weight, dropped, total, groups
        self.logits = self.choices = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("topk", "max") and isinstance(args[0], torch.Tensor):
            args = (self.masked(args[0]), *args[1:])
        result = function(*args, **kwargs)
        weights = [a for a in args if isinstance(a, torch.Tensor)]
        if name in ("linear", "matmul", "__matmul__", "mm") and any(
            a.data_ptr() == self.weight.data_ptr() for a in weights
        ):
            self.logits += 1
            result = result.clone()
            result[..., self.dropped] = float("-inf")
        return result

    def masked(self, values):
        shape = values.shape
        if shape[-1] == self.total:
            flat = values
        elif self.groups > 1 and shape[-2:] == (self.groups, self.total // self.groups):
            flat = values.flatten(-2)
        else:
            return values
        self.choices += 1
        flat = flat.clone()
        flat[..., self.dropped] = float("-inf")
        return flat.view(shape)


@contextmanager
def without(model, family, kept):
    """The model whose routers do not select other experts than ``kept``."""
    places = FAMILIES[family].places(model.config)
    groups = ExpertGroups.of(FAMILIES[family], model.config.get_text_config()).groups
    modes, handles = [], []
    for layer in moe_layers(model):
        dropped = sorted(set(range(places.num_experts)) - set(kept[layer.index]))
        weight = layer.router.get_parameter(places.router_weight)
        mode = Masked(weight, dropped, places.num_experts, groups)
        modes.append(mode)
        module = layer.block if places.block_path else layer.router
        enter = module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None)
        leave = module.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None))
        handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert all(mode.logits == 1 for mode in modes), [m.logits for m in modes]


def logits_of(model):
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def loaded(folder):
    return class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()


@pytest.mark.parametrize("family", [family for family in EVERY if family not in BY_TOKEN])
def test_pruned_equals_dropped_experts_at_minus_infinity(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "base")
    kept = some_experts(family, model)
    whole = logits_of(model)
    with without(model, family, kept):
        expected = logits_of(model)
    prune_experts(tmp_path / "base", kept, tmp_path / "pruned")
    opened = open_checkpoint(tmp_path / "pruned")
    count = len(kept[min(kept)])
    assert opened.experts == dict.fromkeys(kept, count)
    pruned, size = logits_of(loaded(tmp_path / "pruned")), float(expected.abs().max())
    torch.testing.assert_close(pruned, expected, atol=1e-5 * size, rtol=0)
    assert float((whole - expected).abs().max()) > 1e-2
    record = json.loads((tmp_path / "pruned" / "pruned.json").read_text())
    assert record["new_number"] == {
        str(layer): {str(old): new for new, old in enumerate(ids)} for layer, ids in kept.items()
    }


@pytest.mark.parametrize("family", sorted(BY_TOKEN & set(EVERY)))
def test_layers_that_look_experts_up_by_token_are_refused(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match="by token"):
        prune_experts(tmp_path / "base", some_experts(family, model), tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()
