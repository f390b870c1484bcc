"""``inspect --prove``: a family with a wrong fact fails. Right ones: ``test_every_family``."""

import json
import os
from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_finetune import plugins
from moe_finetune.cli import main
from moe_finetune.models import FAMILIES
from moe_finetune.models.family import Rows, expert_groups
from moe_finetune.training.self_test.family_check import check_family
from tests.support import tiny, tiny_families, unheard

GLM = FAMILIES["glm4_moe"]


def problem_of(name, wrong):
    """The first line that does not agree."""
    made = tiny if name in tiny.FAMILY_NAMES else tiny_families
    return check_family(made.config(name), wrong).problems[0]


@pytest.mark.parametrize(
    ("fact", "declared", "says"),
    [
        ("score", "softmax", "score, renormalize, scaling"),
        ("renormalize", lambda c: False, "score, renormalize, scaling"),
        ("scaling", lambda c: 1.0, "score, renormalize, scaling"),
        ("groups", lambda c: (1, 1), "scores, groups and bias select other experts"),
        ("router_returns", ("probabilities", "weights", "index"), "ran without their router"),
        ("attention_targets", ("attention.q",), "no linear layer of attention in attention.q"),
        ("top_k", lambda c: 2, "the class selects 3"),
    ],
)
def test_a_wrong_fact_fails(fact, declared, says):
    problem = problem_of("glm4_moe", replace(GLM, **{fact: declared}))
    assert problem.startswith("WRONG") and says in problem


@pytest.mark.parametrize(
    ("name", "fact", "declared", "says"),
    [
        ("qwen3_vl_moe", "renormalize", lambda config: False, "score, renormalize, scaling"),
        ("dots1", "score", "softmax", "score, renormalize, scaling"),
        ("qwen3_next", "rows", Rows(), "sequences of a row see each other"),
        ("gpt_oss", "top_k", lambda config: 2, "the class selects 3"),
    ],
)
def test_a_wrong_fact_of_another_kind_fails(name, fact, declared, says):
    assert says in problem_of(name, replace(FAMILIES[name], **{fact: declared}))


def test_a_bias_that_is_not_there_fails():
    wrong = replace(FAMILIES["qwen3_moe"], bias_export="tensor")
    assert "the block has no value per expert" in problem_of("qwen3_moe", wrong)


def test_a_large_checkpoint_is_proved_on_a_small_model():
    """Published sizes: 355 billion parameters, of which nothing is built."""
    config = CONFIG_MAPPING["glm4_moe"](n_group=8, topk_group=4, first_k_dense_replace=3)
    proof = check_family(config, GLM)
    assert proof.ok, proof.text()
    assert proof.sizes["hidden"] < 1000 and proof.sizes["layers"] <= 6
    wrong = check_family(config, replace(GLM, groups=lambda c: (1, 1)))
    assert "scores, groups and bias" in wrong.problems[0]
    assert expert_groups(config) == (8, 4)


def command(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_command(tiny_checkpoint, capsys):
    code, said = command(capsys, tiny_checkpoint("mixtral"), "--prove")
    assert code == 0 and "proved: the declared facts" in said.out
    assert said.out.count("\nok ") > 10
    code, said = command(capsys, tiny_checkpoint("mixtral"), "--prove", "--json")
    document = json.loads(said.out)
    assert code == 0 and document["ok"] and document["model_type"] == "mixtral"


def test_the_command_with_a_plugin(tmp_path, capsys, monkeypatch):
    unheard.save(tmp_path / "base")
    families, base = dict(FAMILIES._values), tmp_path / "base"
    monkeypatch.setattr(plugins, "_files", {})

    def write(text):
        FAMILIES._values.clear()
        FAMILIES._values.update(families)
        (tmp_path / "mine.py").write_text(text)
        return "--plugin", tmp_path / "mine.py"

    try:
        code, said = command(capsys, base, "--prove")
        assert code == 2 and "--prove" in said.err and "register_family(" in said.err
        text = said.err[said.err.index("from moe_finetune.models import") :]
        text = text.replace('score="softmax"', 'score="sigmoid"')
        code, said = command(capsys, base, "--prove", *write(text))
        assert code == 0, said
        wrong = text.replace("config.routed_scaling_factor", "1.0")
        code, said = command(capsys, base, "--prove", *write(wrong))
        assert code == 1 and "WRONG  score, renormalize, scaling" in said.out
    finally:
        write("")
        os.environ.pop(plugins.VARIABLE, None)
