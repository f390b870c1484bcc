"""The variants of a timed step: baselines, and ours with each set of terms."""

import contextlib
import tempfile
from pathlib import Path

import torch
from geometries import config_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.objective import Objective
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.experts.grouped_products import Kernel
from moe_finetune.moe.large.quantized_weights import quantize_model
from moe_finetune.moe.layers import backbone_of, model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.measures.routing_statistics import TrainingStatistics

ALL_TERMS = {
    "load_balance": {"weight": 1e-3, "variant": "deepseek"},
    "z_loss": {"weight": 1e-3},
    "orthogonality": {"weight": 1e-3},
    "variance": {"weight": 1e-3},
    "specialization": {"weight": 2e-4},
    "coupling": {"weight": 1e-4},
    "erc": {"weight": 1.0},
    "router_orthogonality": {"weight": 1e-2},
    "dpp": {"weight": 0.1},
    "ncl": {"weight": 0.1},
}
BASELINES = ("attention-only", "stock-peft")
COMPILED = ", compiled"


def build(arguments, experts: bool, quantized: bool = False):
    """A random model with LoRA on attention, and on experts and full routers if ``experts``.

    ``quantized``: frozen weights are stored as nf4.
    """
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(
            config_of(arguments), dtype=getattr(torch, arguments.dtype)
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.05)
    if quantized:
        quantize_model(model)
    targets = ["attention", "shared_experts", "experts"] if experts else ["attention"]
    lora = LoraSection(rank=arguments.rank, alpha=4.0 * arguments.rank, targets=targets)
    model = add_lora(model, lora, "full" if experts else "frozen")
    if not arguments.train_router:
        for name, parameter in model.named_parameters():
            if "gate.modules_to_save" in name:
                parameter.requires_grad_(False)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def adapts_experts(variant: str) -> bool:
    """Return whether the variant also has LoRA on the experts."""
    return not variant.startswith("attention-only")


def terms_of(variant: str, moe_layers: int) -> dict | None:
    """Loss terms of a variant of ours in a model of ``moe_layers``; None for a baseline.

    Coupling joins two MoE layers, so a model with one layer omits it.
    """
    if variant in BASELINES:
        return None
    terms = _all_terms_of(variant)
    return terms if moe_layers > 1 else {n: t for n, t in terms.items() if n != "coupling"}


def _all_terms_of(variant: str) -> dict:
    if variant in ("ours", "ours+metrics"):
        return {}
    if variant == "ours+all":
        return ALL_TERMS
    if variant.startswith("ours+"):
        name = variant.removeprefix("ours+")
        return PRESETS[name].method()["terms"] if name in PRESETS else {name: ALL_TERMS[name]}
    raise SystemExit(f"unknown variant {variant}")


def random_table(facts) -> str:
    """Write a file of token frequencies ``(V, E)`` for ``supervised_routing``; return its path."""
    path = Path(tempfile.gettempdir()) / f"frequencies-{facts.vocab_size}-{facts.num_experts}"
    if not path.exists():
        frequencies_VE = torch.rand(facts.vocab_size, facts.num_experts).softmax(-1)
        save_file({"token_frequencies": frequencies_VE}, path)
    return str(path)


class Variant:
    """A timed variant: a model, an optimizer, and the hooks that are installed while it runs.

    ``name`` may end with how it runs: ``, compiled``, ``, nf4``, or, of stock PEFT, the
    implementation of the experts.
    """

    def __init__(self, name, model):
        self.name, self.model = name, model
        name, _, how = name.partition(", ")
        self.experts = how if how in ("grouped_mm", "eager") else None
        parameters = [p for p in model.parameters() if p.requires_grad]
        # Without values (a dry run on the meta device) nothing can be fused or read.
        dry = parameters[0].is_meta
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=not dry)
        facts = model_facts(model)
        terms = terms_of(name, len(facts.moe_layers))
        if terms and "supervised_routing" in terms:
            terms["supervised_routing"]["table"] = random_table(facts)
        self.context = contextlib.nullcontext
        if terms is not None:
            objective = Objective(resolve_method({"terms": terms}).terms, facts) if terms else None
            observers = []
            if name == "ours+metrics":
                observers = [TrainingStatistics(facts.moe_layers, facts.num_experts)]
            kernel: Kernel = "grouped" if dry else "auto"
            self.context = lambda: Recorder(model, objective, observers=observers, kernel=kernel)
        if how == "compiled":
            # Hooks are compiled into the layers, so they stay.
            self.context().__enter__()
            self.context = contextlib.nullcontext
            for layer in backbone_of(model).layers:
                layer.compile()

    def step(self, batch) -> None:
        config = self.model.config
        before = config._experts_implementation
        config._experts_implementation = self.experts or before
        try:
            with self.context():
                self.model(**batch).loss.backward()
        finally:
            config._experts_implementation = before
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def variants_of(arguments, names) -> dict[str, Variant]:
    """The variants of ``names``; variants with the same weights share a model."""
    models, made = {}, {}
    for name in names:
        nf4 = name.endswith(", nf4")
        key = name if name.endswith(COMPILED) else (adapts_experts(name), nf4)
        if key not in models:
            models[key] = build(arguments, adapts_experts(name), nf4)
        made[name] = Variant(name, models[key])
    return made
