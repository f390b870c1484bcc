"""The table of supervised routing: how a token's occurrences share out over the experts' data.

Shape legend: V vocabulary, N experts, C categories. The file is safetensors with
``token_frequencies`` (V, N) float32, rows that sum to 1, and ``token_counts`` (V, N) int64, and
names the tokenizer by a hash. Source: P3 §3.1.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_finetune.errors import CheckpointError, DataError

FREQUENCIES, COUNTS, TOKENIZER = "token_frequencies", "token_counts", "tokenizer"
# What decides how text becomes ids; the rest of the file is padding and truncation of a batch.
_DECIDES = ("normalizer", "pre_tokenizer", "model", "added_tokens")


@dataclass(frozen=True)
class FrequencyTable:
    """``frequencies_VN`` sums to 1 over N; ``counts_VN`` are what they were made from."""

    frequencies_VN: np.ndarray
    counts_VN: np.ndarray
    tokenizer: str

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        tensors = {FREQUENCIES: self.frequencies_VN, COUNTS: self.counts_VN}
        save_file(tensors, path, metadata={TOKENIZER: self.tokenizer})

    @classmethod
    def load(cls, path: Path, tokenizer: str, vocabulary: int, experts: int) -> FrequencyTable:
        """Read a table and check that it belongs to this tokenizer, vocabulary and model.

        Raises:
            DataError: a missing or damaged file, or a table of something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as file:
                held = (file.metadata() or {}).get(TOKENIZER, "")
                table = cls(file.get_tensor(FREQUENCIES), file.get_tensor(COUNTS), held)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"clusters.table: {path} is not a table of token frequencies ({error}); make it "
                "with the stage 'cluster'"
            ) from None
        wanted = (vocabulary, experts)
        for name, array in ((FREQUENCIES, table.frequencies_VN), (COUNTS, table.counts_VN)):
            if array.shape != wanted:
                raise DataError(
                    f"clusters.table: {path}: '{name}' has shape {array.shape}, and this model has "
                    f"{vocabulary} tokens and {experts} experts; make the table with this model's "
                    "own tokenizer"
                )
        if held != tokenizer:
            raise DataError(
                f"clusters.table: {path} was counted with another tokenizer ({held[:12] or 'none'} "
                f"instead of {tokenizer[:12]}); make it again with the stage 'cluster'"
            )
        return table


def count_table(
    counts_CV: np.ndarray, clusters_C: np.ndarray, experts: int, tokenizer: str
) -> FrequencyTable:
    """Sum the categories' counts by cluster and divide each token's by their sum.

    A token that occurs nowhere gets ``1 / N`` for every expert.

    Raises:
        DataError: a cluster without any token.
        ValueError: wrong shapes.
    """
    if clusters_C.shape != (len(counts_CV),):
        raise ValueError(f"clusters_C: got shape {clusters_C.shape}, wanted ({len(counts_CV)},)")
    counts_VN = np.stack([counts_CV[clusters_C == n].sum(0) for n in range(experts)], axis=1)
    empty = [n for n in range(experts) if not counts_VN[:, n].any()]
    if empty:
        raise DataError(
            f"clusters: cluster {empty[0]} is empty, its categories have no training token; add "
            "texts to them or lower clusters.count"
        )
    totals_V1 = counts_VN.sum(1, keepdims=True)
    uniform = np.full(counts_VN.shape, 1.0 / experts)
    shares_VN = np.divide(counts_VN, totals_V1, out=uniform, where=totals_V1 > 0)
    return FrequencyTable(shares_VN.astype(np.float32), counts_VN.astype(np.int64), tokenizer)


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of what decides how a checkpoint's tokenizer cuts text; equal for equal tokenizers.

    Raises:
        CheckpointError: the folder has no tokenizer, or a damaged one.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            # Read and written by the library, so that versions of the file format do not count.
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
