"""What pip installs: versions that agree, entry points that exist, files outside the package."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import numpy
import pytest
import yaml
from packaging.requirements import Requirement

from tests.report.folders import write_run

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pinned_versions_satisfy_every_requirement():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        pin.name: str(next(iter(pin.specifier)).version)
        for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(r for rs in extras.values() for r in rs)]
    met = 0
    for requirement in map(Requirement, wanted):
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement
            met += 1
    assert met >= len(pins), "a pinned version belongs to no requirement"


def test_entry_points_exist():
    groups = [PROJECT["project"]["scripts"], *PROJECT["project"]["entry-points"].values()]
    for group in groups:
        for target in group.values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_every_folder_of_tasks_and_recipes_is_installed():
    installed = PROJECT["tool"]["setuptools"]["data-files"]
    for pattern in ("eval/tasks/*", "eval/suites", "recipes/*"):
        for folder in ROOT.glob(pattern):
            if not folder.is_dir() or not [*folder.glob("*.yaml"), *folder.glob("*.py")]:
                continue
            name = folder.relative_to(ROOT)
            globs = installed.get(f"share/moe-finetune/{name}", [])
            found = {file for glob in globs for file in ROOT.glob(glob)}
            wanted = {*folder.glob("*.yaml"), *folder.glob("*.py")}
            assert wanted <= found, f"pyproject: data-files lacks {name}"


def test_public_names():
    import moe_finetune

    for name in moe_finetune.__all__:
        assert getattr(moe_finetune, name)
    assert moe_finetune.__version__ == PROJECT["project"]["version"]


DOCKERFILE = (ROOT / "recipes/hardware/Dockerfile").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment with the wheel, made of what the Dockerfile copies."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        *names, target = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results", "*.png")
                shutil.copytree(ROOT / name, source / target, ignore=ignored)
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source / target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    shutil.rmtree(source)
    venv.create(folder / "env", symlinks=True)
    python, (wheel,) = folder / "env" / "bin" / "python", folder.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([*pip, "--python", str(python), *install], check=True)
    (packages,) = folder.glob("env/lib/*/site-packages")
    # The libraries are this environment's; a .pth file read from a .pth file's folder is not.
    (packages / "libraries.pth").write_text(str(Path(numpy.__file__).parents[1]))
    return python


def outside(command, folder, **more):
    """Run ``command`` in ``folder`` without the checkout on the path; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    ran = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_wheel_works_outside_the_checkout(installed, tmp_path, checkpoint):
    rows = [{"prompt": f"{n} + 2 =", "completion": f" {n + 2}"} for n in range(40)]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = ["recipes/demo/aux_loss.yaml", "recipes/methods/erc.yaml", "data.train=my.jsonl",
              f"model.path={checkpoint}", "data.validation=null", "evaluation=null"]  # fmt: skip
    plugin = ["--plugin", "recipes/plugins/p0_released.py"]
    verbs = [
        ["train", *recipe, "--output", "new", "--dry-run"],
        ["study", "recipes/studies/miniature.yaml", "--plan", *plugin],
        ["init", str(checkpoint), "--data", "my.jsonl", "--method", "erc", "--output", "own.yaml"],
        ["report", "run", "--output", "report"],
        ["eval", str(checkpoint), "--suite", "gsm8k", "--check", "--data-dir", "."],
    ]
    write_run(tmp_path / "run")
    program = (
        "import sys, json, moe_finetune, moe_finetune.cli as cli\n"
        "print(moe_finetune.__file__)\n"
        "for verb in json.loads(sys.argv[1]):\n"
        "    code = cli.main(verb)\n"
        "    print('exit code', code)\n"
    )
    said = outside([installed, "-c", program, json.dumps(verbs)], tmp_path)
    assert said.splitlines()[0].startswith(str(installed.parents[1]))
    # gsm8k's rows are not here: the check found the suite and the task, and says so with code 2.
    assert re.findall(r"exit code (\d)", said) == ["0", "0", "0", "0", "2"], said
    assert (tmp_path / "report" / "index.html").is_file()
    # What the demo runs is in the verbs above and these files.
    shipped, found = (
        {file.relative_to(at): file.read_bytes() for file in at.rglob("*") if file.is_file()}
        for at in (ROOT / "recipes/demo", installed.parents[1] / "share/moe-finetune/recipes/demo")
    )
    assert found == {name: shipped[name] for name in shipped if name.suffix != ".png"}
    version = outside([installed.with_name("moe-finetune"), "--version"], tmp_path)
    assert version == f"moe-finetune {PROJECT['project']['version']}\n"
    typed = {"COMP_WORDS": "moe-finetune pre", "COMP_CWORD": "1"}
    typed["_MOE_FINETUNE_COMPLETE"] = "complete_bash"
    completed = outside([installed.with_name("moe-finetune")], tmp_path, **typed)
    assert completed.split() == ["preview"]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_image_is_made_of_extras_and_verbs_that_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    (asked,) = re.findall(r'"\.\[(.+?)\]"', DOCKERFILE)
    chosen = re.findall(r"\bEXTRA=([\w-]+)", DOCKERFILE)
    assert chosen
    assert {*chosen, *asked.replace("${EXTRA},", "").split(",")} <= set(extras)
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M):
        assert all((ROOT / name).exists() for name in line.split())
