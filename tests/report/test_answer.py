"""The page's opening: what the losses changed in the experts, and what that did to the scores."""

import html
import json
import math
import re

import pytest
import yaml

from moe_finetune.errors import TraceError
from moe_finetune.losses import TERMS
from moe_finetune.losses.presets import PRESETS
from moe_finetune.metrics.words import Word
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.yaml_tree import merge_mappings
from moe_finetune.report.context import Report
from moe_finetune.report.read_runs import read_runs
from moe_finetune.report.sections.answer import ANSWER
from moe_finetune.report.sections.curves import CURVES
from moe_finetune.report.sections.experts import LEADING, Change
from moe_finetune.report.sections.goal import _advice
from moe_finetune.report.sections.strength import STRENGTH
from moe_finetune.training.measures.routing_samples import MEASURED
from tests.report.folders import write_run

METRICS = {"expert_overlap": 0.4, "score_variance": 0.02, "entropy": 2.2, "max_violation": 0.5}
STRENGTHS = {
    "strength/variance/weight": 13.0,
    "strength/variance/share_router": 0.9934,
    "strength/variance/share_experts": 0.16,
    "strength/variance/cosine_router": 0.12,
    "strength/variance/cosine_experts": 0.03,
    "strength/variance/weight_for_10_percent": 1.3,
}


def run_of(folder, seed, metrics=METRICS, **logged):
    """A run whose routing has these metrics after fine-tuning."""
    write_run(folder, seed)
    change(folder / "routing" / "after.json", metrics={k: {"mean": v} for k, v in metrics.items()})
    if logged:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "eval", "step": 300, **logged}) + "\n")
    return folder


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def text(*folders, section=ANSWER):
    markup = section.render(Report(read_runs(folders), "title"))
    return markup and html.unescape(re.sub(r"<wbr>", "", markup))


def test_the_largest_changes_of_the_experts_come_first(tmp_path):
    ours = {"expert_overlap": 0.25, "score_variance": 0.037, "entropy": 2.21, "max_violation": 0.6}
    one = run_of(tmp_path / "aux_loss", 1, eval_loss=2.0)
    two = run_of(tmp_path / "ours", 2, ours, **STRENGTHS, eval_loss=2.01)
    shown = text(one, two)
    opening = "<strong>ours</strong> against aux_loss</p><dl><div><dt>Validation loss</dt>"
    assert f"{opening}<dd>2.01 against 2.00 (+0.5" in shown
    experts = "<dt>Experts</dt><dd>score variance +85\u00a0% (0.0200 → 0.0370), expert overlap −38"
    assert experts in shown
    order = [shown.index(word) for word in ("score variance", "expert overlap −38", "MaxVio +20")]
    assert order == sorted(order)
    assert 'verdict better">+85' in shown and 'verdict better">−37' in shown.replace("−38", "−37")
    assert 'verdict worse">+20' in shown
    folded = shown[shown.index("changed by less than 2 %") :]
    assert "Routing entropy" in folded and "Routing entropy" not in shown[: -len(folded)]
    strength = text(one, two, section=STRENGTH)
    assert "<td>99\u00a0%</td>" in strength and "<td>13.0</td>" in strength
    assert text(one, section=STRENGTH) is None


def test_a_summary_answers_five_questions_in_one_order(tmp_path):
    """Did it learn, is it better than the base, what changed in the experts, is load even, cost."""
    run = run_of(tmp_path / "ours", 2)
    before = METRICS | {"expert_overlap": 0.5, "max_violation": 0.8}
    change(run / "routing" / "before.json", metrics={k: {"mean": v} for k, v in before.items()})
    change(run / "summary.json", peak_memory=3 * 2**29)
    shown = text(run)
    labels = re.findall(r"<dt>([^<]*)</dt>", shown.partition("</dl>")[0])
    of_methods = {"Warning", "Method"}
    labels = [label for label in labels if label not in of_methods]
    assert labels == ["Validation loss", "Scores", "Experts", "Load", "Cost"]
    assert "<dd>MaxVio −38\u00a0% (0.800 → 0.500)</dd>" in shown
    assert "300 steps, 1,228,800 tokens, 2:11 of training, at most 1.5 GiB" in shown


