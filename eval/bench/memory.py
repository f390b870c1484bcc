"""Compare the memory plan with measurements: six settings, two training steps each.

Each setting has its own process. On a CPU the measurement is the peak of resident memory minus the
memory before the model; on a GPU it is the allocator's peak. Widths are small enough for minutes on
one core, and large enough to compare hundreds of megabytes.

    python eval/bench/memory.py
"""

import argparse
import time

import torch
from measured import measured_peak
from saved import add_save, finish
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig

from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.plan import plan_recipe

_COMMON = {
    "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 768,
    "moe_intermediate_size": 256, "num_experts_per_tok": 4, "vocab_size": 3000,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_DEEPSEEK = _COMMON | {
    "num_hidden_layers": 6, "n_routed_experts": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 6, "q_lora_rank": None,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN3 = Qwen3MoeConfig(
    **_COMMON, num_hidden_layers=7, num_key_value_heads=2, head_dim=64, num_experts=24,
    norm_topk_prob=True,
)  # fmt: skip
DEEPSEEK_V2 = DeepseekV2Config(**_DEEPSEEK, topk_method="greedy", routed_scaling_factor=1.0)
DEEPSEEK_V3 = DeepseekV3Config(**_DEEPSEEK, routed_scaling_factor=2.4)
EVERYTHING = ["attention", "shared_experts", "experts"]
SETTINGS = {
    # name: config, checkpointing, batch, preset, LoRA targets, further keys of the trainer
    "qwen3, whole": (QWEN3, False, 2, "none", EVERYTHING, {}),
    "qwen3, checkpointing": (QWEN3, True, 4, "orthogonal_variance", EVERYTHING, {}),
    "qwen3, attention": (QWEN3, False, 1, "aux_loss", ["attention"], {"optim": "sgd"}),
    "deepseek_v2, whole": (DEEPSEEK_V2, False, 2, "dpp", EVERYTHING, {}),
    "deepseek_v3, checkpointing": (
        DEEPSEEK_V3, True, 3, "erc", EVERYTHING, {"gradient_accumulation_steps": 2},
    ),
    "deepseek_v3, experts": (DEEPSEEK_V3, False, 2, "specialization_coupling", ["experts"], {}),
}  # fmt: skip


def recipe_of(checkpointing, batch, preset, targets, trainer, dtype="float32"):
    return Recipe.model_validate(
        {
            "model": {"path": "random", "dtype": dtype, "experts_kernel": "grouped"},
            "method": {"preset": preset},
            "lora": {"rank": 16, "targets": targets},
            "router": {"train": "full"},
            "data": {"train": "random", "max_length": 384},
            "trainer": trainer
            | {"per_device_train_batch_size": batch, "gradient_checkpointing": checkpointing},
        }
    )


def compare(name, dtype="float32", device="cpu"):
    """Predicted and measured bytes of one setting."""
    config, *how = SETTINGS[name]
    recipe = recipe_of(*how, dtype=dtype)
    started = time.perf_counter()
    plan = plan_recipe(config, recipe, device)
    seconds = time.perf_counter() - started
    measured = measured_peak(config, recipe)
    return {
        "predicted": plan.total,
        "measured": measured,
        "predicted / measured": round(plan.total / measured, 3),
        "moment": plan.moment,
        "seconds to predict": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="*", choices=sorted(SETTINGS), metavar="NAME")
    add_save(parser, "memory")
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.settings or SETTINGS:
        rows[name] = row = compare(name, arguments.dtype, arguments.device)
        predicted, measured = row["predicted"] / 1e6, row["measured"] / 1e6
        line = f"{name:28s} predicted {predicted:8.0f} MB  measured {measured:8.0f} MB"
        print(f"{line}  {row['predicted / measured']:.3f}", flush=True)
    finish(arguments, {"rows": rows}, show=False)


if __name__ == "__main__":
    main()
