"""Recipes: layers, overrides, defaults and hashes; refusals are in training/runs/refusals.json."""

import time
from pathlib import Path

import pytest
import yaml

from moe_finetune.errors import RecipeError
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import Recipe, load_recipe, recipe_from_tree
from moe_finetune.recipe.section_base import hide_secrets
from moe_finetune.recipe.yaml_tree import Tree, load_tree

BASE = """\
model: {path: some/model}
lora: {rank: 8, alpha: 16}
data: {train: a.jsonl}
"""


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write


def refused(paths, overrides=()) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(paths, overrides)
    return str(caught.value).split("\n")


def test_later_files_and_overrides_win(write):
    write(
        "parts/model.yaml", "model: {path: low, dtype: float32}\ntrainer: {seed: 1, max_steps: 3}"
    )
    write("parts/more.yaml", "model: {path: middle}\ntrainer: {seed: 2}")
    first = write(
        "run.yaml",
        "extends: [parts/model.yaml, parts/more.yaml]\ndata: {train: [x.jsonl, y.jsonl]}",
    )
    second = write("second.yaml", "trainer: {seed: 3}")
    recipe = load_recipe([first, second], ["trainer.max_steps=5", "data.train=[x.jsonl,z.jsonl]"])
    assert (recipe.model.path, recipe.model.dtype) == ("middle", "float32")
    assert recipe.trainer == {"seed": 3, "max_steps": 5}
    assert recipe.data.train == ["x.jsonl", "z.jsonl"]
    assert recipe.seed == 3


def test_a_file_reached_twice_is_not_a_circle(write):
    write("base.yaml", BASE)
    write("left.yaml", "extends: base.yaml\ntrainer: {seed: 1}")
    write("right.yaml", "extends: base.yaml\nrouter: {train: lora}")
    recipe = load_recipe(write("top.yaml", "extends: [left.yaml, right.yaml]"))
    assert recipe.seed == 1 and recipe.router.train == "lora"


def test_circle_missing_parent_duplicate_key_and_bad_yaml(write):
    write("a.yaml", "extends: b.yaml")
    (line,) = refused(write("b.yaml", "extends: a.yaml"))
    assert "circle" in line and "a.yaml" in line and "b.yaml" in line
    (line,) = refused(write("c.yaml", "\nextends: nothere.yaml"))
    assert "c.yaml:2" in line and "nothere.yaml" in line
    (line,) = refused(write("d.yaml", BASE + "model: {path: other}"))
    assert "d.yaml:4" in line and "model is set twice" in line
    assert "not YAML" in refused(write("e.yaml", "model: [unclosed"))[0]
    assert "must contain `key: value`" in refused(write("f.yaml", "- just\n- a list"))[0]
    assert "there is no recipe file" in refused("nowhere.yaml")[0]
    assert "is a folder; give a recipe file" in refused([write("g/h.yaml", "").parent])[0]


def test_every_problem_is_one_line_with_its_place(write):
    file = write(
        "bad.yaml",
        "modle: {path: x}\nlora: {rnak: 4, rank: eight}\ndata:\n  train: 4\n  max_length: 1\n"
        "trainer:\n  learning_rat: 1.0\n  seed: soon\n",
    )
    text = "\n".join(refused(file))
    for place, message in {
        1: "modle: unknown key; did you mean 'model'?",
        2: "lora.rnak: unknown key; did you mean 'rank'?",
        4: "data.train: must be a valid string or a valid list, not 4",
        5: "data.max_length: must be greater than or equal to 2, not 1",
        7: "trainer.learning_rat: unknown key of TRL's SFTConfig; did you mean 'learning_rate'?",
        8: "trainer.seed: must be a valid integer, not 'soon'",
    }.items():
        assert f"{file}:{place}: {message}" in text
    assert "model.path: required, but missing" in text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_length=9", "data.max_length"),
        ("model.rank=4", "lora.rank"),
        ("model.learning_rate=4", "trainer.learning_rate"),
        ("lora.packing=true", "data.packing"),
    ],
)
def test_a_key_of_another_section_is_named_with_it(write, written, meant):
    key = written.partition("=")[0]
    (line,) = refused(write("r.yaml", BASE), [written])
    assert line.endswith(f"{key}: unknown key; did you mean '{meant}'?")


