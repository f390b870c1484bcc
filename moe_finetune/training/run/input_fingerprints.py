"""The content of a run's inputs: noted at its start, compared at ``--resume``."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.data.tokenize import CHAT_TEMPLATES, TRAINING
from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import checkpoint_hash, sha256_file, sha256_json
from moe_finetune.io.hub import opened_commits
from moe_finetune.io.json_file import read_object
from moe_finetune.recipe.data import DataSource, Paths
from moe_finetune.recipe.schema import Recipe

if TYPE_CHECKING:
    from moe_finetune.io.run_folder import RunFolder
    from moe_finetune.io.safetensors_header import TensorInfo
    from moe_finetune.training.run.checkpoint_and_rows import Start

log = logging.getLogger(__name__)
CHECKED_LIBRARIES = ("moe-finetune", "torch", "transformers", "peft", "trl", "accelerate")
_TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "*.jinja", "tiktoken.model")
# Programs that save a config write these; they do not change the model.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "auto_map", "torch_dtype", "dtype")


def note_inputs(run: RunFolder, fingerprints: Mapping[str, str]) -> None:
    """Write ``inputs.json``: an id of the run, its inputs' fingerprints, commits of hub ids."""
    noted = {
        "run": secrets.token_hex(8),
        "inputs": dict(fingerprints),
        "commits": opened_commits(),
    }
    write_atomic(run.inputs, json.dumps(noted, indent=2) + "\n")


def read_inputs(run: RunFolder) -> dict[str, Any]:
    """What :func:`note_inputs` wrote; empty for a run of a version that did not."""
    if not run.inputs.is_file():
        return {}
    return read_object(run.inputs, CheckpointError, "restore it from a copy of the run")


def check_inputs(run: RunFolder, start: Start, fingerprints: Mapping[str, str]) -> None:
    """Refuse inputs with other content than at the run's start; validation rows are reported."""
    noted = read_inputs(run).get("inputs")
    if noted is None:
        log.warning(
            "--resume: %s was started by a version that did not note the content of its inputs, so "
            "changed data or weights cannot be detected",
            run.path,
        )
        return
    changed = [key for key in noted if noted[key] != fingerprints.get(key)]
    if "data.validation" in changed and not _validation_decides(start.recipe):
        changed.remove("data.validation")
        log.warning(
            "--resume: data.validation has other rows than at the start of the run; its losses "
            "before and after are not comparable"
        )
    if changed:
        lines = [f"\n  {key}: {_named(start.recipe, key)}" for key in changed]
        raise RecipeError(
            f"--resume: inputs of {run.path} have another content than at its start, and the steps "
            f"already trained used that:{''.join(lines)}\n"
            "restore them, or choose another --output"
        )


def _validation_decides(recipe: Recipe) -> bool:
    """Whether validation rows choose the trained model or its learning rate."""
    trainer = recipe.trainer
    return bool(
        trainer.get("load_best_model_at_end")
        or trainer.get("save_strategy") == "best"
        or trainer.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
    )


def _named(recipe: Recipe, key: str) -> str:
    """The value of a recipe's key, as far as it has one."""
    value: Any = recipe.to_mapping()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return f"{value!s:.400}" if value is not None else "of model.path"


# -- fingerprints ---------------------------------------------------------------------------------


def fingerprints(start: Start) -> dict[str, str]:
    """Recipe key -> fingerprint, of every file or hub id that training reads."""
    recipe, prints = start.recipe, dict(_files(start.recipe))
    prints["data.train"] = rows_fingerprint(recipe.data.train, recipe)
    if isinstance(recipe.data.validation, float):
        # The side of a row follows from the rows, the share and the seed.
        seed = recipe.seed if recipe.data.seed is None else recipe.data.seed
        split = [prints["data.train"], recipe.data.validation, seed]
        prints["data.validation"] = sha256_json(split)
    elif recipe.data.validation is not None:
        prints["data.validation"] = rows_fingerprint(recipe.data.validation, recipe)
    prints["model.path"] = _base(start)
    prints["model.tokenizer"] = _tokenizer(start)
    if recipe.lora is not None and recipe.lora.start is not None:
        prints["lora.start"] = checkpoint_hash(Path(recipe.lora.start).expanduser())
    if recipe.plugins:
        prints["plugins"] = sha256_json([_module(name) for name in recipe.plugins])
    return prints


def _files(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The fingerprint of each file that a key names; "all" of ``lora.experts`` names none."""
    keys: dict[str, Any] = {"data.chat_template": recipe.data.chat_template}
    if recipe.data.chat_template in (TRAINING, *CHAT_TEMPLATES):
        keys.clear()
    if recipe.lora is not None and recipe.lora.experts != "all":
        keys["lora.experts"] = recipe.lora.experts
    for term, options in recipe.method.terms.items():
        for name, value in options:
            if _is_text(type(options).model_fields[name].annotation):
                keys[f"method.terms.{term}.{name}"] = value
    for key, value in keys.items():
        if isinstance(value, str) and (path := Path(value).expanduser()).is_file():
            yield key, sha256_file(path)


def _is_text(hint: Any) -> bool:
    """Whether an option takes any text, such as a file's path, and not only names that it lists."""
    return hint is str or str in typing.get_args(hint)


def rows_fingerprint(sources: Paths, recipe: Recipe) -> str:
    """Of the rows of ``data.train`` or ``data.validation``, in order."""
    from moe_finetune.data.sources import content_hash, listed

    data = recipe.data
    return sha256_json(
        [
            content_hash(source.path, source.split or data.split)
            for source in (listed(sources, "train") if sources else list[DataSource]())
        ]
    )


def _base(start: Start) -> str:
    """Of config and weights; of each tensor, and of each expert in a stacked one, some parts."""
    from moe_finetune.checkpoint.adapters.files import named_tensors
    from moe_finetune.checkpoint.weight_files import fingerprint

    raw = read_object(start.folder / "config.json", CheckpointError, "copy it again", finite=False)
    parts: list[Any] = [{k: value for k, value in raw.items() if k not in _NOT_OF_THE_MODEL}]
    if start.checkpoint is not None:
        tensors = named_tensors(start.checkpoint)[1]
        parts += [fingerprint(tensors), _of_slices(tensors)]
    return sha256_json(parts)


def _of_slices(tensors: Iterable[TensorInfo]) -> str:
    """Of the middle of each entry of stacked tensors: one expert, of those stored together."""
    from moe_finetune.checkpoint.weight_files import read_slice_middles

    over = hashlib.sha256()
    for info in sorted(tensors, key=lambda info: info.name):
        if len(info.shape) > 2:
            for part in read_slice_middles(info):
                over.update(part)
    return over.hexdigest()


def _tokenizer(start: Start) -> str:
    from moe_finetune.models.config_and_tokenizer import local_folder

    recipe, folder = start.recipe, start.folder
    if recipe.model.tokenizer is not None:
        folder = local_folder(recipe.model.tokenizer, weights=False)
    files = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    return sha256_json([[path.name, sha256_file(path)] for path in sorted(files)])


def _module(name: str) -> list[Any]:
    """Name and source of an installed plugin: every file of Python code of its package."""
    import importlib.util

    from moe_finetune.plugins import module_of

    spec = importlib.util.find_spec(module_of(name).partition(".")[0])
    if spec is None:
        return [name]
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders:
        return [name, sha256_file(Path(spec.origin))] if spec.origin is not None else [name]
    return [
        name,
        *(
            [path.relative_to(folder).as_posix(), sha256_file(path)]
            for folder in folders
            for path in sorted(folder.rglob("*.py"))
        ),
    ]
