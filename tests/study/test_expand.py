"""A study recipe -> its runs: names, order, layers; refusals are in training/runs/refusals.json."""

import pytest

from moe_finetune.errors import RecipeError, StudyError
from moe_finetune.study import expand, load_study
from moe_finetune.study.expand import reference_of

BASE = {"model": {"path": "some/model"}, "data": {"train": "a.jsonl"}}


def study(write_study, overrides=(), **values):
    given = {"base": BASE, "seeds": [1], **values}
    return load_study(write_study(given), overrides)


def test_axes_are_crossed_in_order_and_seeds_vary_fastest(write_study):
    found = expand(
        study(
            write_study,
            axes={"method": ["none", "erc"], "lora.rank": [4, 8]},
            seeds=[7, 3],
        )
    )
    assert [run.name for run in found] == [
        "none-rank_4/seed_7", "none-rank_4/seed_3", "none-rank_8/seed_7", "none-rank_8/seed_3",
        "erc-rank_4/seed_7", "erc-rank_4/seed_3", "erc-rank_8/seed_7", "erc-rank_8/seed_3",
    ]  # fmt: skip
    last = found[-1]
    assert last.values == {"method": "erc", "lora.rank": "rank_8"}
    assert (last.recipe.method.preset, last.recipe.lora.rank, last.recipe.seed) == ("erc", 8, 3)
    assert len({run.recipe.hash for run in found}) == 8


def test_layers_win_in_order_base_axes_seed_command_line(write_study, tmp_path):
    (tmp_path / "low.yaml").write_text("trainer: {max_steps: 1, learning_rate: 0.1}\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "arm.yaml").write_text("extends: deeper.yaml\nlora: {rank: 2}\n")
    (tmp_path / "parts" / "deeper.yaml").write_text("trainer: {weight_decay: 0.5}\n")
    arms = {
        "plain": None,
        "file": "parts/arm.yaml",
        "both": {"extends": ["parts/arm.yaml"], "lora": {"rank": 6}, "trainer": {"max_steps": 5}},
    }
    recipe = study(
        write_study,
        ["trainer.learning_rate=0.7"],
        base={**BASE, "extends": "low.yaml", "trainer": {"max_steps": 3, "seed": 99}},
        axes={"arm": arms},
    )
    plain, file, both = (run.recipe for run in expand(recipe))
    assert [r.trainer["max_steps"] for r in (plain, file, both)] == [3, 3, 5]
    assert [r.trainer.get("weight_decay") for r in (plain, file, both)] == [None, 0.5, 0.5]
    assert [r.lora.rank for r in (plain, file, both)] == [32, 2, 6]
    assert {r.trainer["learning_rate"] for r in (plain, file, both)} == {0.7}
    assert {r.seed for r in (plain, file, both)} == {1}, "the seed is the study's"


def test_a_study_extends_another_and_keeps_some_arms(write_study, tmp_path):
    write_study(
        {
            "base": BASE,
            "axes": {"method": ["none", "erc", "dpp"], "lora.rank": [4, 8]},
            "seeds": [1],
            "baseline": "none",
        },
        "below.yaml",
    )
    above = load_study(
        write_study({"extends": "below.yaml", "only": {"method": ["dpp", "none"]}}), ["seeds=[5]"]
    )
    assert [run.name for run in expand(above)] == [
        "dpp-rank_4/seed_5", "dpp-rank_8/seed_5", "none-rank_4/seed_5", "none-rank_8/seed_5",
    ]  # fmt: skip


def test_values_that_are_no_text_are_named_by_their_key(write_study):
    found = expand(
        study(
            write_study,
            axes={"method.terms.z_loss.weight": [1e-3, 0.5], "data.train": ["x/one.jsonl", "two"]},
        )
    )
    assert [run.arm for run in found] == [
        "weight_0.001-one", "weight_0.001-two", "weight_0.5-one", "weight_0.5-two",
    ]  # fmt: skip
    assert found[0].recipe.method.terms["z_loss"].weight == 1e-3
    assert found[0].recipe.data.train == "x/one.jsonl"


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        ("erc", {"method": "erc"}),
        ({"method": "erc"}, {"method": "erc"}),
        ({"lora.rank": 4}, {"lora.rank": "rank_4"}),
        ({"lora.rank": "rank_4", "method": "none"}, {"lora.rank": "rank_4", "method": "none"}),
        (None, {}),
    ],
)
def test_baseline_by_value_or_by_axis(write_study, baseline, wanted):
    names = {"method": ["none", "erc"], "lora.rank": ["rank_4", "rank_8"]}
    assert reference_of(study(write_study, axes={}, baseline=baseline), "baseline", names) == wanted


def test_a_study_without_seeds_is_refused(write_study):
    with pytest.raises(StudyError, match="seeds: required, but missing"):
        load_study(write_study({"base": BASE}))


def test_duplicate_arms_are_refused_by_line(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("seeds: [1]\naxes:\n  arm:\n    a: {}\n    a: {}\n")
    with pytest.raises(RecipeError, match=r"s.yaml:5: axes.arm.a is set twice"):
        load_study(file)


@pytest.mark.parametrize("override", ["method=erc", "trainer.seed=3"])
def test_an_override_of_what_is_varied_is_refused(write_study, override):
    with pytest.raises(StudyError, match="the study varies"):
        expand(study(write_study, [override], axes={"method": ["none"]}))


def test_an_unknown_study_is_named_with_the_nearest():
    with pytest.raises(StudyError, match="no study 'paper0_tabel1'; did you mean 'paper0_table1'"):
        load_study("paper0_tabel1")


def test_a_recipe_in_place_of_a_study_is_named_once(write_study):
    """Each of its sections was an unknown key, with all keys of a study after it."""
    with pytest.raises(StudyError, match=r"r\.yaml: is a recipe, not a study.*extends: r\.yaml"):
        load_study(write_study({**BASE, "trainer": {"max_steps": 3}}, "r.yaml"))
