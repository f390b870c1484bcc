import time
from pathlib import Path

import pytest
import yaml

from moe_finetune.errors import RecipeError
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.schema import Recipe, load_recipe
from moe_finetune.recipe.section import hide_secrets
from moe_finetune.recipe.tree import load_tree

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
    recipe = load_recipe([first, second], ["trainer.max_steps=5", "data.train.1=z.jsonl"])
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
    assert "did you mean 'recipes/stages/dpo.yaml'" in refused("recipes/stage/dpo.yaml")[0]
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
        4: "data.train: must be text or a list, not 4",
        5: "data.max_length: must be 2 or more, not 1",
        7: "trainer.learning_rat: unknown key of TRL's SFTConfig; did you mean 'learning_rate'?",
        8: "trainer.seed: must be a whole number, not 'soon'",
    }.items():
        assert f"{file}:{place}: {message}" in text
    assert "model: required, but missing (it needs model.path)" in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.rank", "write overrides as key"),
        ("lora..rank=1", "write overrides as key"),
        ("data.train=[", "not YAML"),
        ("data.train.0=x", "data.train has no '0'"),
        (
            "lora.targets=[atention]",
            "override 'lora.targets=[atention]': lora.targets.0: must be 'attention'",
        ),
        ("trainer.save_strategy=sometimes", "one of no, steps, epoch, best"),
        (
            "trainer.eval_strategy=no",
            """not False; YAML reads an unquoted no as false, so write "no\"""",
        ),
        ("trainer.fp16=true", "trainer.fp16"),
        ("trainer.output_dir=x", "--output on the command line"),
        ("trainer.packing=true", "set data.packing"),
        ("trainer.hub_token=secret", "secrets stay out of recipes"),
        ("trainer.gradient_checkpointing_kwargs={use_reentrant: true}", "use_reentrant: false"),
        ("trainer.bf16=1", "must be true or false, not 1"),
        ("method=ortogonal_variance", "did you mean 'orthogonal_variance'?"),
        ("method.terms.varance.weight=1", "unknown loss; did you mean 'variance'?"),
        (
            "method.terms.variance.weight=-1.0",
            "variance.weight: must be 0 or more, not -1.0",
        ),
        ("method.terms.variance=0.1", "must be a mapping such as"),
        ("method.terms.z_loss.wieght=1", "method.terms.z_loss.wieght: unknown key"),
        ("method.perturbations.jiter=0.1", "did you mean 'jitter'?"),
        ("method.bias_update=-1.0", "method.bias_update"),
        ("lora=8", "lora: must be a mapping, not 8"),
        ("model.dtype=float16", "'bfloat16' or 'float32'"),
        ("lora.rank=null", "lora.rank: required, but missing"),
        ("lora.alpha=.inf", "lora.alpha: must be 1000000 or less, not inf"),
        ("lora.alpha=1.0e+30", "lora.alpha: must be 1000000 or less, not 1e+30"),
        ("lora.alpha=.nan", "lora.alpha: must be"),
        ("data.columns={prompt: q}", "cannot be combined"),
        ("export.merge=false", "evaluation: needs export.merge"),
        ("logging.every=5", "logging: unknown key"),
        ("learning_rate=1e-3", "unknown key; did you mean 'trainer.learning_rate'?"),
        ("dropout=0.1", "unknown key; did you mean 'lora.dropout'?"),
        ("packing=true", "unknown key; did you mean 'data.packing'?"),  # TRL's is not for recipes
        ("seed=3", "unknown key; did you mean 'trainer.seed'?"),
        ("max_length=512", "unknown key; did you mean 'data.max_length'?"),
        ("data.rank=4", "data.rank: unknown key; did you mean 'lora.rank'?"),
        ("evaluation.suite=''", "evaluation.suite"),
    ],
)
def test_refusals_name_key_and_remedy(write, override, said):
    file = write("r.yaml", BASE + "evaluation: {suite: demo}\n")
    extra = ["data.template={prompt: '{q}'}"] if "columns" in override else []
    assert said in "\n".join(refused(file, [*extra, override]))


