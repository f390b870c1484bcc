"""Save what training produced: an ordinary PEFT adapter, or without one the whole model."""

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from moe_finetune.checkpoint.adapters.files import (
    PREFIX,
    SHARED_OUTER,
    named_tensors,
    write_metadata,
)
from moe_finetune.checkpoint.adapters.files import WEIGHTS as ADAPTER_FILE
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint
from moe_finetune.checkpoint.saved_names import keep_names
from moe_finetune.checkpoint.small_files import carried_files, public_name, write_card
from moe_finetune.checkpoint.tokenizer_files import (
    GENERATION,
    differences,
    end_tokens,
    has_tokenizer,
    is_tokenizer_file,
    saved_tokenizer,
    tokenizer_files,
)
from moe_finetune.checkpoint.weight_files import fingerprint
from moe_finetune.data.tokenize import TRAINING
from moe_finetune.errors import MoeFinetuneError
from moe_finetune.io import output_folder, sync, write_small
from moe_finetune.io.check_config import QUANTIZATION
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.config_and_tokenizer import load_tokenizer, local_folder
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.experts.lora_on_chosen import for_all_experts, selected_experts
from moe_finetune.moe.experts.lora_shared import shared_factors
from moe_finetune.moe.layers import moe_layers
from moe_finetune.quantization.codec import NF4
from moe_finetune.quantization.weight import quantized
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights, whole_model
from moe_finetune.training.save_and_resume.saved_bias import (
    add_bias,
    change_config,
    name_bias,
    save_beside,
)

_ADAPTER = "A LoRA adapter for {}, trained with moe-finetune; PEFT loads it."


def save_trained(
    model: nn.Module,
    tokenizer: Tokenizer,
    recipe: Recipe,
    output: Path,
    balancer: BiasBalancer | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    base: Checkpoint | None = None,
) -> Path:
    """Write ``adapter/``, or ``merged/`` when the model trained without an adapter, on every rank.

    The folder appears whole or not at all. ``metadata``: of an earlier :func:`run_metadata`;
    ``overwrite``: replace the folder of a training that ended earlier; ``base``: the recipe's, if
    open, whose tensor names and small files a whole model then keeps.
    """
    from peft import PeftModel

    adapted, run = isinstance(model, PeftModel), RunFolder(output)
    target = run.adapter if adapted else run.merged
    dtype = getattr(torch, recipe.model.dtype)
    weights = trained_weights(model) if adapted else whole_model(model, dtype)
    if ranks.rank() > 0:
        ranks.barrier()
        return target
    if adapted:
        weights = for_all_experts(model, weights, [layer.index for layer in moe_layers(model)])
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    with output_folder(target, size, overwrite) as partial:
        if adapted:
            name_base(model, recipe)
            write_adapter(_peft_config(model), weights, partial)
            assert recipe.lora is not None
            metadata = metadata or run_metadata(recipe)
            describe_adapter(model, partial, recipe.lora.dropout, balancer, metadata, packed=False)
            write_files(partial, training_tokenizer(tokenizer, recipe))
            _card(recipe, partial, "adapter", library="peft", origin=_ADAPTER)
        else:
            _write_model(model, tokenizer, weights, recipe, partial, balancer, base)
        for path in partial.rglob("*"):
            sync(path)
    ranks.barrier()
    return target


def _write_model(
    model: Any,
    tokenizer: Tokenizer,
    weights: dict[str, torch.Tensor],
    recipe: Recipe,
    folder: Path,
    balancer: BiasBalancer | None,
    base: Checkpoint | None,
) -> None:
    exported = balancer if recipe.method.export_bias == "write" else None
    if exported is not None:
        weights = add_bias(exported, moe_layers(model), weights)
    if base is not None:
        keep_names(model, base)
    model.save_pretrained(folder, state_dict=weights)
    # transformers names the type that was trained.
    change_config(folder, lambda _: {"dtype": recipe.model.dtype})
    files = training_tokenizer(tokenizer, recipe)
    if base is not None:
        # Names of keys, which readers of other versions know, and whatever training changed there.
        keys = [key for key in ("dtype", "torch_dtype") if key in base.config] or ["dtype"]
        changes = dict.fromkeys(keys, recipe.model.dtype) | {QUANTIZATION: None}
        carried = carried_files(base.folder, changes)
        (folder / GENERATION).unlink(missing_ok=True)
        write_files(folder, {n: c for n, c in carried.items() if not is_tokenizer_file(n)})
        if has_tokenizer(base.folder):
            theirs = load_tokenizer(base.folder)
            if differences(tokenizer, theirs):
                files |= end_tokens(base, tokenizer)
    write_files(folder, files)
    if exported is not None:
        name_bias(moe_layers(model), folder)
    _card(recipe, folder, "trained")


