"""An adapter in PEFT: which tensors it adapts, and its factors in PEFT's own modules.

``PeftModel.from_pretrained`` is not used: PEFT 0.21 applies the renamings of transformers 4 to keys
that are already right, loses factors that way (shared experts of Laguna and DeepSeek-OCR-2), and
only warns. Here every tensor goes where its name says, and none may be missing.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from moe_finetune.checkpoint.adapters.files import CONFIG, PREFIX, Adapter
from moe_finetune.checkpoint.tensor_names import on_meta
from moe_finetune.checkpoint.weight_files import read_tensor
from moe_finetune.errors import AdapterError, reason_of

# A router's buffer is saved only where the router trains.
MAY_LACK = "e_score_correction_bias"


def lora_config(adapter: Adapter) -> Any:
    """The adapter's config as PEFT's, with initial values, some of which would need weights."""
    from peft import LoraConfig

    names = {field.name for field in fields(LoraConfig)} - {"peft_type", "auto_mapping"}
    options = {key: value for key, value in adapter.config.items() if key in names}
    with _refused(adapter):
        return LoraConfig(**options | {"init_lora_weights": True, "inference_mode": True})


def wrap(model: nn.Module, adapter: Adapter) -> Any:
    """``model`` with PEFT's modules for the adapter's config, with initial values."""
    from peft import PeftModel, PeftModelForCausalLM

    from moe_finetune.moe.experts.lora_factors import quiet_patterns

    config = lora_config(adapter)
    kind = PeftModelForCausalLM if config.task_type == "CAUSAL_LM" else PeftModel
    with _refused(adapter), warnings.catch_warnings(), quiet_patterns():
        warnings.simplefilter("ignore")
        return kind(model, config)


@contextmanager
def _refused(adapter: Adapter) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # PEFT's checks raise half a dozen types
        raise AdapterError(
            f"{adapter.folder / CONFIG}: PEFT cannot apply it to the base: {reason_of(error):.300}"
        ) from error


@torch.no_grad()
def fill(wrapped: Any, adapter: Adapter, partial: bool = False) -> None:
    """Copy the adapter's tensors into PEFT's modules, of a ``partial`` model those that it has."""
    from peft import get_peft_model_state_dict

    stored = adapter.tensors
    live = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    targets = {key.removeprefix(PREFIX): tensor for key, tensor in live.items()}
    others = dict(wrapped.named_parameters())
    present = stored.keys() | adapter.tables.keys()
    missing = sorted(k for k in targets.keys() - present if not k.endswith(MAY_LACK))
    if missing:
        raise AdapterError(
            f"{adapter.folder}: adapter tensor '{missing[0]}' is missing ({len(missing)} in all)"
        )
    for key, info in stored.items():
        # A whole embedding that was saved with its factors is no part of what PEFT would save.
        target = targets.get(key, others.get(PREFIX + key))
        if target is None and partial:
            continue
        if target is None or tuple(target.shape) != info.shape:
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' {list(info.shape)} has no place in PEFT"
            )
        target.copy_(read_tensor(info))


@dataclass(frozen=True)
class LoraModule:
    """One of PEFT's LoRA modules, by its ``path`` in the adapter's keys; it adapts ``loaded``."""

    path: str
    loaded: str
    module: Any

    @property
    def embedding(self) -> bool:
        return "default" in self.module.lora_embedding_A

    @torch.no_grad()
    def deltas(self, adapter: Adapter) -> Iterator[Tensor]:
        """The change by PEFT in float32: of a matrix, or of each matrix of a stack in turn.

        The module, on the meta device, has its factors only meanwhile.
        """
        module: Any = self.module
        suffix, names = (
            ("", ("embedding_A", "embedding_B")) if self.embedding else (".weight", "AB")
        )
        factors = {
            f"lora_{name}.default{suffix}": read_tensor(
                adapter.tensors[f"{self.path}.lora_{name}{suffix}"]
            ).float()
            for name in names
        }
        assert not module.load_state_dict(factors, strict=False, assign=True).unexpected_keys
        try:
            if not hasattr(module, "parameter_name"):
                yield module.get_delta_weight("default")
            elif module.num_experts > 1:
                lhs_EOr, rhs_ErI, scale = module.get_delta_factors("default")
                for lhs_Or, rhs_rI in zip(lhs_EOr, rhs_ErI, strict=True):
                    yield (lhs_Or @ rhs_rI) * scale
            else:  # PEFT would move the product to the base's device
                a_rI, b_Or = (getattr(module, f"lora_{f}")["default"].weight for f in "AB")
                yield (b_Or @ a_rI) * module.scaling["default"]
        finally:
            module.to("meta")


def modules_of(wrapped: Any) -> Iterator[LoraModule]:
    """PEFT's modules with factors."""
    from peft.tuners.lora import LoraLayer

    for name, module in wrapped.named_modules():
        if isinstance(module, LoraLayer) and "default" in module.scaling:
            path = name.removeprefix(PREFIX)
            parameter = getattr(module, "parameter_name", "weight")
            loaded = f"{path.replace('.base_layer', '')}.{parameter}"
            yield LoraModule(path, loaded, module)