def test_overrides_that_are_none_are_refused(write):
    assert "write overrides as key" in refused(write("r.yaml", BASE), ["lora.rank"])[0]


def test_what_goes_together(write):
    file = write("r.yaml", BASE)
    assert load_recipe(file, ["lora=null"]).lora is None
    assert load_recipe(file, ["export.merge=false"]).export.verify is False
    spread = load_recipe(file, ["parallel.experts=2", "lora.targets=[]", "router.train=lora"])
    assert spread.parallel.experts == 2 and spread.lora.targets == []


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        (["method=none"], "frozen"),
        (["method=loss_free"], "frozen"),
        (["method.terms={dpp: {weight: 1}}"], "frozen"),
        (["method.terms={erc: {weight: 1, router_grad: false}}"], "frozen"),
        (["method=erc"], "full"),
        (["method=dpp"], "full"),  # it balances, too
        (["method=orthogonal_variance"], "full"),
        (["method=none", "lora=null"], "full"),
        (["method=none", "lora.targets=[]"], "full"),
        (["method=none", "router.train=lora"], "lora"),
        (["method=erc", "router.train=frozen"], "frozen"),
    ],
)
def test_routers_train_where_a_loss_trains_them(write, keys, trained):
    recipe = load_recipe(write("r.yaml", BASE), keys)
    assert recipe.router.train == trained
    assert load_recipe(write("resolved.yaml", recipe.to_yaml())).hash == recipe.hash


@pytest.mark.parametrize("written", ["off", "false", "'off'"])
def test_a_bare_off_is_the_word(write, written):
    recipe = load_recipe(write("r.yaml", BASE + f"router: {{replay: {written}}}"))
    assert recipe.router.replay == "off" and recipe.hash == load_recipe(write("b", BASE)).hash


def test_numbers_in_exponent_form_are_numbers(write):
    recipe = load_recipe(write("r.yaml", BASE + "trainer: {learning_rate: 1e-4}"))
    assert recipe.trainer["learning_rate"] == 1e-4


def test_a_secret_in_the_environment_is_not_written(write, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert "hf_secret_value" not in load_recipe(write("r.yaml", BASE)).to_yaml()


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "supervised_routing"])
def test_resolved_copy_is_equal_and_has_the_same_hash(write, preset):
    recipe = load_recipe(write("r.yaml", BASE), [f"method={preset}"])
    again = load_recipe(write("resolved.yaml", recipe.to_yaml()))
    assert again == recipe and again.hash == recipe.hash
    assert set(recipe.method.terms) == set(PRESETS[preset].terms)


def test_weight_zero_removes_a_term_and_stays_removed(write):
    overrides = ["method=orthogonal_variance", "method.terms.variance.weight=0"]
    recipe = load_recipe(write("r.yaml", BASE), overrides)
    assert set(recipe.method.terms) == {"load_balance", "orthogonality"}
    again = load_recipe(write("resolved.yaml", recipe.to_yaml()))
    assert set(again.method.terms) == {"load_balance", "orthogonality"}


def test_hash_sees_content_not_files(write):
    whole = load_recipe(write("r.yaml", BASE))
    write("part.yaml", "model: {path: some/model}")
    rest = write(
        "rest.yaml", "extends: part.yaml\nlora: {alpha: 16, rank: 8}\ndata: {train: a.jsonl}"
    )
    assert load_recipe(rest).hash == whole.hash
    assert load_recipe(rest, ["lora.alpha=17"]).hash != whole.hash


