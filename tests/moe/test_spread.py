"""Experts over ranks: what is refused, and restored.

What they compute is in ``tests/training/ranks/test_sharded.py``.
"""

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_finetune.errors import CaptureError, RecipeError, UnsupportedModelError
from moe_finetune.moe.large.spread_experts import check_spread, spread_experts, spread_modules
from moe_finetune.moe.recorder.hooks import Recorder
from tests.support import tiny


@pytest.fixture
def two_ranks():
    """The first of two ranks, of which the other does not exist."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_a_rank_holds_its_part_and_gets_transformers_way_back(two_ranks):
    model = tiny.model("olmoe")
    whole = model.model.layers[2].mlp.experts.down_proj.detach().clone()
    experts = spread_experts(model).model.layers[2].mlp.experts
    assert torch.equal(experts.down_proj.to_local(), whole[:6])
    theirs = experts.forward
    with Recorder(model):
        assert experts.forward is not theirs
    assert experts.forward is theirs


@pytest.mark.parametrize(
    ("ranks", "world", "remedy"),
    [
        (5, 2, "12 experts cannot be divided by 5 ranks; choose one of 2, 3, 4, 6, 12"),
        (5, 1, "12 experts cannot be divided by 5 ranks; choose one of 2, 3, 4, 6, 12"),
        (4, 6, "this run has 6; start it with accelerate launch --multi_gpu --num_processes 4"),
        (2, 1, "this run has 1; start it with accelerate launch --multi_gpu --num_processes 2"),
    ],
)
def test_a_refused_key_names_what_would_work(ranks, world, remedy):
    with torch.device("meta"):
        model = tiny.model("olmoe")
    with pytest.raises(RecipeError, match=rf"parallel.experts: .*{remedy}"):
        check_spread(model, 12, ranks, world)


def test_a_model_without_the_plan_is_refused(two_ranks):
    with pytest.raises(UnsupportedModelError, match="no plan ep_dispatch_experts"):
        spread_experts(tiny.model("deepseek_moe"))


def test_a_router_that_hides_experts_is_refused(two_ranks):
    model = spread_experts(tiny.model("olmoe"))
    router = model.model.layers[1].mlp.gate
    router.forward = router.forward  # what transformers' plan ep_router puts there
    with pytest.raises(CaptureError, match=r"layer 1: .*ep_dispatch_experts"):
        Recorder(model).install()


def test_stacks_that_only_say_they_are_spread_are_refused():
    model = tiny.model("olmoe")
    for layer in model.model.layers:  # as of transformers 5.17
        vars(layer.mlp.experts).pop("_is_expert_parallel", None)
    assert spread_modules(model) == []
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with (
        pytest.raises(CaptureError, match=r"OlmoeExperts: experts are spread .* not supported"),
        Recorder(model, observers=[lambda *_: None], observe="all"),
    ):
        model(**tiny.batch(rows=1, length=5))
