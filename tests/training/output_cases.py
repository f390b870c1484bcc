"""The training whose output folder is compared: on one rank, on two, and after a resume."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.training.cases import arguments

STEPS = 4
METHOD = {
    "terms": {
        "orthogonality": {"weight": 0.05},
        "variance": {"share": 0.1},
        "coupling": {"weight": 0.1, "pairing": "transition"},
    }
}
LORA = {
    "r": 3,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "gate.weight"],
}


def start(base):
    torch.manual_seed(3)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA))


def output_arguments(checkpoints):
    args = arguments(
        checkpoints,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=2,
        ddp_find_unused_parameters=False,
    )
    args.max_steps, args.save_strategy = STEPS, "steps"
    return args
