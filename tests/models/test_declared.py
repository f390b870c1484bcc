"""A model type that the package lacks: declared in a recipe or by a plugin, else refused."""

import json
from importlib.metadata import EntryPoint

import pytest
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune.errors import RecipeError, UnsupportedModelError
from moe_finetune.io.environment import describe_environment
from moe_finetune.models import FAMILIES, declared, family_of, find_family
from moe_finetune.models.declared import declare_family_of, family_from
from moe_finetune.models.suggestion import suggestion
from moe_finetune.recipe.family import DECLARED, FamilySection
from moe_finetune.recipe.schema import load_recipe, recipe_from_tree
from moe_finetune.recipe.tree import Tree
from tests import tiny_families, unheard


@pytest.fixture(autouse=True)
def _as_before():
    """Each test starts with nothing declared and no plugin."""
    kept = dict(DECLARED)
    DECLARED.clear()
    declared._plugins.cache_clear()
    yield
    DECLARED.clear()
    DECLARED.update(kept)
    declared._plugins.cache_clear()


def install(monkeypatch, *values):
    points = [EntryPoint(f"p{i}", value, declared.GROUP) for i, value in enumerate(values)]
    monkeypatch.setattr(
        declared, "entry_points", lambda group: points if group == declared.GROUP else []
    )


def recipe(**family):
    return of(unheard.DECLARED | family)


def of(family):
    values = {"model": {"path": "a/b", "family": family}, "data": {"train": "x.jsonl"}}
    return recipe_from_tree(Tree(values))


def test_a_recipe_declares_a_family():
    with pytest.raises(UnsupportedModelError, match="'unheard_moe' is not supported"):
        family_of(unheard.config())
    recipe()
    family, config = family_of(unheard.config()), unheard.config()
    wanted = unheard.family()
    assert family.disk == wanted.disk and family.attention_targets == wanted.attention_targets
    assert family.shared_targets == wanted.shared_targets
    for fact in ("num_experts", "renormalize", "scaling", "groups", "top_k", "moe_layers"):
        assert getattr(family, fact)(config) == getattr(wanted, fact)(config), fact
    assert family.bias_export == "tensor" and family.groups(config) == (2, 1)


def test_numbers_may_stand_for_keys():
    section = FamilySection(**(unheard.DECLARED | {"scaling": 2.5, "renormalize": False}))
    family = family_from(section)
    assert family.scaling(unheard.config()) == 2.5 and not family.renormalize(unheard.config())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shared_target": []}, r"model.family.shared_target: unknown key; did you mean 'shared_t"),
        ({"disk": {"rooter": "gate"}}, r"model.family.disk.rooter: unknown key; did you mean 'rou"),
        ({"score": "relu"}, "model.family.score: must be .*, not 'relu'"),
        ({"attention_targets": []}, "model.family.attention_targets"),
        ({"router_returns": ["index", "index", "logits"]}, "router_returns: .* each once"),
        ({"groups": [1, 2, 3]}, "model.family.groups"),
    ],
)
def test_a_wrong_declaration_names_its_key(wrong, said):
    with pytest.raises(RecipeError, match=said):
        recipe(**wrong)
    assert "unheard_moe" not in DECLARED


@pytest.mark.parametrize("fact", ["score", "renormalize", "scaling", "attention_targets"])
def test_what_cannot_be_seen_must_be_declared(fact):
    facts = {key: value for key, value in unheard.DECLARED.items() if key != fact}
    with pytest.raises(RecipeError, match=f"model.family.{fact}: required"):
        of(facts)


def test_a_key_that_the_config_lacks_is_named():
    recipe(scaling="routed_scaling_facto")
    family = family_of(unheard.config())
    with pytest.raises(UnsupportedModelError, match="did you mean 'routed_scaling_factor'"):
        family.scaling(unheard.config())


def test_a_known_type_is_not_declared_again():
    recipe(model_type="qwen3_moe")
    with pytest.raises(RecipeError, match="'qwen3_moe' is already supported as Qwen3-30B-A3B"):
        find_family("qwen3_moe")