def test_method_from_name_mapping_and_overrides():
    plain = resolve_method("orthogonal_variance")
    changed = resolve_method(
        {"preset": "orthogonal_variance"},
        terms={"variance": {"weight": 0.5, "schedule": {"kind": "linear", "warmup_steps": 7}}},
        token_mask="labels",
    )
    assert plain.terms["variance"].weight == 16.384 and plain.token_mask == "attention"
    assert changed.terms["variance"].weight == 0.5 and changed.token_mask == "labels"
    assert changed.terms["variance"].schedule.factor(3, 100) == 4 / 7
    assert changed.terms["orthogonality"] == plain.terms["orthogonality"]
    assert resolve_method(None).terms == {} and resolve_method("none").terms == {}
    assert resolve_method(changed) == changed
    assert resolve_method("loss_free").bias_update == 1e-3
    assert resolve_method("loss_free", bias_update=None).bias_update is None
    with pytest.raises(RecipeError, match="token_maks: unknown key"):
        resolve_method("none", token_maks="labels")


def test_resolving_does_not_change_the_presets():
    before = PRESETS["orthogonal_variance"].method()
    resolve_method("orthogonal_variance", terms={"variance": {"weight": 9.0}})
    assert PRESETS["orthogonal_variance"].method() == before


def test_from_preset():
    recipe = Recipe.from_preset("erc", "my/model", "my.jsonl", trainer={"max_steps": 5})
    assert recipe.method.preset == "erc" and recipe.trainer == {"max_steps": 5}
    assert yaml.safe_load(recipe.to_yaml())["model"]["path"] == "my/model"


def test_parts_of_liger_that_leave_experts_alone_are_allowed(write):
    config = "trainer.liger_kernel_config={swiglu: false, rms_norm: true}"
    recipe = load_recipe(write("r.yaml", BASE), ["trainer.use_liger_kernel=true", config])
    assert recipe.trainer["liger_kernel_config"] == {"swiglu": False, "rms_norm": True}


def test_a_part_keeps_the_ratio_of_alpha_to_rank(write):
    parts = "lora.parts={experts: {rank: 2}, attention: {rank: 6, alpha: 5}}"
    recipe = load_recipe(write("r.yaml", BASE), [parts])
    again = load_recipe(write("again.yaml", recipe.to_yaml()))
    assert again.hash == recipe.hash
    found = {name: (part.rank, part.alpha) for name, part in again.lora.parts.items()}
    assert found == {"experts": (2, 4.0), "attention": (6, 5.0)}  # BASE: rank 8, alpha 16


def test_what_only_names_a_secret_is_none(write):
    allowed = ["evaluation.suite=paper0", "evaluation.vllm={hf_token: true}"]
    load_recipe(write("r.yaml", BASE), allowed)


def test_a_long_word_in_an_error_takes_no_time():
    """It took 3.5 s for 8,000 letters, and four times that for twice as many."""
    text = "x" * 200_000
    started = time.process_time()
    assert hide_secrets(text) == text
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("trainer.hub_token=abc, b=2", "trainer.hub_token=***, b=2"),
        ("'x.token=a' token=b mytoken=c", "'x.token=***' token=*** mytoken=c"),
        ("API_KEY=a;password=b", "API_KEY=***;password=***"),
        ("tokenizer=a max_tokens=3", "tokenizer=a max_tokens=3"),
    ],
)
def test_values_of_secret_keys_are_starred(text, hidden):
    assert hide_secrets(text) == hidden


def test_files_that_extend_each_other_in_a_fan_are_read_once(write):
    """Each level doubled the time: 22 files did not end in 40 s."""
    depth = 40
    for level in range(depth):
        write(f"r{level}.yaml", f"extends: [r{level + 1}.yaml, r{level + 1}.yaml]")
    write(f"r{depth}.yaml", BASE)
    started = time.process_time()
    load_tree([write("top.yaml", "extends: r0.yaml")])
    assert time.process_time() - started < 5


def test_a_recipe_is_told_what_it_needs():
    values = {"trainer": {"max_steps": 3}, "lora": {"rank": -1}}
    with pytest.raises(RecipeError) as caught:
        recipe_from_tree(Tree(values))
    assert str(caught.value).splitlines() == [
        "model.path: required, but missing",
        "data.train: required, but missing",
        "lora.rank: must be greater than or equal to 1, not -1",
    ]