def test_memory_has_the_unit_of_the_plan(tmp_path):
    """A plan of 0.03 GiB ended with "at most 0.8 GiB", most of which were the libraries."""
    run = run_of(tmp_path / "ours", 2)
    change(run / "summary.json", peak_memory=3 * 2**29, run_memory=2**28)
    assert "at most 0.25 GiB without libraries, 1.5 GiB with them" in text(run)


@pytest.mark.parametrize(
    ("terms", "remedy"), [({}, "method=aux_loss evens the load"), ({"erc": {}}, "method=none")]
)
def test_a_red_figure_is_explained(tmp_path, terms, remedy):
    run = run_of(tmp_path / "ours", 2, METRICS | {"expert_overlap": 0.5, "max_violation": 0.6})
    before = {k: {"mean": v} for k, v in METRICS.items()}
    change(run / "routing" / "before.json", metrics=before)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["method"] = {"terms": terms}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shown = text(run)
    assert "<dt>Red figures</dt><dd>expert overlap and MaxVio moved away" in shown
    assert remedy in shown and "red: away from them" in shown
    change(run / "routing" / "after.json", metrics=before)
    assert "Red figures" not in text(run)


def test_a_single_run_is_compared_with_the_checkpoint_before(tmp_path):
    run = run_of(tmp_path / "ours", 2)
    change(run / "routing" / "before.json", metrics={"expert_overlap": {"mean": 0.5}})
    shown = text(run)
    assert "against the checkpoint before fine-tuning" in shown
    assert "expert overlap −20\u00a0% (0.500 → 0.400)" in shown


def test_a_task_that_nobody_solved_is_no_unclear_difference(tmp_path):
    run = run_of(tmp_path / "ours", 2)
    results = json.loads((run / "eval" / "results.json").read_text())
    results["tasks"]["gsm8k"]["value"] = 0.0
    for folder in ("eval", "eval_base"):
        (run / folder / "results.json").write_text(json.dumps(results))
    shown = text(run)
    assert "no reply was right on gsm8k, in either: compare the prompts in samples.jsonl" in shown
    unclear = re.search(r"no clear difference on ([^<;]*)", shown)[1]
    assert "arithmetic (" in unclear and "gsm8k" not in unclear


def test_runs_on_different_data_are_named(tmp_path):
    one, two = run_of(tmp_path / "a", 1), run_of(tmp_path / "b", 2)
    for run in (one, two):
        change(run / "routing" / "after.json", colored_text=[])
    assert 'class="warning"' not in text(one, two)
    change(two / "routing" / "after.json", tokens=19_999)
    change(two / "eval" / "results.json", suite={"name": "demo", "sha256": "1" * 64})
    recipe = (two / "recipe.yaml").read_text()
    for run, file, train in ((one, "a.jsonl", "full"), (two, "b.jsonl", "frozen")):
        changed = recipe.replace("data:", f"data:\n  validation: {file}")
        assert "  train: full\n" in changed
        changed = changed.replace("  train: full\n", f"  train: {train}\n")
        (run / "recipe.yaml").write_text(changed)
    shown = text(one, two)
    assert "was measured on different tokens" in shown
    assert "did not answer the same prompts" in shown
    assert "validation losses do not compare" in shown
    assert "The routers of these runs train differently" in shown


