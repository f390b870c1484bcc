"""Moonlight's ``tiktoken.model`` as a fast tokenizer, without its ``tokenization_moonshot.py``.

Each line of the file is a byte string and its rank. The file lacks the pattern that splits text
into pieces and the 256 ids reserved for special tokens after the ranks. transformers' conversion
gets both from here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RANKS_FILE = "tiktoken.model"
RESERVED = 256
_LETTER = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Runs of Han characters are separate pieces; words are split between lower and upper case.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTER}]*[\p{{Ll}}{_LETTER}]+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTER}]+[\p{{Ll}}{_LETTER}]*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_OPTIONS = ("bos_token", "eos_token", "unk_token", "pad_token", "model_max_length", "chat_template")


def read_ranks(file: Path) -> dict[bytes, int]:
    """Read ``token in base64, space, rank`` lines; ranks are 0, 1, 2 ... without a gap."""
    ranks: dict[bytes, int] = {}
    for line_number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{file}, line {line_number}: not a base64 token and its rank; copy the file again"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise CheckpointError(
            f"{file}: {len(ranks)} ranks, which must be 0 to {len(ranks) - 1} and include the "
            "256 bytes; the file is truncated or damaged, copy it again"
        )
    return ranks


def special_tokens(settings: Mapping[str, Any], base: int, file: Path) -> list[str]:
    """Names of the reserved ids from ``base`` on: those in ``file``, or else a filler."""
    added = settings.get("added_tokens_decoder", {}).items()
    named = {int(index): _content(token) for index, token in added}
    outside = sorted(index for index in named if not base <= index < base + RESERVED)
    if outside:
        raise CheckpointError(
            f"{file}: added token {outside[0]} is outside the {RESERVED} ids reserved from {base}, "
            f"the number of ranks in {RANKS_FILE}: copy both files from the same checkpoint"
        )
    reserved = range(base, base + RESERVED)
    return [named.get(index, f"<|reserved_token_{index}|>") for index in reserved]


def load_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    """Build the fast tokenizer of a folder with ``tiktoken.model`` and ``tokenizer_config.json``.

    Splits and merges like tiktoken with :data:`PATTERN`. Special tokens in a text are recognized;
    none are added at its ends.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = read_ranks(folder / RANKS_FILE)
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; {RANKS_FILE} cannot be read without it")
    settings = read_object(file, CheckpointError, "copy it again")
    names = special_tokens(settings, len(ranks), file)
    converter: Any = TikTokenConverter(pattern=PATTERN, extra_special_tokens=names)
    # The tiktoken package, which would read the file, is not needed for its two columns.
    converter.load_tiktoken_bpe = lambda _: ranks
    options = {k: _content(settings[k]) for k in _OPTIONS if settings.get(k) is not None}
    template = folder / "chat_template.jinja"
    if template.is_file():
        options["chat_template"] = template.read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        additional_special_tokens=[
            _content(t) for t in settings.get("additional_special_tokens") or []
        ],
        clean_up_tokenization_spaces=False,
        **options,
    )


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token
