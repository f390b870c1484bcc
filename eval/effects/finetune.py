"""One arm and seed: fine-tune the demo's checkpoint with the real trainer, and measure it.

Shape legend: T held-out tokens, L MoE layers, V vocabulary, E experts.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, set_seed

from eval.demo.rows import arithmetic_rows, finetuning_rows, write_rows
from eval.demo.text import read_documents
from eval.effects.probe import measure
from eval.effects.score import HeldOutTasks, Row, answer_rows, share_exact
from eval.effects.settings import TABLE, FinetuneSection, with_table
from moe_finetune.checkpoint.loading import load_model
from moe_finetune.data.examples import prepare
from moe_finetune.io import output_folder, output_lock, write_atomic
from moe_finetune.io.rows import read_rows, write_jsonl
from moe_finetune.io.run_folder import RunFolder, read_log
from moe_finetune.lora.targets import add_lora
from moe_finetune.metrics import path_stability
from moe_finetune.models.loading import load_tokenizer, local_folder, open_config
from moe_finetune.moe.layers import config_facts
from moe_finetune.moe.perturbation import Perturbation
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.shipped import recipes_folder
from moe_finetune.recipe.tree import Tree, merge_mappings
from moe_finetune.training.callback import SpecializationCallback
from moe_finetune.training.trainer import build_trainer

TOPICS_SEED = 0
FRESH_SEED = 1


class Workbench:
    """The checkpoint, data, held-out tasks and token frequencies that a study's arms share.

    Args:
        section: the study's ``finetune``; its ``recipe.model.path``, if set, replaces the demo's
            checkpoint.
        folder: folder for data and token frequencies.
    """

    def __init__(self, section: FinetuneSection, folder: Path):
        self.section = section
        named = section.recipe.get("model", {}).get("path")
        self.checkpoint = local_folder(named) if named else recipes_folder() / "demo" / "checkpoint"
        self.folder = folder
        self.data = data_in(folder)
        self.tokenizer = load_tokenizer(self.checkpoint)
        self.tasks = HeldOutTasks(self.data, self.tokenizer, section.tasks)
        data = self.recipe({"preset": "none"}, seed=0).data
        self.train, _ = prepare(data.train, data, self.tokenizer, "train")
        held_out = (
            fresh_rows(folder, section.fresh_rows, self.data)
            if section.fresh_rows
            else (self.data / "validation.jsonl")
        )
        validation, _ = prepare(str(held_out), data, self.tokenizer, "validation")
        self.validation = validation.to_list()
        facts = config_facts(*open_config(self.checkpoint))
        documents = [row["input_ids"] for row in self.train.to_list()]
        self.frequencies_VE = topic_frequencies(documents, facts.vocab_size, facts.num_experts)
        write_table(self.frequencies_VE, folder / TABLE)
        self.start = self._measure_start()

    def _measure_start(self) -> tuple[dict[str, float], np.ndarray]:
        """Measure the untrained model; an adapter of zeros changes nothing."""
        model = load_model(self.checkpoint, dtype="float32")
        return self.measure(model)

    def measure(
        self, model: Any, perturbation: Perturbation | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """Metrics on the held-out examples and ``top1_TL``; draws no random numbers."""
        return measure(
            model,
            self.validation,
            self.frequencies_VE,
            embeddings=self.section.embeddings,
            perturbation=perturbation,
        )

    def sums(self, seed: int) -> list[Row]:
        """The arithmetic problems of ``seed``, the same for every arm."""
        rng = random.Random(f"{seed}/sums")
        return answer_rows(self.tokenizer, arithmetic_rows(rng, self.section.sums))

    def recipe(self, method: dict[str, Any], seed: int) -> Recipe:
        """The recipe of one arm and seed."""
        filled_in = {
            "model": {"path": str(self.checkpoint), "dtype": "float32"},
            "data": {
                "train": str(self.data / "train.jsonl"),
                "format": "prompt_completion",
            },
            "method": with_table(method, str(self.folder / TABLE)),
            "trainer": {"seed": seed, "save_strategy": "no", "report_to": "none"},
            "export": {"merge": False},
        }
        return recipe_from_tree(Tree(merge_mappings(self.section.recipe, filled_in)))


def data_in(folder: Path) -> Path:
    """The rows in ``folder/data``, written if they are missing or incomplete."""
    data = folder / "data"
    with output_lock(data, wait=True):  # other shards of the study may need it at the same time
        if not data.is_dir():
            with output_folder(data, 0) as partial:
                write_rows(partial)
    return data


def fresh_rows(folder: Path, count: int, data: Path) -> Path:
    """A file of at most ``count`` held-out rows that are in no file of the demo."""
    used = {
        row["prompt"]
        for name in ("train.jsonl", "validation.jsonl")
        for row in read_rows(data / name)
    }
    rng = random.Random(f"{FRESH_SEED}/validation.jsonl")
    drawn = finetuning_rows(read_documents(), rng, count, set())
    path = folder / "fresh.jsonl"
    write_jsonl(path, (row for row in drawn if row["prompt"] not in used))
    return path


def topic_frequencies(
    documents: Sequence[Sequence[int]], vocabulary: int, experts: int
) -> np.ndarray:
    """``(V, E)`` float32: share of each token's occurrences in E groups of similar documents.

    Groups are k-means clusters of the documents' token shares, instead of P3's clusters of
    embeddings. Counts are smoothed, so that every token has a row; rows sum to 1.
    """
    from sklearn.cluster import KMeans

    counts_DV = np.stack([np.bincount(ids, minlength=vocabulary) for ids in documents])
    shares_DV = counts_DV / counts_DV.sum(1, keepdims=True)
    groups_D = KMeans(experts, n_init=1, random_state=TOPICS_SEED).fit_predict(np.sqrt(shares_DV))
    table_VE = np.full((vocabulary, experts), 1e-3)
    np.add.at(table_VE.T, groups_D, counts_DV)
    return (table_VE / table_VE.sum(1, keepdims=True)).astype(np.float32)


def write_table(frequencies_VE: np.ndarray, path: Path) -> None:
    """Write the table in the format of ``supervised_routing``."""
    from safetensors.numpy import save_file

    save_file({"token_frequencies": frequencies_VE}, path)


class Probe(TrainerCallback):
    """Measures the model on held-out examples ``count`` times, evenly spaced.

    Attributes:
        rows: metrics by probe, with ``step``, starting with the untrained model; ``stability`` is
            the share of held-out tokens and layers that keep the previous probe's top-1 expert.
    """

    def __init__(
        self, bench: Workbench, method: SpecializationCallback, count: int, sums: Sequence[Row]
    ):
        self.bench, self.method, self.count, self.sums = bench, method, count, sums
        start, self._top1_TL = bench.start
        self.rows: list[dict[str, float]] = [{"step": 0, **start}]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        # Probe i of n is at fraction i/n of the run's steps, rounded up.
        done, total = state.global_step, state.max_steps
        if done * self.count // total == (done - 1) * self.count // total:
            return
        specialization = self.method.specialization
        assert specialization is not None
        specialization.recorder.restore()  # a model is recorded once at a time
        try:
            metrics, top1_TL = self.bench.measure(model, specialization.perturbation)
            if self.sums:
                exact = share_exact(model, self.sums, specialization.perturbation)
                metrics["sums"] = 100 * exact
        finally:
            specialization.recorder.install()
        metrics["stability"] = path_stability(self._top1_TL, top1_TL)
        self._top1_TL = top1_TL
        self.rows.append({"step": done, **metrics})


def run_finetune(
    bench: Workbench, method: dict[str, Any], seed: int, folder: Path
) -> dict[str, Any]:
    """Train one arm in the run's folder ``folder`` and return its result.

    Keys ``probes`` (see :class:`Probe`), ``log`` (rows of ``metrics.jsonl``) and ``scores`` of the
    held-out tasks after training.
    """
    recipe = bench.recipe(method, seed)
    write_atomic(folder / "recipe.yaml", recipe.to_yaml())
    RunFolder(folder).metrics.unlink(missing_ok=True)  # from an interrupted run
    model: Any = load_model(bench.checkpoint, dtype=recipe.model.dtype)
    set_seed(seed)
    model = add_lora(model, recipe.lora, recipe.router.train)
    train = bench.train.shuffle(seed)
    trainer, callback = build_trainer(recipe, folder, model, bench.tokenizer, train, None)
    probe = Probe(bench, callback, bench.section.probes, bench.sums(seed))
    trainer.add_callback(probe)
    try:
        trainer.train()
    finally:
        callback.close()
    assert callback.specialization is not None
    return {
        "probes": probe.rows,
        "log": _log(RunFolder(folder).metrics),
        "scores": bench.tasks.score(model, callback.specialization.perturbation),
    }


def _log(path: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if isinstance(value, int | float)}
        for row in read_log(path)
        if row["kind"] == "train"
    ]