def test_curves_that_hardly_differ_are_folded_and_two_points_are_none(tmp_path):
    def log(name, factor):
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {
                "kind": "train",
                "step": s,
                "loss": 1 / s,
                "grad_norm": 2.0 / s,
                "mine": factor / s,
                "routing/entropy": 1.0 / s,
                "routing/entropy_share": 0.3 / s,
            }
            for s in range(1, 9)
        ]
        rows += [{"kind": "eval", "step": s, "eval_loss": 3.0} for s in (4, 8)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    shown = text(log("a", 1.0), log("b", 1.5), section=CURVES)
    titles = re.findall(r"<strong>(.*?)</strong>", shown)
    assert titles[0] == "Mine ends at 0.125 (a) and 0.188 (b)"
    rest = ["Training loss ends at 0.125 in all runs", "Routing entropy", "Gradient norm"]
    assert [t[: len(r)] for t, r in zip(titles[1:], rest, strict=True)] == rest
    fold = shown.index("3 curves that hardly differ")
    assert shown.index(titles[0]) < fold < shown.index(titles[1])
    assert '<th scope="row">eval_loss' in shown  # two points stand in the table


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(0.4, 0.25, "−38\u00a0%"), (2.0, 2.01, "+0.5\u00a0%"), (0.0, 1.0, "–"), (math.nan, 1.0, "–")],
)
def test_change_in_percent(before, after, text):
    assert Change(Word(""), before, after).percent == text


def test_a_checkpoint_that_was_only_analyzed_shows_its_values(tmp_path):
    run = tmp_path / "analyzed"
    (run / "routing").mkdir(parents=True)
    found = {"layers": [1], "num_experts": 4, "load": [[5, 1, 1, 1]], "tokens": 4}
    found["metrics"] = {"score_entropy": {"mean": 1.25}, "collision_entropy": {"mean": 1.1}}
    (run / "routing" / "after.json").write_text(json.dumps(found))
    shown = text(run)
    experts = "<dt>Experts</dt><dd>score entropy 1.25</dd></div><div><dt>Load</dt><dd>MaxVio 1.50"
    assert f"<strong>analyzed</strong></p><dl><div>{experts}" in shown
    assert "how rarely two random tokens use the same expert" in shown
    assert "less than" not in shown and "change" not in shown and "Before" not in shown


