"""Which program wrote an adapter, by what is in its folder, and in which form."""

from moe_finetune.checkpoint.adapters.factor_layout import made_by_megatron_bridge, made_by_unsloth
from moe_finetune.checkpoint.adapters.files import AUTOMODEL_FILE, METADATA, Adapter
from moe_finetune.checkpoint.adapters.forms.expert_keys import expert_keys

_FORMS = {
    frozenset({"peft"}): "PEFT's stacks (peft)",
    frozenset({"per-expert"}): "a pair for each expert's matrix (per-expert)",
    frozenset({"listed"}): "a list of each expert's matrices by projection (unsloth-lists)",
    frozenset({"stacked"}): "a tensor for each projection of all experts (stacked)",
    frozenset({"stacked", "per-expert"}): "shared factors and each expert's own (megatron-bridge)",
    frozenset({"grouped"}): "Automodel's grouped factors (automodel)",
}


def maker_of(adapter: Adapter) -> str:
    """The program, or "unknown" where nothing in the folder shows it."""
    config, kinds = adapter.config, {key.kind for key in expert_keys(adapter)}
    version = config.get("peft_version")
    signs = {
        "moe-finetune": (adapter.folder / METADATA).is_file(),
        "Unsloth": made_by_unsloth(config) or kinds == {"listed"},
        "NeMo Automodel": (adapter.folder / AUTOMODEL_FILE).is_file() or "grouped" in kinds,
        "Megatron-Bridge": made_by_megatron_bridge(config) or kinds == {"stacked", "per-expert"},
        "Tinker, or written for vLLM or SGLang": kinds == {"stacked"},
        f"PEFT {version}": version is not None,
    }
    return next((maker for maker, shown in signs.items() if shown), "unknown")


def form_of(adapter: Adapter) -> str:
    """The form of the experts' factors."""
    kinds = frozenset(key.kind for key in expert_keys(adapter))
    return _FORMS.get(kinds, "no factors of experts" if not kinds else "several forms")
