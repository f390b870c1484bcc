"""No file and the package that it is in import each other; the other rules are `make lint`'s.

import-linter looks for circles among a package's children and leaves out its ``__init__``.
"""

from __future__ import annotations

import grimp

GRAPH = grimp.build_graph("moe_finetune", cache_dir=None)


def test_no_file_and_its_package_import_each_other():
    circles = [
        " -> ".join([name, *GRAPH.find_shortest_chain(package, name)])
        for package in sorted(GRAPH.modules)
        for name in sorted(GRAPH.find_modules_that_directly_import(package))
        if name.startswith(f"{package}.") and GRAPH.chain_exists(package, name)
    ]
    assert not circles, "\n".join(circles)