def _log(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_reinforcement_ends_with_its_reward_and_preferences_with_theirs(tmp_path):
    rewards = [{"kind": "train", "step": s, "loss": 0.0, "reward": s / 8} for s in (1, 2, 4)]
    shown = text(_log(tmp_path / "grpo", rewards))
    assert "<dt>Reward</dt><dd>0.125 → 0.500</dd>" in shown and "loss" not in shown
    pairs = [
        {"kind": "eval", "step": s, "eval_loss": 0.7, "eval_rewards/accuracies": a,
         "eval_rewards/margins": m}
        for s, a, m in ((0, 0.5, 0.0), (3, 0.75, 1.25))
    ]  # fmt: skip
    shown = text(_log(tmp_path / "dpo", pairs))
    assert "<dt>Validation preference accuracy</dt><dd>0.750 (chance is 0.5)</dd>" in shown
    assert "<dt>Validation reward margin</dt><dd>0 → 1.25</dd>" in shown


def test_nothing_is_better_where_the_router_collapsed(tmp_path):
    """Overlap falls to nothing when two of eight experts take every token: no success."""

    def shot(overlap, load):
        metrics = {"expert_overlap": {"mean": overlap}, "activation_cosine": {"mean": 0.2}}
        return {"layers": [1], "num_experts": 8, "top_k": 2, "load": [load], "metrics": metrics}

    run = tmp_path / "run"
    (run / "routing").mkdir(parents=True)
    even = shot(0.5, [9, 11, 10, 10, 12, 8, 10, 10])
    for name, after in (
        ("collapsed", [40, 39, 1, 0, 0, 0, 0, 0]),
        ("uneven", [30, 20, 15, 5, 5, 3, 1, 1]),
    ):
        (run / "routing" / "before.json").write_text(json.dumps(even))
        (run / "routing" / "after.json").write_text(json.dumps(shot(0.1, after)))
        shown = text(run)
        assert (
            "Routing collapsed: the worst layer's MaxVio is 3.00 (the largest possible is 3"
            in shown
        ) == (name == "collapsed")
        assert ('verdict better">−80' in shown) == (name == "uneven")
        assert 'verdict worse">+' in shown  # MaxVio


def test_losses_of_different_stages_and_base_models_are_not_compared(tmp_path):
    runs = [run_of(tmp_path / name, 1, eval_loss=4.7) for name in ("sft", "dpo", "olmoe")]
    recipe = (runs[0] / "recipe.yaml").read_text()
    (runs[1] / "recipe.yaml").write_text(f"stage: dpo\n{recipe}")
    (runs[2] / "recipe.yaml").write_text(recipe.replace("demo/qwen3-moe-tiny", "allenai/OLMoE"))
    shown = text(*runs)
    assert "loss" not in shown.partition("<ul")[0], "no line about a loss in the summary"
    assert "different stages (sft, dpo): their losses do not compare" in shown
    assert "different base models (demo/qwen3-moe-tiny, allenai/OLMoE)" in shown
    titles = re.findall(r"<strong>(Training loss .*?)</strong>", text(*runs, section=CURVES))
    assert len(titles) == 3 and all("and" not in title for title in titles)
    assert "Validation loss</dt>" in text(runs[0], runs[0])
    assert "their losses do not compare" not in text(runs[0], runs[0])


def test_the_tie_before_dpo_is_no_start(tmp_path):
    pairs = [
        {"kind": "eval", "step": s, "eval_rewards/accuracies": a} for s, a in ((0, 0), (9, 0.7))
    ]
    folder = _log(tmp_path / "dpo", pairs)
    assert "preference accuracy</dt><dd>0.700 (chance is 0.5)</dd>" in text(folder)


def test_a_batch_that_was_trained_on_is_no_accuracy(tmp_path):
    """Two steps of DPO ended with "Preference accuracy: 1.00", of one batch of training rows."""
    pairs = [{"kind": "train", "step": s, "rewards/accuracies": a} for s, a in ((1, 0.5), (2, 1))]
    shown = text(_log(tmp_path / "dpo", pairs))
    assert "last training batch</dt><dd>1.00 (chance is 0.5); set data.validation" in shown
    assert "accuracy" not in shown.lower()


def test_a_damaged_passage_is_one_line(tmp_path):
    runs = [run_of(tmp_path / name, 1) for name in "ab"]
    change(runs[1] / "routing" / "after.json", colored_text=[["a", "b"]])
    with pytest.raises(TraceError, match="'colored_text' is missing or malformed"):
        text(*runs)


@pytest.mark.parametrize(
    ("after", "method", "said"),
    [
        (
            0.0202,
            {},
            "hardly moved; train for more steps, or set method.terms.variance.share: 0.1<",
        ),
        (0.0202, {"terms": {"variance": {"share": 0.1}}}, "method.terms.variance.share: 0.3<"),
        (0.0202, {"terms": {"variance": {"share": 0.7}}}, "method.terms.variance.share: 1<"),
        (0.0202, {"terms": {"variance": {"share": 1.0}}}, "hardly moved; train for more steps<"),
        (0.03, {}, "(0.0200 → 0.0300), which orthogonal_variance should raise</dd>"),
        (0.01, {}, "which orthogonal_variance should raise: moved the other way"),
    ],
)
def test_a_run_says_whether_its_method_moved_what_it_is_for(tmp_path, after, method, said):
    """A first run with the defaults changed score variance by 0.1 %, without a word on that."""
    assert said in text(_moved(tmp_path, after, method, step=300))
    if "hardly" in said:
        few = text(_moved(tmp_path / "few", after, method, step=150))
        assert "hardly moved; train for more steps<" in few


def _moved(folder, after, method, step):
    run = run_of(folder / "ours", 2, {"score_variance": after})
    change(run / "routing" / "before.json", metrics={"score_variance": {"mean": 0.02}})
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": step, "loss": 1.0}))
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["method"] = {"preset": "orthogonal_variance", **method}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return run


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].goal is not None])
def test_what_is_advised_changes_only_the_loss_of_the_goal(name):
    """It multiplied the share of every loss, and orthogonality's by 105."""
    share = "recommended" if PRESETS[name].recommended else None
    table = {"supervised_routing": {"table": "t.safetensors"}}
    terms = table if name == "supervised_routing" else {}
    before = resolve_method(name, share=share, terms=terms)
    advice = _advice(PRESETS[name], before.model_dump(mode="json")["terms"], 1000)
    _, _, setting = advice.partition(", or set method.terms.")
    if not setting:
        assert name == "loss_free", advice
        return
    key, _, value = setting.partition(": ")
    term, option = key.split(".")
    changes = merge_mappings(terms, {term: {option: float(value)}})
    changed = resolve_method(name, share=share, terms=changes)
    others = [{k: v for k, v in m.terms.items() if k != term} for m in (before, changed)]
    assert others[0] == others[1]
    assert (before.terms[term].share or 0) < changed.terms[term].share <= 1