def test_contradictions(write):
    file = write("r.yaml", BASE)
    assert "nothing trains" in refused(file, ["lora.targets=[]", "router.train=frozen"])[0]
    assert "needs a `lora:` section" in refused(file, ["lora=null", "router.train=lora"])[0]
    assert load_recipe(file, ["lora=null"]).lora is None
    assert (
        "merge: true, because it checks the merged"
        in refused(file, ["export={merge: false, verify: true}"])[0]
    )
    assert load_recipe(file, ["export.merge=false"]).export.verify is False
    selection = ["lora.experts=s.json", "lora.targets=[attention]"]
    assert "needs 'experts' in lora.targets" in refused(file, selection)[0]
    cut = ["data.packing=true", "data.packing_strategy=wrapped", "data.format=messages"]
    assert "splits examples and is only for data" in refused(file, cut)[0]
    masked = ["data.format=text", "data.completion_only_loss=true"]
    assert "needs completions" in refused(file, masked)[0]


@pytest.mark.parametrize("change, reason", [
    ("lora=null", "parallel.experts: 2 needs an adapter"),
    ("lora.targets=[]", "parallel.experts: 2 needs an adapter"),
    ("model.offload=experts", "cannot be combined with model.offload 'experts'"),
    ("trainer.torch_compile=true", "cannot be combined with parallel.experts: 2"),
    ("parallel.experts=0", "parallel.experts: must be 1 or more, or 'all', not 0"),
])  # fmt: skip
def test_what_spread_experts_do_not_go_with(write, change, reason):
    file = write("r.yaml", BASE + "parallel: {experts: 2}")
    assert load_recipe(file).parallel.experts == 2
    assert load_recipe(file, ["lora.targets=[]", "router.train=lora"]).lora.targets == []
    (line,) = refused(file, [change])
    assert reason in line


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


@pytest.mark.parametrize(("changes", "reason"), [
    (["lora.parts={experts: {rank: 0}}"], "lora.parts.experts.rank: must be 1 or more, or"),
    (["lora.parts={exprts: {rank: 2}}"], "lora.parts.exprts"),
    (["lora.parts={router: {rank: 2}}"], "lora.parts.router: this part has no adapter"),
    (["lora.parts={experts: {rank: 2}}", "lora.targets=[attention]"], "lora.parts.experts"),
    (["lora.init=pisa"], "lora.init: must be 'kaiming' or 'gaussian'"),
    (["lora.start=a", "lora.experts=chosen.json"], "lora.start: works only with all experts"),
    (["lora.start=a", "parallel.experts=2"], "be combined with parallel.experts: 2"),
    (["trainer.use_liger_kernel=true"], "set liger_kernel_config: {swiglu: false}"),
    (["trainer.liger_kernel_config={rope: true}"], "has no effect; set use_liger_kernel: true"),
    (["trainer.use_liger_kernel=true", "trainer.liger_kernel_config={swiglu: true}"], "swiglu"),
])  # fmt: skip
def test_adapters_that_cannot_train_so(write, changes, reason):
    assert any(reason in line for line in refused(write("r.yaml", BASE), changes))


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


@pytest.mark.parametrize(
    "override",
    [
        "evaluation.vllm={hf_token: hf_abc}",
        "evaluation.vllm={speculative_config: {api_key: hf_abc}}",
        "trainer.hub_token=hf_abc",
    ],
)
def test_a_secret_in_a_recipe_is_refused(write, override):
    with pytest.raises(RecipeError, match=r"_(token|key).*secrets stay out of recipes"):
        load_recipe(write("r.yaml", BASE), ["evaluation.suite=paper0", override])
    load_recipe(
        write("r.yaml", BASE), ["evaluation.suite=paper0", "evaluation.vllm={hf_token: true}"]
    )


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


@pytest.mark.parametrize("value", ["5", "true", "[1]", ".inf"])
def test_a_method_of_another_type_is_refused(write, value):
    (line,) = refused(write("r.yaml", BASE), [f"method={value}"])
    assert "method: must be a preset's name or a mapping such as {preset: erc}, not " in line
