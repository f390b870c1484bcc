"""The tokenizer files of an export: those that training read, with its template and end token.

Files are copied, never saved again: another version of transformers would write other class names
and settings. What a merge needs from an adapter's folder is compared by what both tokenizers say.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.export import carried_files, json_text
from moe_finetune.errors import AdapterError
from moe_finetune.models.loading import load_tokenizer

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint

SETTINGS, TEMPLATE, TOKENIZER = "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"
GENERATION, SPECIAL = "generation_config.json", "special_tokens_map.json"
_NAMES = re.compile(
    r"tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|"
    r"chat_template\.(jinja|json)|additional_chat_templates/.*|.*\.(tiktoken|model|spm)"
)
# Names of transformers 5 for what older versions call by this class, which both read unchanged.
_ONLY_5 = ("TokenizersBackend", "PythonBackend", "SentencePieceBackend")
_READ_BY_ALL = "PreTrainedTokenizerFast"
_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
PROBE = "The 3 quick foxes\n  jumped: émigré, 狐狸 & <b>x</b>!"


def tokenizer_files(
    source: Path, template: str | None = None, end: str | None = None
) -> dict[str, bytes]:
    """Name -> content of the files of ``source``'s tokenizer.

    Args:
        template: a chat template in place of ``source``'s.
        end: an end-of-text token in place of ``source``'s.
    """
    files = carried_files(source, needed=is_tokenizer_file)
    settings = json.loads(files.get(SETTINGS, b"{}"))
    changed = _read_by_all(settings)
    if template is not None:
        files = {n: c for n, c in files.items() if "chat_template" not in n}
        changed.pop("chat_template", None)
        files[TEMPLATE] = without_generation(template).encode()
    if end is not None:
        changed["eos_token"] = end
        if SPECIAL in files:
            specials = json.loads(files[SPECIAL]) | {"eos_token": end}
            files[SPECIAL] = json_text(specials).encode()
    if changed != settings:
        files[SETTINGS] = json_text(changed).encode()
    return files


def saved_tokenizer(tokenizer: Any) -> dict[str, bytes]:
    """Files that the tokenizer itself writes, under a class name that older versions know."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        paths = [path for path in Path(scratch).rglob("*") if path.is_file()]
        files = {path.relative_to(scratch).as_posix(): path.read_bytes() for path in paths}
    settings = json.loads(files.get(SETTINGS, b"{}"))
    if (changed := _read_by_all(settings)) != settings:
        for name in ("is_local", "local_files_only"):
            changed.pop(name, None)
        files[SETTINGS] = json_text(changed).encode()
    return files


def _read_by_all(settings: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's settings under names that transformers 4 reads, too."""
    changed = dict(settings)
    if settings.get("tokenizer_class") in _ONLY_5:
        changed["tokenizer_class"] = _READ_BY_ALL
    if isinstance(settings.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    return changed


def is_tokenizer_file(name: str) -> bool:
    """Return whether a small file of a checkpoint belongs to its tokenizer."""
    return bool(_NAMES.fullmatch(name))


def without_generation(template: str) -> str:
    """``template`` for a plain Jinja: the tags that mark learned text become an ``if true``."""

    def plain(tag: re.Match[str]) -> str:
        return f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}"

    return _GENERATION_TAG.sub(plain, template)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer of its own."""
    return (folder / TOKENIZER).is_file() or (folder / "tiktoken.model").is_file()


def differences(ours: Any, base: Any) -> list[str]:
    """In what a tokenizer differs from the base's, as far as prompts and answers show."""
    differing = []
    if ours.get_vocab() != base.get_vocab() or ours.encode(PROBE) != base.encode(PROBE):
        differing.append("tokens")
    if (ours.chat_template or None) != (base.chat_template or None):
        differing.append("chat template")
    if ours.eos_token != base.eos_token:
        differing.append(f"end token {ours.eos_token!r}")
    return differing


def for_merge(base: Checkpoint, adapter: Path, choice: str | None) -> tuple[dict[str, bytes], str]:
    """Files that replace the base's in a merge, and a note; both empty if the base's are right.

    Args:
        choice: "base" or "adapter"; None takes the adapter's where they say something else.
    """
    if choice == "base" or not has_tokenizer(adapter):
        return {}, ""
    ours = load_tokenizer(adapter)
    theirs = load_tokenizer(base.folder) if has_tokenizer(base.folder) else None
    differing = ["tokens"] if theirs is None else differences(ours, theirs)
    if not differing:
        return {}, ""
    if choice is None and theirs is not None:
        _check_tokens(base, adapter, ours, theirs)
    files, note = tokenizer_files(adapter), ""
    if TOKENIZER in files:
        content = json.loads(files[TOKENIZER])
        if content.get("truncation") or content.get("padding"):
            content |= {"truncation": None, "padding": None}
            files[TOKENIZER] = json.dumps(content, ensure_ascii=False, indent=2).encode()
            note = "; its truncation and padding are dropped"
    if theirs is None or ours.chat_template != theirs.chat_template or differing[-1][:3] == "end":
        files |= end_tokens(base, ours)
    return files, f"tokenizer: {', '.join(differing)} of {adapter.name}, not of the base{note}"


def _check_tokens(base: Checkpoint, adapter: Path, ours: Any, theirs: Any) -> None:
    vocabulary, base_ids = ours.get_vocab(), theirs.get_vocab()
    remedy = "choose with --tokenizer base or --tokenizer adapter"
    for token, index in vocabulary.items():
        if base_ids.get(token, index) != index:
            raise AdapterError(
                f"{adapter}: its tokenizer has {token!r} as {index}, the base's as "
                f"{base_ids[token]}; {remedy}"
            )
    config = base.model_config.get_text_config()
    if (largest := max(vocabulary.values())) >= config.vocab_size:
        raise AdapterError(
            f"{adapter}: its tokenizer has token {largest}, but the embedding has "
            f"{config.vocab_size} rows; {remedy}"
        )


def end_tokens(base: Checkpoint, ours: Any) -> dict[str, bytes]:
    """``generation_config.json`` with the training's end tokens before the base's; {} if equal."""
    file = base.folder / GENERATION
    stored: Mapping[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    config = base.model_config.get_text_config()
    base_ends = stored.get("eos_token_id", getattr(config, "eos_token_id", None))
    base_ends = base_ends if isinstance(base_ends, list) else [base_ends]
    ends = [ours.eos_token_id, turn_end(ours)]
    union = [token for token in dict.fromkeys([*ends, *base_ends]) if token is not None]
    if not union or set(union) == set(base_ends):
        return {}
    settings = dict(stored)
    if not stored:
        defaults = {name: getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")}
        settings = {name: value for name, value in defaults.items() if value is not None}
    settings["eos_token_id"] = union[0] if len(union) == 1 else union
    return {GENERATION: json_text(settings).encode()}


def turn_end(tokenizer: Any) -> int | None:
    """The special token with which the chat template ends an answer; None without one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # whatever a template raises for these turns
        return None
    ending = text.rpartition("bcd")[2]
    tokens = tokenizer(ending, add_special_tokens=False)["input_ids"] if ending else []
    first = next((t for t in tokens if tokenizer.decode([t]).strip()), None)
    return first if first in tokenizer.added_tokens_decoder else None
