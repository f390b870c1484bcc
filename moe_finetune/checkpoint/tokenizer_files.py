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

from moe_finetune.checkpoint.small_files import carried_files, json_text
from moe_finetune.errors import AdapterError
from moe_finetune.io.checkpoint_files import COPY_AGAIN, GENERATION, read_generation
from moe_finetune.io.json_file import read_object
from moe_finetune.models.chat_template import check_template
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.models.tiktoken_tokenizer import RANKS_FILE
from moe_finetune.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint

SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
SPECIAL = "special_tokens_map.json"
_NAMES = re.compile(
    r"tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|"
    r"chat_template\.(jinja|json)|additional_chat_templates/.*|.*\.(tiktoken|model|spm)"
)
_WORDS = re.compile(r"vocab\.(json|txt)|merges\.txt|added_tokens\.json|.*\.(tiktoken|model|spm)")
_SHARED = 0.9
"""Share of the base's tokens that a tokenizer has which was made from the base's."""
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


def saved_tokenizer(tokenizer: Tokenizer) -> dict[str, bytes]:
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
    return (folder / TOKENIZER).is_file() or (folder / RANKS_FILE).is_file()


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
    if choice == "base":
        return {}, ""
    if not has_tokenizer(adapter):
        return _settings_for_merge(base, adapter, choice)
    ours = load_tokenizer(adapter)
    base_tokenizer = load_tokenizer(base.folder) if has_tokenizer(base.folder) else None
    differing = ["tokens"] if base_tokenizer is None else differences(ours, base_tokenizer)
    if not differing:
        return {}, ""
    if choice is None:
        _check_tokens(base, adapter, ours, base_tokenizer)
    files, note = tokenizer_files(adapter), ""
    if TOKENIZER in files:
        content = json.loads(files[TOKENIZER])
        if content.get("truncation") or content.get("padding"):
            content |= {"truncation": None, "padding": None}
            files[TOKENIZER] = json.dumps(content, ensure_ascii=False, indent=2).encode()
            note = "; its truncation and padding are dropped"
    if base_tokenizer is None or differing != ["tokens"]:
        files |= end_tokens(base, ours)
    return files, f"{_note(differing, adapter)}{note}"


def _note(differing: list[str], adapter: Path) -> str:
    return f"tokenizer: {', '.join(differing)} of {adapter.name}, not of the base"


def _settings_for_merge(
    base: Checkpoint, adapter: Path, choice: str | None
) -> tuple[dict[str, bytes], str]:
    """As :func:`for_merge`, of an adapter's folder with a template or settings and no tokenizer."""
    files = carried_files(adapter, needed=is_tokenizer_file)
    stored = carried_files(base.folder, needed=is_tokenizer_file)
    for name in filter(_WORDS.fullmatch, files):  # of a class that has no tokenizer.json
        if stored.get(name) != files[name]:
            raise AdapterError(
                f"{adapter}: {name} is of a tokenizer without {TOKENIZER}, which cannot be "
                f"compared with the base's; save it with {TOKENIZER}, or choose --tokenizer base"
            )
    settings: dict[str, Any] = {}
    for name in (SPECIAL, SETTINGS, "chat_template.json"):
        if name in files:
            settings |= read_object(adapter / name, AdapterError, COPY_AGAIN)
    template, end = settings.get("chat_template"), settings.get("eos_token")
    if isinstance(template, list):  # templates by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if TEMPLATE in files:
        template = files[TEMPLATE].decode()
    end = end.get("content") if isinstance(end, dict) else end
    if template is None and end is None:
        if choice == "adapter":
            raise AdapterError(f"{adapter}: has no tokenizer; leave --tokenizer out")
        return {}, ""
    if not has_tokenizer(base.folder):
        raise AdapterError(
            f"{adapter}: has a chat template or an end token, but neither it nor the base has a "
            "tokenizer; copy its files into either, or choose --tokenizer base"
        )
    ours, base_tokenizer = load_tokenizer(base.folder), load_tokenizer(base.folder)
    if end is not None and end not in base_tokenizer.get_vocab():
        raise AdapterError(
            f"{adapter}: the base's tokenizer has no token {end!r}, with which this adapter's "
            "answers end; copy the tokenizer that it was trained with into its folder, or choose "
            "--tokenizer base"
        )
    if template is not None:
        check_template(template, adapter)
    ours.chat_template = template or base_tokenizer.chat_template
    if end is not None:
        ours.add_special_tokens({"eos_token": end})
    differing = differences(ours, base_tokenizer)
    if not differing:
        return {}, ""
    if ours.chat_template == base_tokenizer.chat_template:
        template = None
    files = tokenizer_files(base.folder, template, end if end != base_tokenizer.eos_token else None)
    return files | end_tokens(base, ours), _note(differing, adapter)


def _check_tokens(
    base: Checkpoint, adapter: Path, ours: Tokenizer, base_tokenizer: Tokenizer | None
) -> None:
    vocabulary = ours.get_vocab()
    base_ids = {} if base_tokenizer is None else base_tokenizer.get_vocab()
    remedy = "choose with --tokenizer base or --tokenizer adapter"
    for token, index in vocabulary.items():
        if base_ids.get(token, index) != index:
            raise AdapterError(
                f"{adapter}: its tokenizer has {token!r} as {index}, the base's as "
                f"{base_ids[token]}; {remedy}"
            )
    if (shared := len(base_ids.keys() & vocabulary.keys())) < _SHARED * len(base_ids):
        raise AdapterError(
            f"{adapter}: its tokenizer has {shared} of the {len(base_ids)} tokens of the base's, "
            f"so it is another model's; {remedy}"
        )
    config = base.model_config.get_text_config()
    if (largest := max(vocabulary.values())) >= config.vocab_size:
        raise AdapterError(
            f"{adapter}: its tokenizer has token {largest}, but the embedding has "
            f"{config.vocab_size} rows; {remedy}"
        )


def end_tokens(base: Checkpoint, ours: Any) -> dict[str, bytes]:
    """``generation_config.json`` with the training's end tokens before the base's; {} if equal."""
    stored: Mapping[str, Any] = read_generation(base.folder)
    config = base.model_config.get_text_config()
    base_ends = stored.get("eos_token_id", getattr(config, "eos_token_id", None))
    union = reply_ends(ours, base_ends)
    if not union or set(union) == set(base_ends if isinstance(base_ends, list) else [base_ends]):
        return {}
    settings = dict(stored)
    if not stored:
        defaults = {name: getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")}
        settings = {name: value for name, value in defaults.items() if value is not None}
    settings["eos_token_id"] = union[0] if len(union) == 1 else union
    return {GENERATION: json_text(settings).encode()}


def reply_ends(tokenizer: Tokenizer, generation_ends: int | list[int] | None) -> list[int]:
    """Ids of every token that ends a reply, the tokenizer's first.

    They are the tokenizer's end of text, the token with which the chat template ends a turn, and
    ``generation_ends``, the ``eos_token_id`` of a generation config.
    """
    stored = generation_ends if isinstance(generation_ends, list) else [generation_ends]
    ends = [tokenizer.eos_token_id, turn_end(tokenizer), *stored]
    return [token for token in dict.fromkeys(ends) if token is not None]


def turn_end(tokenizer: Tokenizer) -> int | None:
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