def test_every_preset_but_none_has_a_goal_that_is_measured():
    measured = {*LEADING, *MEASURED, *(f"losses/{term}" for term in TERMS)}
    for preset in PRESETS.values():
        # Neither has a loss, so no metric that one should move.
        assert (preset.goal is None) == (preset.name in ("none", "densemixer"))
        assert preset.goal is None or preset.goal[0] in measured


def test_a_merge_that_shows_nothing_is_told_where_it_ends(tmp_path):
    run = run_of(tmp_path / "ours", 2)
    verified = {"tensors": 208, "same": 0, "layers": 2, "error": 1e-6, "note": ""}
    change(run / "summary.json", verify=verified)
    assert "208 changed tensors are base + adapter, logits within 1.0e-06 (relative)<" in text(run)
    note = "the adapter does not move the logits"
    change(run / "summary.json", verify={**verified, "same": 208, "note": note})
    assert "208 of them equal to the base's, logits within 1.0e-06 (relative); the adapter" in (
        text(run)
    )


def test_every_red_figure_is_named(tmp_path):
    """The table colors metrics that the summary's short list of changes leaves out."""
    run = run_of(tmp_path / "ours", 2, METRICS)
    before = {name: {"mean": value} for name, value in METRICS.items()}
    change(run / "routing" / "before.json", metrics=before | {"silhouette": {"mean": 0.2}})
    after = before | {"silhouette": {"mean": 0.1}}
    change(run / "routing" / "after.json", metrics=after)
    shown = text(run)
    assert 'verdict worse">−50' in shown
    assert "<dt>Red figures</dt><dd>silhouette moved away" in shown


def test_all_keys_in_which_runs_differ_are_named(tmp_path):
    """It named one of several, so a reader took the others to be equal."""
    one, two = run_of(tmp_path / "a", 1), run_of(tmp_path / "b", 1)
    recipe = yaml.safe_load((two / "recipe.yaml").read_text())
    recipe["lora"] = {**(recipe.get("lora") or {}), "rank": 3}
    recipe["trainer"] = {**(recipe.get("trainer") or {}), "learning_rate": 0.7, "seed": 11}
    recipe["method"] = "erc"
    (two / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shown = text(one, two)
    assert "these runs differ in lora.rank, trainer.learning_rate and trainer.seed:" in shown
    recipe["trainer"] |= {"warmup_steps": 5, "max_steps": 9}
    (two / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert "and 1 more; Settings has all: their numbers" in text(one, two)


def test_figures_of_validation_rows_say_how_many(tmp_path):
    one, two = run_of(tmp_path / "a", 1), run_of(tmp_path / "b", 2)
    change(one / "summary.json", validation_rows=1)
    assert re.search(r"<dt>Validation loss</dt><dd>[^<]* → [^<]* on 1 row<", text(one))
    change(two / "summary.json", validation_rows=1207)
    assert re.search(r"<dt>Validation loss</dt><dd>[^<]* on 1,207 rows<", text(one, two))
