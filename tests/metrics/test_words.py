"""Logged values are called what they are."""

from moe_finetune.metrics.words import word


def test_the_routers_entropy_is_not_the_models():
    assert word("entropy").name == "Token entropy"
    assert word("eval_entropy").name == "Token entropy, validation"
    assert word("routing/entropy").name == "Routing entropy"
    assert word("eval_routing/entropy").name == "Routing entropy, validation"
    assert "router" in word("eval_routing/entropy").meaning
    assert word("eval_routing/max_violation").name == "MaxVio, validation"
