"""A user's own code: by ``--plugin FILE``, or as an installed package; a recipe runs no file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_finetune import plugins
from moe_finetune.cli import main
from moe_finetune.errors import PluginError, RecipeError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.losses.base import TERMS, LayerContext
from moe_finetune.models import find_family
from moe_finetune.models.class_structure import class_of
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.run.begin_run import begin_run, check_run_folder
from tests.conftest import ROOT
from tests.losses.cases import make, record
from tests.support import registries, unheard

FAMILY = """
from moe_finetune.models import Family, register_family

register_family(
    Family(
        name="unheard",
        model_type="unheard_moe",
        title="Unheard",
        score="sigmoid",
        attention_targets=("self_attn.q_proj", "self_attn.o_proj"),
        top_k=lambda config: config.num_experts_per_tok,
    )
)
"""
LOSS = """
from moe_finetune.losses.base import TERMS, Term

class Spread(Term):
    name, source, reads, trains = "my_spread", "a test", "router logits", frozenset({"router"})

    def loss(self, record, context):
        return record.logits_TE.square().mean()

TERMS.register("my_spread", Spread)
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(plugins, "_files", {})
    monkeypatch.setattr(plugins, "_installed", set())
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    with registries.as_before():
        yield


def write(folder, text, name="mine.py"):
    file = folder / name
    file.write_text(text)
    return file


def recipe(**more):
    values = {"model": {"path": "a/b"}, "data": {"train": "x.jsonl"}}
    return recipe_from_tree(Tree(values | more))


def known(model_type):
    return find_family(model_type) is not None


def test_a_file_on_the_command_line_is_known_to_every_verb_and_child(tmp_path, capsys):
    config = unheard.config()
    class_of(config).from_config(config).save_pretrained(tmp_path / "base")
    assert main(["inspect", str(tmp_path / "base")]) == 2
    assert "'unheard_moe' is not supported" in capsys.readouterr().err
    file = write(tmp_path, FAMILY)
    for given in (["--plugin", str(file)], [f"--plugin={file}"]):
        assert main(["inspect", str(tmp_path / "base"), *given]) == 0
        assert "Unheard" in capsys.readouterr().out
    assert plugins.loaded_files().keys() == {"mine.py"}
    code = "from moe_finetune import plugins as p; p.use_inherited(); print(p.loaded_files())"
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert child.stdout.strip() == str(plugins.loaded_files())


def test_a_file_is_also_what_it_imports_below_its_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helpers_of_mine").mkdir()
    helper = write(tmp_path, "FACTOR = 1", "helpers_of_mine/formula.py")
    write(tmp_path, "from .formula import FACTOR", "helpers_of_mine/__init__.py")
    write(tmp_path, "left = 1", "other.py")
    file = write(tmp_path, "import json\nfrom helpers_of_mine import FACTOR")
    digests = set()
    for factor, other in ((1, 1), (1, 2), (-1000, 2)):
        helper.write_text(f"FACTOR = {factor}")
        write(tmp_path, f"left = {other}", "other.py")
        plugins._files.clear()
        plugins.use_file(file)
        digests.add(plugins.loaded_files()["mine.py"])
    assert len(digests) == 2


