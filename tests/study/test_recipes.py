"""Every study that comes with the package expands, and every run's recipe is valid."""

import functools
import json
from pathlib import Path

import pytest

from moe_finetune.evaluation.suites import load_suite, select
from moe_finetune.lora.coverage import lora_coverage
from moe_finetune.losses.presets import PAPERS, PRESETS
from moe_finetune.models import opened_as
from moe_finetune.models.class_structure import meta_model
from moe_finetune.models.from_scratch import fresh_config
from moe_finetune.study import expand, load_study
from tests.published import fixture

pytestmark = pytest.mark.usefixtures("p0_released")

STUDIES = Path(__file__).resolve().parents[2] / "recipes" / "studies"
FILES = sorted(STUDIES.glob("paper*.yaml"))
SMALL = sorted({*STUDIES.glob("*.yaml")} - {*FILES})
PAPER0_BENCHMARKS = {
    "glue", "bbh", "mmlu", "mmlu_pro", "gpqa", "gsm8k", "math500", "numinamath",
    "humaneval", "mbpp",
}  # fmt: skip


@functools.cache
def runs_of(name):
    return expand(load_study(STUDIES / f"{name}.yaml"))


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.stem)
def test_studies_of_the_demos_checkpoint_expand_to_runs_that_all_differ(file):
    study, runs = load_study(file), runs_of(file.stem)
    assert len({run.recipe.hash for run in runs}) == len(runs)
    assert study.title and study.launch.kind == "inline"
    scored = runs[0].recipe.evaluation is not None
    assert runs[0].recipe.export.merge == scored and scored == ("merged" in study.discard)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_expands_to_valid_runs_that_all_differ(file):
    study, runs = load_study(file), runs_of(file.stem)
    assert len({run.recipe.hash for run in runs}) == len(runs)
    assert study.title and "arXiv" in study.source
    assert file.read_text().startswith(tuple(f"# {paper.short}" for paper in PAPERS.values()))
    for run in runs:
        assert run.recipe.evaluation is not None
        suite = load_suite(run.recipe.evaluation.suite)
        if run.recipe.evaluation.only is not None:
            select(suite, run.recipe.evaluation.only)
        assert (run.recipe.lora is None) >= (run.recipe.model.init == "random")
    if study.launch.config is not None:
        assert (STUDIES / study.launch.config).is_file()
        assert study.launch.kind == "accelerate"


