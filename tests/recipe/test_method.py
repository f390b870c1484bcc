"""A method: a preset, its changes, and one share for all of its losses."""

import pytest

from moe_finetune.errors import RecipeError
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.method import WEIGHTED, resolve_method


@pytest.mark.parametrize("name", PRESETS)
def test_a_share_sets_every_loss_but_balance_beside_others_and_z(name):
    tables = {"supervised_routing": {"terms": {"supervised_routing": {"table": "t.safetensors"}}}}
    changes = tables.get(name, {})
    paper = resolve_method(name, **changes).terms
    aims = set(paper) - set(WEIGHTED) or {"load_balance"} & set(paper)
    if not aims:
        with pytest.raises(RecipeError, match=f"preset '{name}' has no loss"):
            resolve_method(name, share=0.3)
        return
    method = resolve_method(name, share=0.3, **changes)
    for term, options in method.terms.items():
        expected = {"weight": None, "target": None, "share": 0.3} if term in aims else {}
        assert options == paper[term].model_copy(update=expected)
    assert resolve_method(method) == method
    assert resolve_method(method.model_dump(mode="json")) == method


def test_a_term_that_has_its_own_strength_keeps_it():
    changes = {"variance": {"weight": 3e-3}, "orthogonality": {"layers": ["0-1"]}}
    terms = resolve_method("orthogonal_variance", share=0.2, terms=changes).terms
    assert (terms["variance"].weight, terms["variance"].share) == (3e-3, None)
    assert (terms["orthogonality"].share, terms["orthogonality"].layers) == (0.2, ["0-1"])
    removed = {"variance": {"weight": 0}}
    assert "variance" not in resolve_method("orthogonal_variance", share=0.2, terms=removed).terms


def test_a_preset_of_balance_takes_a_share():
    """It was refused, while docs/methods.md told to raise it."""
    assert resolve_method("aux_loss", share=0.2).terms["load_balance"].share == 0.2
    st_moe = resolve_method("st_moe", share=0.2).terms
    assert (st_moe["load_balance"].share, st_moe["z_loss"].share) == (0.2, None)
    assert resolve_method("erc", share=0.2).terms["load_balance"].share is None
