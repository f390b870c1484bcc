"""Runs the cells of `docs/quickstart.ipynb` and, as a program, stores their outputs."""

import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

LOGS = ("{'loss': ", "{'train_", "{'eval_")  # what a trainer prints
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def read() -> dict[str, Any]:
    """The notebook as JSON."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[list[dict]]]:
    """Run all cells in ``folder``, in one namespace; return it, and each cell's outputs.

    Outputs are what a cell prints, and the figure that it shows as a PNG.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    with contextlib.chdir(folder):
        for index, cell in enumerate(code_cells(notebook)):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {index}", "exec"), namespace)
            parts: list[dict] = []
            if plt.get_fignums():
                picture = io.BytesIO()
                plt.savefig(picture, format="png")
                plt.close("all")
                data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
                parts.append({"output_type": "display_data", "data": data, "metadata": {}})
            printed_lines = printed.getvalue().splitlines()
            lines = [line for line in printed_lines if not line.startswith(LOGS)]
            if lines:
                text = [f"{line}\n" for line in lines]
                parts.append({"output_type": "stream", "name": "stdout", "text": text})
            outputs.append(parts)
    return namespace, outputs


def main() -> None:
    """Run the notebook in a temporary folder and store what its cells print and draw."""
    notebook = read()
    with tempfile.TemporaryDirectory() as folder:
        _, outputs = execute(notebook, Path(folder))
    for number, (cell, parts) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell["outputs"], cell["execution_count"] = parts, number
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + os.linesep)


if __name__ == "__main__":
    main()
