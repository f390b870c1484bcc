"""Keys of an adapter's config: real ones of every PEFT open, and an unknown option is refused."""

import json

import pytest
from peft import LoraConfig, TaskType

from moe_finetune.checkpoint.adapters.config import no_merge_because, read_config
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import AdapterError
from tests.checkpoint.damage import CONFIG, configure, refuse

# What LoraConfig(r=4, lora_alpha=12) saves, read in the releases themselves.
PEFT_0_15 = {
    "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": None,
    "base_model_name_or_path": "base", "revision": None, "inference_mode": True, "r": 4,
    "target_modules": ["q_proj"], "exclude_modules": None, "lora_alpha": 12, "lora_dropout": 0.05,
    "fan_in_fan_out": False, "bias": "none", "use_rslora": False, "modules_to_save": None,
    "init_lora_weights": True, "layers_to_transform": None, "layers_pattern": None,
    "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": None,
    "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {},
    "eva_config": None, "corda_config": None, "use_dora": False, "layer_replication": None,
    "lora_bias": False,
}  # fmt: skip
PEFT_0_17 = PEFT_0_15 | {
    "use_qalora": False, "qalora_group_size": 16, "target_parameters": None,
}  # fmt: skip
PEFT_0_19 = PEFT_0_17 | {
    "peft_version": "0.19.1", "lora_ga_config": None, "alora_invocation_tokens": None,
    "use_bdlora": None, "arrow_config": None, "ensure_weight_tying": False,
}  # fmt: skip
PEFT_0_21 = PEFT_0_19 | {
    "peft_version": "0.21.2", "kasa_config": None, "monteclora_config": None, "velora_config": None,
}  # fmt: skip
MAPPING = {
    "base_model_class": "Qwen3MoeForCausalLM",
    "parent_library": "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "unsloth_fixed": True,
}
REAL = {
    "peft 0.15.2": PEFT_0_15,
    "peft 0.17": PEFT_0_17,
    "peft 0.19.1": PEFT_0_19,
    "peft 0.21.2": PEFT_0_21,
    "eva": PEFT_0_19 | {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
    "loftq": PEFT_0_15 | {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    "unsloth": PEFT_0_21 | {"auto_mapping": MAPPING, "lora_B_layout": "rank_major"},
    "ms-swift's class": PEFT_0_15 | {"lora_dtype": "bfloat16", "lorap_emb_lr": 1e-6},
    "revision and runtime": PEFT_0_19
    | {"revision": "main", "runtime_config": {"ephemeral_gpu_offload": True}},
    "tinker": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "torchtune": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "peft_type": "LORA"},
    "the installed peft": json.loads(
        json.dumps(LoraConfig(r=4, lora_alpha=12, target_modules="q_proj").to_dict())
    ),
}


def file_of(folder, config):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("name", REAL)
def test_a_published_config_opens(tmp_path, name):
    assert read_config(file_of(tmp_path, REAL[name]))["r"] == 4


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_later_option_that_is_off_changes_nothing(tmp_path, value):
    assert read_config(file_of(tmp_path, PEFT_0_21 | {"use_later_lora": value}))


@pytest.mark.parametrize("value", [True, 16, 0, 0.5, "later", [0], {"rank": 2}, {"a": None}])
def test_a_later_option_that_is_set_is_refused(tmp_path, value):
    file = file_of(tmp_path, PEFT_0_21 | {"peft_version": "0.99.0", "use_later_lora": value})
    with pytest.raises(AdapterError) as refused:
        read_config(file)
    message = str(refused.value)
    assert message.startswith(f"{file}: 'use_later_lora' is {value!r}")
    assert "Install PEFT 0.99.0" in message and "remove it from the file" in message


def test_the_default_of_the_installed_peft_passes_and_another_value_does_not(tmp_path, monkeypatch):
    real = LoraConfig.to_dict
    monkeypatch.setattr(LoraConfig, "to_dict", lambda self: real(self) | {"later_group_size": 16})
    assert read_config(file_of(tmp_path, PEFT_0_21 | {"later_group_size": 16}))
    with pytest.raises(AdapterError, match=r"'later_group_size' is 8, .* default is 16\. Merge"):
        read_config(file_of(tmp_path, PEFT_0_21 | {"later_group_size": 8}))


def test_every_option_of_the_installed_peft_is_known():
    """A new one is sorted by a reader of PEFT's code, not by its default."""
    from moe_finetune.checkpoint.adapters import config as keys

    assert LoraConfig().to_dict().keys() <= keys._READ | keys._WITHOUT_EFFECT | {*keys._REFUSED}
    assert not keys._READ & keys._WITHOUT_EFFECT
    assert not (keys._READ | keys._WITHOUT_EFFECT) & {*keys._REFUSED}


def test_a_live_config_is_judged_by_the_same_rule():
    config = LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"])
    assert no_merge_because(config.to_dict()) is None
    assert "peft_type is IA3" in str(no_merge_because({"peft_type": "IA3", "r": 4}))


def test_a_merge_names_the_file_and_the_key(base, adapter, tmp_path):
    configure(adapter / CONFIG, later_scale=2.5)
    refuse(base, adapter, tmp_path, AdapterError, adapter / CONFIG, "'later_scale' is 2.5")
    configure(adapter / CONFIG, later_scale=None)
    assert merge_adapter(base, adapter, tmp_path / "out")
