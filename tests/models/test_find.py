"""A model type that the package lacks: brought by an installed package, else refused."""

import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune import models
from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import family_of
from moe_finetune.models.family_lookup import warn_of_plugins
from moe_finetune.models.suggest_plugin import suggestion
from tests.support import unheard


@pytest.mark.parametrize("environment", [None, b"\xff", b"[]", b"{}", b'{"packages": ["torch"]}'])
def test_another_tool_s_folder_does_not_matter(environment, tmp_path):
    for folder in (tmp_path, tmp_path / "base"):
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_bytes(b"\xff")
        if environment is not None:
            (folder / "environment.json").write_bytes(environment)
    warn_of_plugins(tmp_path / "base")


def suggested(message, monkeypatch):
    """The family that the code in a message registers."""
    registered = []
    monkeypatch.setattr(models, "register_family", registered.append)
    exec(message[message.index("from moe_finetune.models import") :], {})
    (family,) = registered
    return family


def test_the_refusal_has_a_plugin_to_save(monkeypatch):
    config = unheard.config()
    with pytest.raises(UnsupportedModelError) as raised:
        family_of(json.loads(config.to_json_string(use_diff=False)))
    message = str(raised.value)
    assert "inspect CHECKPOINT --prove --plugin my_family.py" in message
    found, expected = suggested(message, monkeypatch), unheard.family()
    assert found.bias_export == expected.bias_export
    for fact in ("renormalize", "scaling", "groups", "top_k"):
        assert getattr(found, fact)(config) == getattr(expected, fact)(config), fact
    for fact in ("score", "renormalize", "scaling", "groups"):
        assert any(f"{fact}=" in line and "# correct" in line for line in message.splitlines())
    assert len(message[message.index("register_family(") :].splitlines()) <= 16
    assert "supported types" not in message


@pytest.mark.usefixtures("no_installed_plugins")
def test_a_type_that_transformers_lacks_has_none():
    with pytest.raises(UnsupportedModelError) as raised:
        family_of({"model_type": "qwen3_mo"})
    assert "did you mean 'qwen3_moe'" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert suggestion({"model_type": "llama"}) is None  # no experts
    with pytest.raises(UnsupportedModelError, match=r"'llama' is dense: .*`eval` compares"):
        family_of({"model_type": "llama"})  # not: did you mean 'jamba'?


@pytest.mark.parametrize("row", models.newer_families.FAMILIES, ids=lambda row: row.name)
def test_a_type_of_a_later_transformers_names_the_version(row):
    if row.available:
        assert models.find_family(row.model_type, row.part or None) is row
        return
    with pytest.raises(UnsupportedModelError, match=f"needs transformers {row.since} or newer"):
        family_of({"model_type": row.model_type})


def test_a_composite_is_refused_as_one():
    composite = CONFIG_MAPPING["qwen3_vl"]().to_dict()
    with pytest.raises(UnsupportedModelError, match=r"'qwen3_vl' is dense: [^`]*`moe-f"):
        family_of(composite)