def test_a_run_s_recipe_declares_for_what_lies_in_it(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    DECLARED.clear()
    declare_family_of(tmp_path / "merged")
    assert find_family("unheard_moe") is None  # any tool may have written it
    (tmp_path / "environment.json").write_text(json.dumps(describe_environment()))
    declare_family_of(tmp_path / "merged")
    assert find_family("unheard_moe") is not None
    assert load_recipe(tmp_path / "recipe.yaml").hash == recipe().hash


@pytest.mark.parametrize("environment", [None, b"\xff", b"[]", b"{}", b'{"packages": ["torch"]}'])
@pytest.mark.parametrize("content", [b"\n  family:\n\xff", b"a:\n  family:\n    score: 1\n"])
def test_another_tool_s_recipe_does_not_matter(content, environment, tmp_path):
    for folder in (tmp_path, tmp_path / "base"):
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_bytes(content)
        if environment is not None:
            (folder / "environment.json").write_bytes(environment)
    declare_family_of(tmp_path / "base")
    assert find_family("unheard_moe") is None


@pytest.mark.parametrize("value", ["tests.unheard:family", "tests.unheard:families"])
def test_a_plugin_brings_a_family(monkeypatch, value):
    install(monkeypatch, value)
    assert family_of(unheard.config()).title == "Unheard"
    assert family_of(tiny_families.config("glm4_moe")) is FAMILIES["glm4_moe"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["tests.unheard:broken"], r"plugin 'p0' .* cannot be loaded: RuntimeError: no such thing"),
        (["tests.unheard:DECLARED"], "must be a Family, several of them, or a callable"),
        (["tests.unheard:family", "tests.unheard:family"], "'unheard_moe' is already supported"),
        (["tests.models.test_declared:KNOWN"], "'qwen3_moe' is already supported"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(monkeypatch, values, said):
    install(monkeypatch, *values)
    with pytest.raises(UnsupportedModelError, match=said):
        family_of(unheard.config())


KNOWN = FAMILIES["qwen3_moe"]


def declaration_in(message):
    return yaml.safe_load(message[message.index("model:\n") :])["model"]["family"]


def test_the_refusal_has_a_declaration_to_paste():
    with pytest.raises(UnsupportedModelError) as raised:
        family_of(json.loads(unheard.config().to_json_string(use_diff=False)))
    message = str(raised.value)
    assert "inspect CHECKPOINT --recipe RECIPE --prove" in message
    shown = declaration_in(message)
    assert shown | {"score": "sigmoid"} == unheard.DECLARED
    for fact in ("score", "renormalize", "scaling", "groups"):
        assert any(f"{fact}:" in line and "# declare" in line for line in message.splitlines())
    assert len(message[message.index("model:\n") :].splitlines()) <= 12
    assert "supported types" not in message


def test_a_type_that_transformers_lacks_has_none():
    with pytest.raises(UnsupportedModelError) as raised:
        family_of({"model_type": "qwen3_mo"})
    assert "did you mean 'qwen3_moe'" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert suggestion({"model_type": "llama"}) is None  # no experts
    with pytest.raises(UnsupportedModelError, match=r"'llama' is not .*\ndocs/models.md lists"):
        family_of({"model_type": "llama"})  # not: did you mean 'jamba'?


def test_a_composite_is_refused_as_one():
    composite = CONFIG_MAPPING["qwen3_vl"]().to_dict()
    with pytest.raises(UnsupportedModelError, match="only some types can be trained"):
        family_of(composite)


@pytest.mark.parametrize("name", ["minimax_m2", "granitemoeshared", "afmoe", "hunyuan_v1_moe"])
def test_what_is_suggested_is_what_the_table_says(name):
    config, family = tiny_families.config(name), FAMILIES[name]
    message = suggestion(config.to_dict())
    assert message is not None
    found = family_from(FamilySection(**declaration_in(message)))
    for fact in ("block_path", "router_name", "router_weight", "experts_name"):
        assert getattr(found, fact) == getattr(family, fact), fact
    for fact in ("num_experts", "top_k", "expert_width"):
        assert getattr(found, fact)(config) == getattr(family, fact)(config), fact
    assert set(found.shared_targets) == set(family.shared_targets)
    parts = ("router", "gate_up", "down") if family.disk.fused else ("router", "gate", "up", "down")
    for part in (*parts, *(["router_bias"] if family.disk.router_bias else [])):
        assert found.disk.name(part, 2, 5) == family.disk.name(part, 2, 5), part