def test_paper0_table1_by_hand():
    """3 models x 6 methods x 5 groups x 3 seeds; each has the 10 benchmarks that lm-eval has."""
    runs = runs_of("paper0_table1")
    assert len(runs) == 3 * 6 * 5 * 3 == 270
    found: dict = {}
    for run in runs:
        row = (run.values["model"], run.values["method"], run.seed)
        found.setdefault(row, []).extend(run.recipe.evaluation.only)
        recipe = run.recipe
        assert recipe.method.preset == run.values["method"]
        assert (recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == (32, 128, 0.1)
        assert recipe.router.train == "lora" and recipe.trainer["num_train_epochs"] == 3
        assert recipe.method.export_bias == (
            "drop" if run.values["model"] == "deepseek_moe_16b" else "write"
        )
        assert recipe.data.validation is not None
    assert len(found) == 54
    for benchmarks in found.values():
        assert len(benchmarks) == 10 and set(benchmarks) == PAPER0_BENCHMARKS


def test_paper0_ablation_by_hand():
    """8 combinations x 3 models x 5 groups x 3 seeds, each with the terms of its name."""
    runs = runs_of("paper0_ablation")
    assert len(runs) == 8 * 3 * 5 * 3 == 360
    letters = {"aux": "load_balance", "o": "orthogonality", "v": "variance"}
    names = {run.values["method"] for run in runs}
    assert len(names) == 8
    full = PRESETS["orthogonal_variance"].terms
    for run in runs:
        name = run.values["method"]
        wanted = set() if name == "none" else {letters[part] for part in name.split("_")}
        terms = run.recipe.method.terms
        assert set(terms) == wanted
        assert all(terms[term].weight == full[term]["weight"] for term in wanted)


def test_paper1_weights_and_experts_have_the_papers_cells():
    """Tables 11 and 12 in one grid; Table 5's 16 experts with 2 active among Figure 3's."""
    weights = {
        (
            run.recipe.method.terms["specialization"].weight,
            run.recipe.method.terms["coupling"].weight,
        )
        for run in runs_of("paper1_weights")
    }
    assert weights >= {(2e-3, cp) for cp in (2e-4, 5e-4, 1e-3, 2e-3)}
    assert weights >= {(sp, 1e-3) for sp in (1e-3, 2e-3, 3e-3, 5e-3)}
    sizes = {
        (config["n_routed_experts"], config["num_experts_per_tok"])
        for config in (run.recipe.model.config for run in runs_of("paper1_experts"))
    }
    assert (16, 2) in sizes and len(sizes) == 16


def test_paper2_alpha_256_searches_at_256_experts():
    alphas = {}
    for run in runs_of("paper2_alpha_256"):
        assert run.recipe.model.config["num_experts"] == 256
        erc = run.recipe.method.terms.get("erc")
        alphas[run.values["method"]] = erc and erc.alpha
    assert alphas == {
        "balance": None, "alpha_0.3": 0.3, "alpha_0.4": 0.4, "alpha_0.5": 0.5, "alpha_0.7": 0.7,
        "alpha_1": 1.0,
    }  # fmt: skip


def test_paper1_pretrain_by_hand():
    """2 architectures x 3 sizes x 9 methods x 3 seeds."""
    runs = runs_of("paper1_pretrain")
    assert len(runs) == 2 * 3 * 9 * 3 == 162
    by_name: dict = {"vanilla": {}, "shared": {}}
    for run in runs:
        method = run.recipe.method
        terms = set(method.terms)
        assert by_name[run.values["architecture"]].setdefault(run.values["method"], terms) == terms
        assert method.bias_update == (1e-3 if run.values["architecture"] == "shared" else None)
    lb, z, sp, cp = "load_balance", "z_loss", "specialization", "coupling"
    wanted = {
        "lb": {lb}, "lb_z": {lb, z}, "lb_o_v": {lb, "orthogonality", "variance"},
        "lb_sp": {lb, sp}, "lb_cp": {lb, cp}, "lb_sp_cp": {lb, sp, cp},
        "lb_z_sp": {lb, z, sp}, "lb_z_cp": {lb, z, cp}, "lb_z_sp_cp": {lb, z, sp, cp},
    }  # fmt: skip
    assert by_name["vanilla"] == wanted
    # A bias on the selection balances the arm with a shared expert, in the loss's place.
    assert by_name["shared"] == {name: terms - {lb} for name, terms in wanted.items()}


@pytest.mark.parametrize(
    ("study", "config", "arm", "billions", "active"),
    [
        ("paper1_pretrain", "deepseek_moe_16b", "vanilla-small-lb", 0.4, 0.08),
        ("paper1_pretrain", "deepseek_moe_16b", "vanilla-medium-lb", 1.1, 0.10),
        ("paper1_pretrain", "deepseek_moe_16b", "vanilla-large-lb", 7.0, 0.50),
        ("paper1_pretrain", "glm_4_5_air", "shared-large-lb", 7.0, 0.60),
        ("paper2_pretrain", "olmoe_1b_7b", "e64-erc", 3.0, None),
        ("paper2_pretrain", "olmoe_1b_7b", "e256-erc", 15.0, None),
    ],
)
def test_pretrained_sizes_are_the_papers(study, config, arm, billions, active, tmp_path):
    """On the meta device, from the config of the checkpoint that the recipe names."""
    (tmp_path / "config.json").write_text(json.dumps(fixture.read(config).config))
    runs = expand(load_study(STUDIES / f"{study}.yaml", [f"model.path={tmp_path}"]))
    recipe = next(run.recipe for run in runs if run.arm == arm)
    model_config, family = fresh_config(tmp_path, recipe.model.config)
    coverage = lora_coverage(opened_as(family, meta_model(model_config)))
    total, text = coverage.total.parameters, model_config.get_text_config()
    assert total / 1e9 == pytest.approx(billions, rel=0.06)
    idle = 1 - family.top_k(model_config) / family.places(model_config).num_experts
    used = total - idle * coverage.groups["routed experts"].parameters
    if not getattr(model_config, "tie_word_embeddings", False):
        used -= text.vocab_size * text.hidden_size  # the embedding multiplies nothing
    assert active is None or used / 1e9 == pytest.approx(active, rel=0.08)
