"""Recipes are refused on versions that only the callback runs on."""

import importlib.metadata as metadata

import pytest

from moe_finetune.errors import DependencyError
from moe_finetune.io import versions


def test_the_versions_here_carry_out_recipes():
    versions.check_versions("a recipe")


def test_older_versions_are_named_with_what_to_install(monkeypatch):
    installed = {"transformers": "5.16.1", "trl": "1.9.0", "peft": "0.21.2"}
    real = metadata.version

    def version(name):
        if name == "datasets":
            raise metadata.PackageNotFoundError(name)
        return installed.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert list(versions.unfit_for_recipes().values()) == ["5.16.1", "1.9.0", "none"]
    with pytest.raises(DependencyError) as refused:
        versions.check_versions("a recipe")
    message = str(refused.value)
    assert message.startswith("a recipe needs transformers>=5.19 and trl>=1.16 and")
    assert "found transformers 5.16.1 and trl 1.9.0 and datasets none" in message
    assert "'transformers>=5.19' 'trl>=1.16' 'datasets>=5.0'" in message


def test_newer_versions_than_tested_are_named_once(monkeypatch, caplog):
    real = metadata.version
    newer = {"transformers": "5.25.0.dev0", "peft": "0.21.9", "trl": "2.0.1"}
    monkeypatch.setattr(metadata, "version", lambda name: newer.get(name) or real(name))
    monkeypatch.setattr(versions, "TESTED", {"transformers": "5.24", "peft": "0.21", "trl": "1.16"})
    versions.warn_of_untested.cache_clear()
    versions.warn_of_untested()
    versions.warn_of_untested()
    assert versions.untested() == ["transformers 5.25.0.dev0 (5.24)", "trl 2.0.1 (1.16)"]
    (record,) = caplog.records
    assert "transformers 5.25.0.dev0 (5.24), trl 2.0.1 (1.16)" in record.getMessage()
    assert "inspect CHECKPOINT --prove" in record.getMessage()


def test_the_versions_here_are_tested():
    assert versions.untested() == []
