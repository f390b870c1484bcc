"""Options that transformers ignores and vLLM does not are refused, never run differently."""

import pytest

from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models import FAMILIES, family_of
from tests.support import tiny


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_moe", "scoring_func", "sigmoid"),
    ],
)
def test_others_are_refused_by_name(family, key, value):
    config = tiny.config(family)
    setattr(config, key, value)
    with pytest.raises(UnsupportedModelError, match=f"{key} '{value}' is not supported; supported"):
        family_of(config)


def test_dense_layers_that_are_no_number_are_refused():
    config = tiny.config("deepseek_v3")
    config.first_k_dense_replace = None
    with pytest.raises(CheckpointError, match=r"config.json of this deepseek_v3 .*NoneType"):
        FAMILIES["deepseek_v3"].places(config)
