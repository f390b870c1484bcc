"""No file and the package that it is in import each other; the other rules are `make lint`'s.

import-linter looks for circles among a package's children and leaves out its ``__init__``.
"""

import re

import grimp

from tests.conftest import ROOT

GRAPH = grimp.build_graph("moe_finetune", cache_dir=None)


def test_no_file_and_its_package_import_each_other():
    circles = [
        " -> ".join([name, *GRAPH.find_shortest_chain(package, name)])
        for package in sorted(GRAPH.modules)
        for name in sorted(GRAPH.find_modules_that_directly_import(package))
        if name.startswith(f"{package}.") and GRAPH.chain_exists(package, name)
    ]
    assert not circles, "\n".join(circles)


def test_no_test_imports_another():
    """What two of them share is a module of its own."""
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(from|import) tests[.\w]*[. ](import )?test_", line)
    ]
    assert not found, "\n".join(found)


def test_underscored_names_are_imported_in_one_file_of_each_library():
    """Such a name may change without notice; `torch_extension` and foreign_names.yaml say why."""
    private = re.compile(r"\s*(from \S*\b_\w[\w.]* import|import \S*\b_\w|from \S+ import \(?_\w)")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("moe_finetune", "eval", "docs")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if private.match(line) and not re.search("__(future|main)__", line)
    }
    assert found == {
        "moe_finetune/torch_extension.py",
        "moe_finetune/data/template_fields.py",  # transformers' compiled templates
    }