@dataclass(frozen=True)
class Target:
    """A tensor that PEFT adapts: its ``path`` in the adapter's keys, its ``name`` in the model.

    ``inputs_first``: the class stores stacks as (E, I, O).
    """

    path: str
    name: str
    rank: int
    scale: float
    embedding: bool
    inputs_first: bool = False


def targets_in_class(adapter: Adapter, config: Any) -> tuple[list[Target], set[str]]:
    """What PEFT adapts in transformers' class, and the keys that it would save."""
    from peft import get_peft_model_state_dict

    with torch.device("meta"):
        wrapped = wrap(on_meta(config), adapter)
    targets = [
        Target(
            path=lora.path,
            name=lora.loaded,
            rank=lora.module.r["default"],
            scale=lora.module.scaling["default"],
            embedding=lora.embedding,
            inputs_first=getattr(lora.module.get_base_layer(), "is_transposed", False),
        )
        for lora in modules_of(wrapped)
    ]
    saved = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return targets, {key.removeprefix(PREFIX) for key in saved}


def targets_by_name(
    adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Target], set[str]]:
    """The same in a model with a module for each tensor of ``shapes``, by PEFT's own rules."""
    config = lora_config(adapter)
    with _refused(adapter):
        return _by_rules(config, shapes)


def _by_rules(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[Target], set[str]]:
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    parameters = tuple(f".{name}" for name in config.target_parameters or ())
    targets = []
    expected = set()
    biases = []
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        embedding = path.endswith("embed_tokens")
        module = len(shape) == 2 and leaf == "weight"
        if config.target_modules == "all-linear":
            module = module and not embedding and not path.endswith("lm_head")
        else:
            module = module and bool(check_target_module_exists(config, path))
        if module or f".{name}".endswith(parameters):
            ranks, alphas = config.rank_pattern, config.alpha_pattern
            key = path if module else name
            rank = ranks.get(get_pattern_key(ranks, key), config.r)
            alpha = alphas.get(get_pattern_key(alphas, key), config.lora_alpha)
            scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
            targets.append(
                Target(
                    path=path,
                    name=name,
                    rank=rank,
                    scale=scale,
                    embedding=embedding,
                )
            )
            factors = ["embedding_A", "embedding_B"] if embedding else ["A.weight", "B.weight"]
            factors += ["magnitude_vector"] if config.use_dora else []
            expected |= {f"{path}.lora_{factor}" for factor in factors}
        if is_saved(name, config.modules_to_save):
            expected.add(name)
        elif "bias" in name:
            biases.append(name)
    adapted = {target.path for target in targets}
    for path, _, leaf in (name.rpartition(".") for name in biases):
        if path in adapted and config.bias != "none":
            expected.add(f"{path}.base_layer.{leaf}")
        elif config.bias == "all":
            expected.add(f"{path}.{leaf}")
    return targets, expected


def is_saved(name: str, modules_to_save: Iterable[str] | None) -> bool:
    """Whether PEFT saves the tensor ``name``: one of its modules' paths ends as the config says."""
    return any(f"{end}." in PREFIX + name for end in modules_to_save or ())
