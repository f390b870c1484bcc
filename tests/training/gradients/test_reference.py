"""A preference trainer's reference never sees the policy's loss-free bias, whatever is adapted."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from moe_finetune import SpecializationCallback
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.experts.active_adapter import TrainedAdapter
from moe_finetune.moe.layers import model_facts
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny, tiny_families
from tests.support.tiny_adapter import random_factors
from tests.training.cases import JUDGED, PAIRS

FAMILY = "olmoe"
BIAS = 0.5


def base():
    return tiny.model(FAMILY, num_hidden_layers=2)


def ours(targets, router="frozen"):
    return lambda: add_lora(base(), LoraSection(rank=4, alpha=8.0, targets=targets), router)


def packed(router="frozen", **options):
    chosen = {1: [7, 0, 4]} if "experts" in options else None  # layer 0 has no factors
    lora = LoraSection(rank=4, alpha=8.0, targets=["experts"], **options)
    return lambda: random(add_lora(base(), lora, router, measured=chosen))


def random(model):
    torch.manual_seed(5)
    random_factors(model, 0.1)
    return model


def ia3():
    config = IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    return get_peft_model(base(), config)


def one_layer():
    return get_peft_model(
        base(), LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    )


GATES = {"qwen2_moe": {"shared_expert_gate": "full"}}
WRAPPERS = {
    "attention": ours(["attention"]),
    "experts": ours(["experts"]),
    "router in full": ours(["attention"], "full"),
    "shared factors": packed(shared_outer=True),
    "shared factors, router": packed("lora", shared_outer=True, use_rslora=True),
    "chosen experts": packed("full", experts={"top": 0.3}),
    "chosen experts, shared factors": packed(experts={"top": 0.3}, shared_outer=True),
    "ia3": ia3,
    "one layer of two": one_layer,
}


def biased(model):
    """A balancer on ``model`` whose bias decides the selection."""
    facts = model_facts(model)
    balancer = BiasBalancer(facts.moe_layers, facts.num_experts, 1e-3)
    balancer.bias = {at: torch.linspace(-BIAS, BIAS, 12).roll(at) for at in balancer.bias}
    return balancer


def logits(model, balancer=None):
    with torch.no_grad(), Recorder(model, perturbation=balancer, observe="all"):
        return model(**tiny.batch()).logits


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_bias_acts_with_its_adapter_alone(name):
    model = WRAPPERS[name]().eval()
    balancer = biased(model)
    plain = logits(model)
    assert not torch.equal(logits(model, balancer), plain)
    with model.disable_adapter():
        reference = logits(model)
        assert torch.equal(logits(model, balancer), reference)
    model.base_model.disable_adapter_layers()  # what PEFT's own flag does not show
    assert torch.equal(logits(model, balancer), reference)
    model.base_model.enable_adapter_layers()
    model.add_adapter("ref", model.peft_config["default"])
    model.set_adapter("ref")
    assert torch.equal(logits(model, balancer), logits(model))
    model.set_adapter("default")
    assert not torch.equal(logits(model, balancer), logits(model))


@pytest.mark.parametrize(
    "name", [name for name in WRAPPERS if "factors" in name or "chosen" in name]
)
def test_a_copy_of_packed_factors_computes_the_same_and_does_not_train(name):
    original = WRAPPERS[name]()
    model = copy.deepcopy(original)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    names = {n for n, _ in model.named_parameters()}
    plain = logits(model.eval())
    config = model.peft_config["default"]
    model.add_adapter("ref", config)
    copies = {n.replace(".default.", ".ref.") for n in names if ".default." in n}
    assert {n for n, _ in original.named_parameters()} == names
    assert {n for n, _ in model.named_parameters()} == names | copies
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    for parameter in (one for n, one in model.named_parameters() if n in copies):
        parameter.requires_grad_(False)
    with torch.no_grad():  # as TRL does; only the stacks' factors are copies already
        for n in copies:
            source = model.get_parameter(n.replace(".ref.", ".default."))
            if ".experts." in n:
                assert torch.equal(model.get_parameter(n), source), n
            model.get_parameter(n).copy_(source)
    model.set_adapter("ref")
    assert torch.equal(logits(model), plain)
    with model.disable_adapter():
        assert not torch.equal(logits(model), plain)
    with torch.no_grad():
        for n in trained:
            model.get_parameter(n).add_(0.1)
    assert torch.equal(logits(model), plain)
    model.set_adapter("default")
    assert not torch.equal(logits(model), plain)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "qwen2_moe"])
def test_the_reference_of_a_bfloat16_model_computes_with_the_same_router(family):
    """PEFT's copy would be in bfloat16, round what the adapter started with and select others."""
    model = (tiny_families if family in GATES else tiny).model(family).bfloat16()
    lora = LoraSection(rank=4, alpha=8.0, targets=["attention", "experts"], **GATES.get(family, {}))
    model = random(add_lora(model, lora, "full")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    plain = logits(model)
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():  # as TRL does
        if ".default." in name:
            target = model.get_parameter(name.replace(".default.", ".ref."))
            assert target.dtype is parameter.dtype, name
            target.data.copy_(parameter.data)
    model.set_adapter("ref")
    assert torch.equal(logits(model), plain)


def test_a_frozen_adapter_beside_the_one_that_trains_does_not_carry_the_bias():
    model = WRAPPERS["attention"]().eval()
    model.add_adapter("earlier", model.peft_config["default"])
    model.base_model.set_adapter(["default", "earlier"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    adapter = TrainedAdapter(model)
    assert adapter.names == {"default"}
    assert adapter.acts()
    model.base_model.set_adapter(["earlier"])
    assert not adapter.acts()


def test_a_model_without_adapters_always_has_its_bias():
    assert TrainedAdapter(base()).acts()
    assert TrainedAdapter(base()).names == frozenset()


class StrongBias(TrainerCallback):
    """Gives the method at work a bias that decides the selection."""

    def __init__(self, callback):
        self.callback = callback

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.callback.specialization.balancer.bias = biased(model).bias


COMMON = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "max_steps": 1,
    "logging_steps": 1,
    "learning_rate": 0.0,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": False,
    "router_aux_loss_coef": 0.0,
    "loss_type": "sigmoid",
}


def preference(kind, folder, model, peft_config=None, biased=True):
    """What the policy's (True) and the reference's forwards (False) gave, and the trainer's log."""
    callback = SpecializationCallback("loss_free", export_bias="drop")
    config, trainer_of, rows = {
        "dpo": (DPOConfig, DPOTrainer, PAIRS),
        "kto": (KTOConfig, KTOTrainer, JUDGED),
    }[kind]
    options = {k: v for k, v in COMMON.items() if kind == "dpo" or k != "loss_type"}
    trainer = trainer_of(
        model=model,
        args=config(output_dir=str(folder), **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        callbacks=[callback] + ([StrongBias(callback)] if biased else []),
    )
    seen = {True: [], False: []}

    def note(module, args, output):
        value = float(output.last_hidden_state.double().square().sum())
        seen[torch.is_grad_enabled()].append(value)

    trainer.model.get_base_model().model.register_forward_hook(note)
    trainer.train()
    return seen, trainer.state.log_history[0]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("how", ["ref adapter", "adapter off", "ia3"])
def test_the_reference_of_a_trainer_is_the_unbiased_model(tmp_path, kind, how):
    def run(biased):
        torch.manual_seed(7)
        if how == "adapter off":
            config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
            return preference(kind, tmp_path, base(), config, biased)
        model = WRAPPERS["ia3" if how == "ia3" else "attention"]()
        return preference(kind, tmp_path, model, None, biased)

    (plain, _), (seen, log) = run(False), run(True)
    # KTO's first one is the policy's, for its estimate of the divergence.
    count = {"dpo": 1, "kto": 2}[kind]
    assert seen[False][-count:] == plain[False][-count:]
    assert len(seen[False]) == {"dpo": 1, "kto": 3}[kind]
    assert seen[True] != plain[True]
    rewards = [abs(value) for name, value in log.items() if name.startswith("rewards/")]
    assert max(rewards) > 1e-3, log


def test_a_copy_of_a_trained_model_keeps_its_bias_and_no_trainer(tmp_path):
    model = WRAPPERS["attention"]()
    seen, _ = preference("dpo", tmp_path, model)
    assert seen[True]
    with torch.no_grad():
        trained = model.eval()(**tiny.batch()).logits
        copied = copy.deepcopy(model)
        assert torch.equal(copied(**tiny.batch()).logits, trained)
        with copied.disable_adapter(), model.disable_adapter():
            assert torch.equal(copied(**tiny.batch()).logits, model(**tiny.batch()).logits)
    assert isinstance(copied, PeftModel)
