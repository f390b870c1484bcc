"""The notebook of the quickstart: its cells run, and show what their text announces."""

import ast

import pytest

from tests.support import notebook


@pytest.mark.slow
def test_the_cells_run_and_the_losses_separate_the_experts(tmp_path):
    content = notebook.read()
    names, outputs = notebook.execute(content, tmp_path)
    overlap, variance = names["values"]["expert_overlap"], names["values"]["score_variance"]
    assert max(overlap["none"], overlap["orthogonal_variance"]) < 0.5 * overlap["before"]
    assert variance["orthogonal_variance"] > 1.2 * variance["none"] > variance["before"]
    assert names["losses"]["orthogonal_variance"] < 1.1 * names["losses"]["none"]
    assert (tmp_path / "report" / "index.html").is_file()
    kinds = [[part["output_type"] for part in parts] for parts in outputs]
    stored = [
        [part["output_type"] for part in cell["outputs"]] for cell in notebook.code_cells(content)
    ]
    assert kinds == stored, "run `python -m tests.support.notebook`"


def test_the_stored_outputs_are_small():
    assert notebook.NOTEBOOK.stat().st_size < 60_000
    for cell in notebook.code_cells(notebook.read()):
        ast.parse("".join(cell["source"]))
