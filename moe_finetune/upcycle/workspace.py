"""What the steps of an upcycle read: its recipe, folder, and the results of earlier steps."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import RecipeError
from moe_finetune.io.json_file import read_object
from moe_finetune.models.loading import load_tokenizer, local_folder
from moe_finetune.upcycle.categories import Category, read_categories
from moe_finetune.upcycle.dense import load_dense_config
from moe_finetune.upcycle.files import CLUSTERS_FILE, REMEDY, TABLE_FILE
from moe_finetune.upcycle.frequencies import FrequencyTable, tokenizer_hash
from moe_finetune.upcycle.recipe import UpcycleRecipe
from moe_finetune.upcycle.texts import Texts


@dataclass(frozen=True)
class Upcycle:
    """A recipe and its folder, with values that the steps share."""

    recipe: UpcycleRecipe
    output: Path

    @cached_property
    def categories(self) -> dict[str, Category]:
        return read_categories(self.recipe.texts)

    @cached_property
    def texts(self) -> Texts:
        """The tokenized texts; the step ``texts`` must be done."""
        return Texts.load(self.output / "texts")

    @cached_property
    def dense_checkpoint(self) -> Path | None:
        """Folder of the recipe's dense checkpoint; None if the upcycle pretrains one."""
        section = self.recipe.dense
        return None if section.path is None else local_folder(section.path, True, section.revision)

    @property
    def dense(self) -> Path:
        """The dense checkpoint from which everything starts."""
        return self.dense_checkpoint or self.output / "dense"

    @cached_property
    def dense_tokenizer(self) -> Any:
        return load_tokenizer(self.dense)

    @cached_property
    def vocabulary(self) -> int:
        """Number of embeddings of the dense model, which must exist."""
        return int(load_dense_config(self.dense).vocab_size)

    @property
    def experts(self) -> int:
        return self.recipe.clusters.count

    @cached_property
    def clusters_C(self) -> np.ndarray:
        assignment = read_object(self.output / "clusters" / CLUSTERS_FILE, RecipeError, REMEDY)
        return np.array([assignment["cluster"][name] for name in self.texts.categories], np.int64)

    @cached_property
    def table(self) -> FrequencyTable:
        return self.load_table(self.output / "clusters" / TABLE_FILE, self.output / "texts")

    def load_table(self, path: Path, tokenizer: Path) -> FrequencyTable:
        """Read a table for this tokenizer and the dense model's vocabulary."""
        return FrequencyTable.load(path, tokenizer_hash(tokenizer), self.vocabulary, self.experts)
