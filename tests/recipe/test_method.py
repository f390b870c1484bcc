"""A method: a preset, its changes, and one share for all of its losses."""

import pytest
import yaml

from moe_finetune.errors import RecipeError
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.method import WEIGHTED, resolve_method
from moe_finetune.recipe.schema import load_recipe
from moe_finetune.recipe.yaml_tree import recipes_folder


def test_a_preset_is_known_by_its_file():
    """Before the losses are imported, a name without a file is refused; one is of a plugin."""
    files = {file.stem for file in (recipes_folder() / "methods").glob("*.yaml")}
    assert files - {"orthogonal_variance_released"} == set(PRESETS)


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
        expected = {"weight": None, "share": 0.3} if term in aims else {}
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


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].recommended])
def test_recommended_shares_are_numbers_of_every_loss(name):
    method = resolve_method(name, share="recommended")
    assert set(method.terms) == set(PRESETS[name].terms)
    for term, options in PRESETS[name].recommended.items():
        assert method.terms[term].share == options["share"]
    # What is written down names the numbers, so a later table changes no run.
    written = method.model_dump(mode="json")
    assert "share" not in written and resolve_method(written) == method


def test_recommended_shares_give_way_to_the_recipes_own():
    own = {"variance": {"weight": 0.003}, "load_balance": {"share": 0.1}}
    terms = resolve_method("orthogonal_variance", share="recommended", terms=own).terms
    assert (terms["variance"].weight, terms["variance"].share) == (0.003, None)
    assert (terms["load_balance"].share, terms["load_balance"].scope) == (0.1, "sequence")
    assert terms["orthogonality"].share == 0.02


@pytest.mark.parametrize("name", sorted(n for n in PRESETS if not PRESETS[n].recommended))
def test_other_presets_have_no_recommended_shares(name):
    message = f"method.share: no shares are recommended for preset '{name}', only for aux_loss, "
    with pytest.raises(RecipeError, match=message):
        resolve_method(name, share="recommended")


@pytest.mark.parametrize("share", ["recommended", 0.2])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_later_preset_drops_a_share_that_it_cannot_take(tmp_path, capsys, name, share):
    """``train my.yaml method=none`` over a recipe of ``init``."""
    table = "terms: {supervised_routing: {table: t.st}}" if name == "supervised_routing" else ""
    (tmp_path / "my.yaml").write_text(
        f"model: {{path: m}}\nmethod: {{preset: erc, share: {share}}}\ndata: {{train: t.jsonl}}\n"
    )
    (tmp_path / "other.yaml").write_text(f"extends: my.yaml\nmethod: {{preset: {name}, {table}}}\n")
    override = f"method={{preset: {name}, {table}}}" if table else f"method={name}"
    recipes = [
        load_recipe(tmp_path / "other.yaml"),
        load_recipe(tmp_path / "my.yaml", [override]),
    ]
    usable = PRESETS[name].recommended if share == "recommended" else PRESETS[name].terms
    kept = share if usable else None
    expected = resolve_method(name, share=kept, **yaml.safe_load(f"{{{table}}}"))
    assert [recipe.method for recipe in recipes] == [expected, expected]
    said = "" if kept else f"method.share: {share} is dropped: it is not for preset '{name}'\n"
    assert capsys.readouterr().err == 2 * said
    if not kept:  # of the same file it is a mistake
        with pytest.raises(RecipeError, match=r"method\.share"):
            load_recipe(tmp_path / "my.yaml", [override, f"method.share={share}"])


@pytest.mark.parametrize("share", [0.1, "recommended"])
def test_a_misspelt_preset_is_refused_by_the_nearest_name(share):
    with pytest.raises(RecipeError, match="did you mean 'orthogonal_variance'"):
        resolve_method("orthogonal", share=share)
