"""One task of lm-evaluation-harness behind a suite's line: its definition and its local files."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError
from moe_finetune.evaluation.rows import load_rows
from moe_finetune.io.hashes import sha256_file, sha256_json


@dataclass(frozen=True)
class Leaf:
    """One lm-eval task behind a suite's line: its config and its local files.

    Attributes:
        config: the task's YAML with includes and functions resolved.
        files: split -> local file (empty when the data comes from the hub).
        missing: files that should be there and are not.
        template: the template that the task was made from.
        tested: the split whose rows are asked.
        examples: the split that examples are drawn from; None where there are none.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)
    missing: tuple[Path, ...] = ()
    template: str | None = None
    tested: str | None = None
    examples: str | None = None

    def load(self) -> Any:
        """Return the local files as a ``datasets.DatasetDict``, all rows checked."""
        from datasets import DatasetDict

        return DatasetDict(
            {split: load_rows(path, self.template) for split, path in self.files.items()}
        )

    def reports(self) -> set[str]:
        """Return the scores of the task, each ``"metric,filter"``."""
        from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY

        kind = self.config.get("output_type", "generate_until")
        listed = self.config.get("metric_list")
        metrics = DEFAULT_METRIC_REGISTRY[kind] if listed is None else [m["metric"] for m in listed]
        filters = [f["name"] for f in self.config.get("filter_list") or [{"name": "none"}]]
        return {f"{getattr(m, '__name__', m)},{name}" for m in metrics for name in filters}

    def data_hashes(self) -> dict[str, str]:
        """Return split -> SHA-256 of the local file."""
        return {
            split: _file_hash(path, path.stat().st_mtime_ns)
            for split, path in sorted(self.files.items())
        }

    def config_hash(self) -> str:
        """Return a hash over the task's definition (not over where its files lie)."""
        hidden = ("custom_dataset", "dataset_kwargs", "metadata")
        return sha256_json({k: v for k, v in self.config.items() if k not in hidden})


@cache
def _file_hash(path: Path, modified_ns: int) -> str:
    return sha256_file(path)


def require_files(leaves: list[Leaf]) -> None:
    """Raise DataError for the first local file that should be there and is not."""
    for leaf in leaves:
        if leaf.missing:
            more = f" (and {len(leaf.missing) - 1} more)" if len(leaf.missing) > 1 else ""
            raise DataError(
                f"task {leaf.name}: data file {leaf.missing[0]} does not exist{more}; "
                "'eval --check' lists what a suite needs"
            )
