"""Config, model and tokenizer of a checkpoint, without remote code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import (
    CheckpointError,
    did_you_mean,
    reason_of,
)
from moe_finetune.io.check_config import QUANTIZATION, SAME_CLASS, asks_for_a_package
from moe_finetune.io.checkpoint_files import COPY_AGAIN, read_config
from moe_finetune.io.folder import like
from moe_finetune.io.hub import download
from moe_finetune.io.json_file import read_object
from moe_finetune.models import Family, check_supported, family_of
from moe_finetune.models.chat_template import check_template
from moe_finetune.models.class_structure import first_line
from moe_finetune.models.family_lookup import warn_of_plugins
from moe_finetune.models.tiktoken_tokenizer import RANKS_FILE, load_tiktoken

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

# dots.llm1 is published with null, by which transformers' router divides.
_INSTEAD_OF_NULL = {"dots1": {"n_group": 1, "topk_group": 1}}


def existing_folder(path: str | Path, revision: str | None = None) -> Path | None:
    """The folder of ``path``, or None for a hub id; refuses what can be neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{path}: a folder has no revision '{revision}'; leave model.revision out, or give "
                "the hub id"
            )
        return folder
    parts = str(path).split("/")
    if folder.is_absolute() or len(parts) != 2 or parts[0] in ("", ".", "..", "~"):
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        nearest = like(folder, (sibling for sibling in siblings if sibling.is_dir()))
        relative = "" if folder.is_absolute() else f" (relative to {Path.cwd()})"
        remedy = nearest or "; give a checkpoint folder, or a hub id such as Qwen/Qwen3-30B-A3B"
        raise CheckpointError(f"{path}: no such folder{relative}{remedy}")
    runs = sorted(file.parent for file in Path(parts[0]).glob("*/recipe.yaml"))
    if runs:  # a folder of runs, and no organization of the hub
        all_runs = f"; {parts[0]} has {', '.join(run.name for run in runs)}"
        raise CheckpointError(f"{path}: no such run{like(folder, runs) or all_runs}")
    return None


def local_folder(path: str | Path, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of ``path``: itself, or the local copy of a hub id such as ``org/name``.

    A hub id that is not in the cache is downloaded at ``revision`` (a branch, tag or commit),
    without code files; ``weights=False`` skips the safetensors files. For a path in a run's folder,
    the family that its recipe declares is registered.
    """
    folder = existing_folder(path, revision)
    if folder is not None:
        warn_of_plugins(folder)
        return folder
    named = str(path) if revision is None else f"{path} at revision '{revision}'"
    try:
        return download(str(path), revision, weights)
    except Exception as error:  # the hub's client raises exceptions of four libraries here
        reason = reason_of(error)
        raise CheckpointError(
            f"{named}: neither a local folder nor a model on the hub ({reason}); check the name, "
            "the network and your access, or give a local folder"
        ) from error


def open_config(path: str | Path) -> tuple[PreTrainedConfig, Family]:
    """Return the config and family of a supported checkpoint, without references to remote code."""
    folder = local_folder(path, weights=False)
    raw = read_config(folder, quantized=True)
    if raw.get(QUANTIZATION) is not None:
        from moe_finetune.quantization.formats import format_of  # needs torch, this file does not

        format_of(raw, folder / "config.json")
    family = family_of(raw, folder)
    config = parse_config(folder)
    check_supported(config, family)
    return config, family


def load_config(path: str | Path) -> PreTrainedConfig:
    """The config of :func:`open_config`."""
    return open_config(path)[0]


def parse_config(folder: Path) -> PreTrainedConfig:
    """transformers' config of a folder with a checked ``config.json``, even if unsupported."""
    from transformers import AutoConfig
    from transformers.activations import ACT2FN

    config_file = folder / "config.json"
    raw = read_object(config_file, CheckpointError, COPY_AGAIN, finite=False)
    if raw.get("model_type") == "deepseek":
        from moe_finetune.models.deepseek_moe import register

        register()
    try:
        if raw.get("model_type") in SAME_CLASS:
            config = AutoConfig.for_model(**raw | {"model_type": SAME_CLASS[raw["model_type"]]})
            config.name_or_path = str(folder)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library's class may raise anything for an unexpected value
        raise CheckpointError(
            f"{config_file} has a value that this model type rejects: {first_line(error)}"
        ) from error
    for key, value in _INSTEAD_OF_NULL.get(config.model_type, {}).items():
        if getattr(config, key) is None:
            setattr(config, key, value)
    if asks_for_a_package(raw):
        config._attn_implementation = None  # model.attn_implementation decides
    # Quantized tensors are read as the floats that they stand for.
    for key in ("auto_map", QUANTIZATION):
        if hasattr(config, key):
            delattr(config, key)
    activation = getattr(config, "hidden_act", None)
    if activation is not None and activation not in ACT2FN:
        hint = did_you_mean(str(activation), ACT2FN)
        raise CheckpointError(f"{config_file}: hidden_act {activation!r:.60} is unknown{hint}")
    return config


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of a checkpoint, exactly as its files define it.

    ``tokenizer.json`` is used unchanged. The class named in ``tokenizer_config.json`` is not used,
    because for the published DeepSeek checkpoints transformers 5 builds a different tokenizer from
    it. ``add_bos_token`` there, which transformers 5 drops, is honored, because those models saw it
    in training. Without ``tokenizer.json``, Moonlight's ``tiktoken.model`` is converted.
    """
    from transformers import PreTrainedTokenizerFast

    folder = local_folder(path, weights=False)
    if (folder / "tokenizer.json").is_file():
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(
                f"{folder}: its tokenizer files cannot be read ({error}); copy them again"
            ) from error
        templates = tokenizer.chat_template or {}
        named = templates if isinstance(templates, dict) else {"default": templates}
        for template in named.values():
            check_template(template, folder)
        file = folder / "tokenizer_config.json"
        settings = read_object(file, CheckpointError, COPY_AGAIN) if file.is_file() else {}
        if settings.get("add_bos_token"):
            bos = tokenizer.bos_token_id
            if bos is not None and tokenizer.encode("")[:1] != [bos]:
                tokenizer.add_bos_token = True
        return tokenizer
    if (folder / RANKS_FILE).is_file():
        return load_tiktoken(folder)
    raise CheckpointError(
        f"{folder}: neither tokenizer.json nor {RANKS_FILE}; copy the tokenizer files of the base "
        "model into it"
    )