def training_tokenizer(tokenizer: Tokenizer, recipe: Recipe) -> dict[str, bytes]:
    """The files of the tokenizer that training read, with its chat template and end token.

    A tokenizer that is not that of the files, as another trainer may have one, is saved again.
    """
    path = recipe.model.tokenizer or recipe.model.path
    try:
        source = local_folder(
            path, False, None if recipe.model.tokenizer else recipe.model.revision
        )
        stored = load_tokenizer(source)
    except MoeFinetuneError:
        return saved_tokenizer(tokenizer)
    differing = differences(tokenizer, stored)
    if "tokens" in differing:
        return saved_tokenizer(tokenizer)
    own = "chat template" in differing and recipe.data.chat_template != TRAINING
    end = tokenizer.eos_token if tokenizer.eos_token != stored.eos_token else None
    return tokenizer_files(source, tokenizer.chat_template if own else None, end)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files, by path in ``folder``."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_small(folder, name, content)


def _card(recipe: Recipe, folder: Path, what: str, **words: str) -> None:
    method = recipe.method.preset
    write_card(
        folder,
        recipe.model.path,
        f"{public_name(recipe.model.path)}, {what}" + (f" with {method}" if method else ""),
        method=method,
        data=_data_names(recipe),
        **words,
    )


def _data_names(recipe: Recipe) -> list[str]:
    """Names of the training data: hub ids, and files and folders without their paths."""
    sources = [recipe.data.train] if isinstance(recipe.data.train, str) else recipe.data.train
    return [public_name(s if isinstance(s, str) else s.path) for s in sources]


def name_base(model: nn.Module, recipe: Recipe) -> None:
    """Write the base's name into the adapter's config: hub id and revision, or absolute path."""
    config, folder = _peft_config(model), Path(recipe.model.path).expanduser()
    if folder.is_dir():
        config.base_model_name_or_path = str(folder.resolve())
    else:
        config.base_model_name_or_path = recipe.model.path
        config.revision = recipe.model.revision


def open_base(recipe: Recipe) -> Checkpoint | None:
    """The recipe's base; None if the model began with random weights."""
    if recipe.model.init != "checkpoint":
        return None
    folder = local_folder(recipe.model.path, revision=recipe.model.revision)
    return open_checkpoint(folder, stored=True)


def base_fingerprint(base: Checkpoint | None) -> dict[str, str]:
    """The fingerprint of a run's base, as stored in the adapter's metadata."""
    if base is None:
        return {}
    key, tensors = named_tensors(base)
    return {key: fingerprint(tensors)}


def run_metadata(recipe: Recipe, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """The part of an adapter's metadata about the run that trained it.

    ``checkpoint``: the recipe's base, if already open.
    """
    return {
        "method": recipe.method.preset,
        "recipe": recipe.hash,
        "data": _data_names(recipe),
        **base_fingerprint(checkpoint or open_base(recipe)),
    }


def describe_adapter(
    model: Any,
    folder: Path,
    dropout: float,
    balancer: BiasBalancer | None,
    run: Mapping[str, Any] | None = None,
    packed: bool = True,
) -> None:
    """Write what PEFT's files cannot contain: chosen experts, their dropout, a routing bias.

    ``packed``: the adapter next to it has factors of the chosen experts only.
    """
    chosen = selected_experts(model)
    metadata: dict[str, Any] = (
        {"quantization": NF4} if any(map(quantized, model.parameters())) else {}
    )
    if chosen is not None and not packed:
        metadata["chosen_experts"] = {str(layer): list(ids) for layer, ids in chosen.items()}
        chosen = None
    if packed and (shared := shared_factors(model)):
        metadata[SHARED_OUTER] = {name.removeprefix(PREFIX): one for name, one in shared.items()}
    write_metadata(folder, experts=chosen, experts_dropout=dropout, **metadata, **(run or {}))
    if balancer is not None:
        save_beside(balancer, moe_layers(model), folder)


def _peft_config(model: Any) -> Any:
    return model.peft_config[model.active_adapter]


def write_adapter(config: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write PEFT's two files, without the model card that its ``save_pretrained`` adds."""
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy(config)
    config.inference_mode = True
    for name in ("target_modules", "target_parameters"):
        if not isinstance(targets := getattr(config, name), str | None):
            setattr(config, name, sorted(targets))  # the order of a set differs between processes
    config.save_pretrained(str(folder))
