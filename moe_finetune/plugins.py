"""Code of the user's own that registers families, losses and rewards.

Two ways, and no other: ``--plugin FILE`` on the command line runs a file of the user's;
``plugins: [NAME]`` in a recipe, or ``--plugin NAME``, imports what an installed package declares
under the entry point group :data:`GROUP`. A recipe that somebody sends can thus run no file that
came with it.
"""

import ast
import hashlib
import os
import site
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from moe_finetune.errors import PluginError, did_you_mean

GROUP = "moe_finetune.plugins"
VARIABLE = "MOE_FINETUNE_PLUGINS"
"""Environment variable that hands files and names on to children and ranks."""

_files: dict[Path, tuple[str, str]] = {}
"""SHA-256 of each file, and of it with the files below its folder that it imports."""
_installed: set[str] = set()


def use(plugin: str) -> None:
    """Run a plugin file, or import an installed plugin, here and in every process started here.

    Raises:
        PluginError: see :func:`use_file` and :func:`use_installed`.
    """
    if plugin.isidentifier() and not Path(plugin).exists():
        use_installed(plugin)
    else:
        use_file(plugin)


def use_file(path: str | Path) -> None:
    """Run a plugin file once, here and in every process that this one starts.

    Raises:
        PluginError: the file cannot be read, or its code fails; names the line.
    """
    file = Path(path).resolve()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise PluginError(f"--plugin {path}: cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(content).hexdigest()
    if _files.get(file, ())[:1] == (digest,):
        return
    module = types.ModuleType(f"moe_finetune_plugin_{digest[:12]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        # What ran is what was hashed: no cached bytecode.
        exec(compile(content, str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:  # whatever the plugin's own code raises
        del sys.modules[module.__name__]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f", line {line}" if line else ""
        raise PluginError(f"{file}{where}: {type(error).__name__}: {error}") from error
    _files[file] = digest, _with_imported(file, content)
    _hand_on()


def _with_imported(file: Path, content: bytes) -> str:
    """SHA-256 of a plugin's file, and of the files below its folder that it imports, if any."""
    sources, unread = {file: content}, [(content, "")]
    installed = [*map(Path, _installation_folders()), Path(__file__).parent]
    away = [path.resolve() for path in installed]
    while unread:
        source, package = unread.pop()
        for name in _imported(ast.parse(source), package):
            module = sys.modules.get(name)
            path = Path(str(getattr(module, "__file__", None) or "/")).resolve()
            inside = path.suffix == ".py" and path.is_relative_to(file.parent)
            if inside and path not in sources and not any(map(path.is_relative_to, away)):
                sources[path] = path.read_bytes()
                unread.append((sources[path], str(getattr(module, "__package__", None) or "")))
    digests = {
        path.relative_to(file.parent).as_posix(): hashlib.sha256(text).hexdigest()
        for path, text in sources.items()
    }
    if len(digests) == 1:
        return digests[file.name]
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of the modules that a source may import, with the packages that they lie in."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            packages = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = ".".join([*(packages if node.level else ()), *filter(None, [node.module])])
            names = [start, *(f"{start}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def use_inherited() -> None:
    """Use the plugins of the process that started this one."""
    for plugin in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        use(plugin)


def _hand_on() -> None:
    os.environ[VARIABLE] = os.pathsep.join([*map(str, _files), *sorted(_installed)])


def use_installed(name: str) -> None:
    """Import what an installed package declares as the plugin ``name``.

    Raises:
        PluginError: no installed package declares it, or its code fails.
    """
    if name in _installed:
        return
    points = _points()
    point = points.get(name) or next((p for p in points.values() if p.value == name), None)
    if point is None:
        raise PluginError(
            f"no installed package declares '{name}' under the entry points "
            f"'{GROUP}'{did_you_mean(name, points)}; install its package, or give your file "
            "with --plugin FILE"
        )
    try:
        with _without_working_folder():
            loaded = point.load()
            if callable(loaded) and not isinstance(loaded, types.ModuleType):
                loaded()
    except Exception as error:  # whatever the package's own code raises
        raise PluginError(
            f"plugin '{name}' ({point.value}) cannot be loaded: {type(error).__name__}: {error}; "
            "fix or uninstall its package"
        ) from error
    _installed.add(name)
    _hand_on()


def installed_names() -> list[str]:
    """Names of the plugins that installed packages declare."""
    return sorted(_points())


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if _is_installed(point)}


def module_of(name: str) -> str:
    """The module that an installed plugin's name stands for."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    return points[name].module if name in points else name.partition(":")[0]


def loaded_files() -> dict[str, str]:
    """Name and SHA-256 of each plugin file that this process runs, for a run's notes."""
    return {file.name: digest for file, (_, digest) in _files.items()}


def missing_files(noted: object) -> list[str]:
    """The plugin files of a run's notes that this process does not run as they were."""
    if not isinstance(noted, Mapping):
        return []
    known = {digest for _, digest in _files.values()}
    return [f"{name} (sha256 {str(d)[:12]})" for name, d in noted.items() if d not in known]


def _is_installed(point: EntryPoint) -> bool:
    """Return whether the entry point's package is installed, not only next to the recipe."""
    if point.dist is None:
        return False
    folder = Path(str(point.dist.locate_file(""))).resolve()
    return folder in {Path(path).resolve() for path in _installation_folders()}


def _installation_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return [*site.getsitepackages(), site.getusersitepackages(), paths["purelib"], paths["platlib"]]


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """Import without the working folder, where a module of the same name may lie."""
    before = list(sys.path)
    here = Path.cwd().resolve()
    sys.path[:] = [path for path in before if path and Path(path).resolve() != here]
    try:
        yield
    finally:
        sys.path[:] = before
