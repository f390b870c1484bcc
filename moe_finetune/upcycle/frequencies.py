"""The table of supervised routing: each token's shares of occurrences in the experts' data.

Shape legend: V vocabulary, N experts, C categories. The file is safetensors with
``token_frequencies`` (V, N) float32, rows that sum to 1, and ``token_counts`` (V, N) int64; it
names the tokenizer by a hash, and the cluster of each category. Source: P3 §3.1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_finetune.errors import CheckpointError, DataError

FREQUENCIES = "token_frequencies"
COUNTS = "token_counts"
TOKENIZER = "tokenizer"
CLUSTERS = "clusters"
REMEDY = "; delete its folder and repeat the command with --resume"
# The parts of tokenizer.json that decide how text becomes ids; others pad and truncate batches.
_DECIDES = ("normalizer", "pre_tokenizer", "model", "added_tokens")


@dataclass(frozen=True)
class FrequencyTable:
    """``frequencies_VN`` sums to 1 over N; ``counts_VN`` are the counts behind it.

    ``clusters`` is the column of each category, for readers of the file.
    """

    frequencies_VN: np.ndarray
    counts_VN: np.ndarray
    tokenizer: str
    clusters: Mapping[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        tensors = {FREQUENCIES: self.frequencies_VN, COUNTS: self.counts_VN}
        clusters = json.dumps(dict(self.clusters), ensure_ascii=False)
        save_file(tensors, path, metadata={TOKENIZER: self.tokenizer, CLUSTERS: clusters})

    @classmethod
    def load(cls, path: Path, tokenizer: str, vocabulary: int, experts: int) -> FrequencyTable:
        """Read a table and check that it belongs to this tokenizer, vocabulary and model."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                counted_with = metadata.get(TOKENIZER, "")
                table = cls(file.get_tensor(FREQUENCIES), file.get_tensor(COUNTS), counted_with)
        except (OSError, SafetensorError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not a table of token frequencies ({error}){REMEDY}"
            ) from None
        shape = (vocabulary, experts)
        for name, array in ((FREQUENCIES, table.frequencies_VN), (COUNTS, table.counts_VN)):
            if array.shape != shape:
                raise DataError(
                    f"{path}: '{name}' has shape {array.shape}, but this model "
                    f"has {vocabulary} tokens and {experts} experts; make the table with this "
                    "model's tokenizer"
                )
        if counted_with != tokenizer:
            raise DataError(
                f"{path}: was counted with another tokenizer "
                f"({counted_with[:12] or 'none'} instead of {tokenizer[:12]}){REMEDY}"
            )
        return table


def count_table(
    counts_CV: np.ndarray,
    clusters_C: np.ndarray,
    experts: int,
    tokenizer: str,
    clusters: Mapping[str, int] | None = None,
) -> FrequencyTable:
    """Sum the categories' counts by cluster and divide each token's by their sum.

    A token that occurs nowhere gets ``1 / N`` for every expert: the paper requires rows that sum to
    1 and does not specify these tokens. ``clusters``: cluster of each category, for the file.
    """
    counts_VN = np.stack(
        [counts_CV[clusters_C == expert].sum(0) for expert in range(experts)], axis=1
    )
    empty = [expert for expert in range(experts) if not counts_VN[:, expert].any()]
    if empty:
        raise DataError(
            f"clusters: cluster {empty[0]} is empty, because its categories have no training "
            "tokens; add texts to them or lower clusters.count"
        )
    totals_V1 = counts_VN.sum(1, keepdims=True)
    uniform = np.full(counts_VN.shape, 1.0 / experts)
    shares_VN = np.divide(counts_VN, totals_V1, out=uniform, where=totals_V1 > 0)
    return FrequencyTable(
        shares_VN.astype(np.float32), counts_VN.astype(np.int64), tokenizer, dict(clusters or {})
    )


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of the parts that decide how a checkpoint's tokenizer splits text."""
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            # Read and written by the library, so that versions of the file format do not matter.
            content = json.loads(Tokenizer.from_file(str(file)).to_str())
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{file}: cannot be read ({error}); copy it again") from None
        decisive = {key: content[key] for key in _DECIDES if key in content}
        text = json.dumps(decisive, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    for name in ("tiktoken.model", "tokenizer.model"):
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    raise CheckpointError(
        f"{folder}: no tokenizer.json; copy the tokenizer files of the dense model into it"
    )