def test_a_wrong_fact_of_a_family_is_named(tmp_path, capsys):
    config = unheard.config()
    class_of(config).from_config(config).save_pretrained(tmp_path / "base")
    wrong = FAMILY.replace("config.num_experts_per_tok", "config.experts")
    command = ["inspect", str(tmp_path / "base"), "--plugin", str(write(tmp_path, wrong))]
    assert main(command) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "family 'unheard', top_k: " in shown and "no attribute 'experts'" in shown


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("import os\n\nraise RuntimeError('no')\n", "line 3: RuntimeError: no"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
        ("x = (\n", "line 1: SyntaxError"),
        (FAMILY.replace("unheard_moe", "qwen3_moe"), "'qwen3_moe' is already supported"),
    ],
)
def test_a_file_that_fails_names_its_line(tmp_path, text, part, capsys):
    assert main(["doctor", "--plugin", str(write(tmp_path, text))]) == 2
    shown = capsys.readouterr().err
    assert "mine.py" in shown and part in shown and "Traceback" not in shown
    assert main(["doctor", "--plugin", str(tmp_path / "none.py")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["doctor", "--plugin"]) == 2


def test_a_run_notes_the_file_and_resumes_with_the_same(tmp_path, caplog):
    file = write(tmp_path, LOSS)
    plugins.use_file(file)
    method = {"preset": "none", "terms": {"my_spread": {"weight": 0.1}}}
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    begin_run(recipe(method=method), run)
    noted = json.loads(run.environment.read_text())["plugins"]
    assert noted == plugins.loaded_files()
    check_run_folder(recipe(method=method), run, True)
    plugins._files.clear()
    with pytest.raises(RecipeError, match=r"was trained with --plugin mine\.py \(sha256 "):
        check_run_folder(recipe(method=method), run, True)
    TERMS._values.pop("my_spread")
    plugins.use_file(write(tmp_path, LOSS + "# changed\n"))
    with pytest.raises(RecipeError, match="give the same file again"):
        check_run_folder(recipe(method=method), run, True)
    from moe_finetune.models.family_lookup import warn_of_plugins

    warn_of_plugins(run.path / "adapter")
    assert "was trained with --plugin mine.py" in caplog.text


def test_the_loss_of_the_documentation(tmp_path):
    page = (ROOT / "docs" / "extending.md").read_text()
    (example,) = re.findall(r"```python\n([^`]*@term.*?)```", page, re.DOTALL)
    plugins.use_file(write(tmp_path, example))
    options = recipe(method={"terms": {"logit_spread": {"weight": 1, "power": 4}}}).method.terms
    values = make()
    value = TERMS["logit_spread"](options["logit_spread"]).loss(record(values), LayerContext())
    torch.testing.assert_close(value, values["logits_TE"].pow(4).mean())
    assert TERMS["logit_spread"].Options(weight=1).power == 2
    with pytest.raises(RecipeError, match=r"method\.terms\.logit_spread\.power"):
        recipe(method={"terms": {"logit_spread": {"weight": 1, "power": 1}}})


def install(folder, module, text):
    """A package of one module, as pip leaves it in ``folder``."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nspread = {module}\n")


@pytest.mark.parametrize("name", ["spread", "installed_spread"])
def test_an_installed_plugin_by_its_name_or_module(tmp_path, monkeypatch, name):
    install(tmp_path, "installed_spread", LOSS)
    monkeypatch.setattr(plugins, "_installation_folders", lambda: [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    terms = {"my_spread": {"weight": 0.1}}
    read = recipe(plugins=[name], method={"preset": "none", "terms": terms})
    assert "my_spread" in TERMS and "plugins:\n- " in read.to_yaml()
    sys.modules.pop("installed_spread")


def test_an_installed_plugin_on_the_command_line(tmp_path, monkeypatch, capsys):
    install(tmp_path, "installed_family", FAMILY)
    monkeypatch.setattr(plugins, "_installation_folders", lambda: [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    config = unheard.config()
    class_of(config).from_config(config).save_pretrained(tmp_path / "base")
    assert main(["inspect", str(tmp_path / "base")]) == 2
    assert "installed plugins: spread; if one has it, add --plugin" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "base"), "--plugin", "spread"]) == 0
    assert "Unheard" in capsys.readouterr().out
    assert os.environ[plugins.VARIABLE] == "spread"
    assert main(["doctor", "--plugin", "spraed"]) == 2
    assert "did you mean 'spread'" in capsys.readouterr().err
    sys.modules.pop("installed_family")


def test_a_package_that_is_only_beside_the_recipe_is_not_run(tmp_path, monkeypatch):
    """Its metadata, too, came with the recipe."""
    install(tmp_path, "sent_along", "raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sent_along", "spread", "antigravity"):
        with pytest.raises(RecipeError, match=f"no installed package declares '{name}'"):
            recipe(plugins=[name])
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [])
    with pytest.raises(PluginError, match=r"declares 'json'.*there is none"):
        plugins.use_installed("json")


@pytest.mark.parametrize(
    "launcher", [[], ["-P", "-m", "accelerate.commands.launch", "--cpu", "-m"]]
)
def test_a_module_beside_a_recipe_is_not_run_by_any_launcher(tmp_path, launcher):
    """Nor one named as a library: ``python -m`` has the working folder first on its path."""
    leave_a_mark = f"open({str(tmp_path / 'ran')!r}, 'w')"
    for name in ("sent_along", "yaml", "json", "typer", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text(leave_a_mark)
    (tmp_path / "recipe.yaml").write_text(
        "plugins: [sent_along]\nmodel: {path: a/b}\ndata: {train: c/d}\n"
    )
    command = [sys.executable, *(launcher or ["-m"]), "moe_finetune.cli", "train", "recipe.yaml"]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*command, "--output", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "no installed package declares 'sent_along'" in done.stderr
    assert not (tmp_path / "ran").exists()
