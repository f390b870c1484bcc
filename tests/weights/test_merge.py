"""Merged checkpoint = base + adapter, in transformers and stock PEFT."""

from __future__ import annotations

import pytest
import torch

from moe_finetune.weights import merge_adapter
from tests import tiny
from tests.weights import helpers


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    made = {}

    def get(family: str):
        if family not in made:
            made[family] = tiny.save(family, tmp_path_factory.mktemp(family) / family)
        return made[family]

    return get


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_merged_equals_base_and_adapter(bases, family, tmp_path):
    base = bases(family)
    adapter = helpers.adapter(base, tmp_path / "adapter")
    report = merge_adapter(base, adapter, tmp_path / family)
    wanted = helpers.logits(helpers.with_adapter(base, adapter))
    plain = helpers.logits(helpers.load(base))
    found = helpers.logits(helpers.load(tmp_path / family))
    assert (wanted - plain).abs().max() > 0.1
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert report.changed and report.copied
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
