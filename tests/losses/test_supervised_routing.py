import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from moe_finetune.errors import ObjectiveError
from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext, ModelFacts
from moe_finetune.losses.functional import supervised_routing_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record

TERM = TERMS["supervised_routing"]


def write(path, table_VE, key="token_frequencies"):
    save_file({key: table_VE.float().contiguous()}, path)
    return str(path)


def build(path, **options):
    return TERM(TERM.Options(weight=1.0, table=str(path), **options))


def test_worked_by_hand():
    # softmax = (3/4, 1/4); token 1 wants (1/2, 1/2), token 0 wants (0, 1).
    logits = torch.tensor([[math.log(3), 0.0]] * 2, dtype=torch.float64)
    table = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    loss = supervised_routing_loss(logits, torch.tensor([1, 0]), table)
    expected = (-(math.log(0.75) + math.log(0.25)) / 2 - math.log(0.25)) / 2
    assert loss.item() == pytest.approx(expected)


def test_term_reads_the_table(tmp_path):
    values, keep = make(), mask(17)
    term = build(write(tmp_path / "t.safetensors", values["token_frequencies_VE"]))
    term.check(ModelFacts(moe_layers=(2,), num_experts=7, top_k=3, vocab_size=13))
    got = term.loss(record(values, mask_T=keep), LayerContext())
    expected = reference.supervised_routing(
        values["logits_TE"],
        values["token_ids_T"],
        values["token_frequencies_VE"].float().double(),
        keep,
    )
    torch.testing.assert_close(got, expected)


def test_table_of_another_vocabulary_or_number_of_experts(tmp_path):
    term = build(write(tmp_path / "t.safetensors", make()["token_frequencies_VE"]))
    for experts, vocabulary in ((7, 12), (6, 13), (13, 7)):
        facts = ModelFacts(moe_layers=(2,), num_experts=experts, top_k=3, vocab_size=vocabulary)
        with pytest.raises(
            ObjectiveError,
            match=rf"t\.safetensors has 13 tokens and 7 experts, .* {vocabulary} and {experts}",
        ):
            term.check(facts)


def test_bad_tables(tmp_path):
    table = make()["token_frequencies_VE"]
    with pytest.raises(ObjectiveError, match=r"none\.safetensors does not exist"):
        build(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(
        ObjectiveError, match=r"cut\.safetensors cannot be read as a safetensors file"
    ):
        build(tmp_path / "cut.safetensors")
    with pytest.raises(ObjectiveError, match=r"cannot be read as a safetensors file"):
        build(tmp_path)
    with pytest.raises(
        ObjectiveError, match=r"contains \['counts'\], expected .*'token_frequencies'"
    ):
        build(write(tmp_path / "key.safetensors", table, "counts"))
    with pytest.raises(ObjectiveError, match=r"shape \(91,\), expected \(tokens, experts\)"):
        build(write(tmp_path / "flat.safetensors", table.flatten()))
    scaled = table.clone()
    scaled[5] *= 2
    with pytest.raises(ObjectiveError, match=r"row 5 is not a distribution \(sum 2"):
        build(write(tmp_path / "scaled.safetensors", scaled))
    negative = table.clone()
    negative[4, 0] -= 1
    negative[4, 1] += 1
    with pytest.raises(ObjectiveError, match=r"row 4 is not a distribution \(sum 1, least -"):
        build(write(tmp_path / "negative.safetensors", negative))
    missing = table.clone()
    missing[3, 2] = torch.nan
    with pytest.raises(ObjectiveError, match="row 3 is not a distribution"):
        build(write(tmp_path / "nan.safetensors", missing))


def test_table_is_required_unless_the_term_is_off():
    with pytest.raises(ValidationError, match="needs `table:`"):
        TERM.Options(weight=1.0)
    assert TERM.Options(weight=0.0).table is None


def test_a_model_called_with_embeddings(tmp_path):
    values = make()
    term = build(write(tmp_path / "t.safetensors", values["token_frequencies_VE"]))
    with pytest.raises(ObjectiveError, match="call it with input_ids"):
        term.loss(replace(record(values), token_ids_T=None), LayerContext())
