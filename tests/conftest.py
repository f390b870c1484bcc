"""Fixtures shared by the whole suite. Nothing here reaches the network."""

import gc
import importlib.metadata
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors are tiny here. A second thread saves nothing, and where other work has the cores each
# operation waits until both threads have had their turn: ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# oneDNN compiles a product in bfloat16 for every number of rows, and experts have many: keep all.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
# A shell's background jobs ignore it, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = {
    "tests/upcycle/test_interruptions.py": "tests/upcycle/test_command.py",
    **dict.fromkeys(
        (
            "tests/training/gradients/test_rollout_vllm.py",
            "tests/upcycle/test_merge.py",
            "tests/vllm/test_engine.py",
            "tests/vllm/test_parity.py",
            "tests/vllm/test_pruned.py",
        ),
        "tests/vllm/test_serve.py",
    ),
}
"""Files that share a fixture of the session which takes long."""


def _newest() -> dict[str, dict[str, str]]:
    """``newest.txt``: word -> package -> version, where it has one."""
    entries: dict[str, dict[str, str]] = {"install": {}, "hide": {}}
    for line in (ROOT / "tests" / "newest.txt").read_text().splitlines():
        word, _, requirement = line.partition(" ")
        if word in entries:
            name, _, version = requirement.partition("==")
            entries[word][name] = version
    return entries


NEWEST = _newest()
collect_ignore = [
    "newest"
    for name, version in NEWEST["install"].items()
    if importlib.metadata.version(name) != version
]
"""``make test-newest`` runs what is in there, in another environment."""
READER = Path(os.environ.get("READER", ROOT / "build" / "lowest" / "reader")).resolve()
collect_ignore += [] if READER.is_dir() else ["older"]
"""``make test-lowest`` runs it: this environment writes, and an older transformers reads."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, help="run each test marked faults N times")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    count = metafunc.config.getoption("--repeat")
    if count > 1 and metafunc.definition.get_closest_marker("faults"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count))


@pytest.fixture
def repetition(request: pytest.FixtureRequest) -> int:
    """Which of ``--repeat`` times a test runs."""
    return getattr(request, "param", 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no process ends alone; skip ``gpu`` tests where there is none."""
    weight: dict[Path, int] = {}
    for item in items:
        own = 20 * bool(item.get_closest_marker("vllm")) + bool(item.get_closest_marker("slow"))
        weight[item.path] = weight.get(item.path, 0) + own
    items.sort(key=lambda item: -weight[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    keep_for_good()


def keep_for_good() -> None:
    """What is there by now stays: each Trainer collects garbage, and looks through all of it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At its end the process frees what it can."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, files that share a costly fixture go to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Together(config, log)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data go into a folder of the session's, also in child processes."""
    os.environ.setdefault("MOE_FINETUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="module")
def _environment_of_this_module(_cache_of_this_session: None) -> Iterator[None]:
    """What a module puts into the environment ends with it: vLLM sets LD_PRELOAD, among others.

    What it has imported stays.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    keep_for_good()


@pytest.fixture(scope="session")
def warm_server() -> Iterator[Any]:
    """What forks this session's programs; it starts with the first."""
    from tests.support.warm import Popen, Server

    Popen.server = server = Server.begin()
    yield server
    server.close()


@pytest.fixture(scope="module")
def warm(warm_server) -> Iterator[None]:
    """Processes that are started in this module fork from one that has imported everything."""
    from tests.support.warm import forked_from

    with forked_from(warm_server):
        yield


@pytest.fixture
def no_installed_plugins(monkeypatch) -> None:
    """For messages that name installed plugins: this machine may have some."""
    monkeypatch.setattr("moe_finetune.plugins.entry_points", lambda **_: [])


@pytest.fixture(scope="session")
def warm_vllm_server() -> Iterator[Any]:
    """As ``warm_server``, and vLLM is imported, too."""
    from tests.support.warm import VLLM, Server

    server = Server.begin(VLLM, TORCHDYNAMO_DISABLE="1")
    yield server
    server.close()


@pytest.fixture(scope="module")
def warm_vllm(warm_vllm_server) -> Iterator[None]:
    """As ``warm``, for programs that run vLLM. They compile nothing."""
    from tests.support.warm import forked_from

    with pytest.MonkeyPatch.context() as patch, forked_from(warm_vllm_server):
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="session")
def data_file() -> Callable[[str], Path]:
    """Path of a real data file by name; the test is skipped where the file is absent."""
    folder = Path(os.environ.get("MOE_FINETUNE_DATA", ROOT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(f"no {name} in {folder} (set MOE_FINETUNE_DATA)")
        return folder / name

    return find


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's tiny checkpoint, written once a session; do not change it."""
    from tests.support import tiny

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny.save(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return get


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """End with what was skipped and why: a skip is something that nobody tested."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = (
            report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.longrepr
        )
        reason = str(reason).removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.section("not tested here")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:4}  {reason}")


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint) -> Path:
    """A tiny Qwen3-MoE with random weights, shared by all tests that only read it."""
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def p0_released() -> Iterator[None]:
    """The plugin of P0's authors' code, for a module's tests."""
    from moe_finetune.plugins import use_file
    from tests.support.registries import as_before

    with as_before():
        use_file(ROOT / "recipes" / "plugins" / "p0_released.py")
        yield
