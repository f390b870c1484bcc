"""NeMo Automodel's own model, adapter, saver and merge, over a small checkpoint of Qwen3-MoE.

``python -m tests.integrations.automodel_adapter BASE FOLDER OPTIONS`` writes into FOLDER:
``saved/model``, the adapter as its checkpointer saves it with these options (JSON); ``merged``, the
checkpoint that its own export makes of base and adapter; ``logits.safetensors``.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

RANK, ALPHA = 3, 7.5


def without_a_gpu() -> None:
    """Let its modules be imported and its models be made where there is no GPU."""
    triton.autotune = lambda *args, **options: lambda function: function
    torch.cuda.current_device = lambda: 0


def with_factors(base: Path):
    """Its Qwen3-MoE with the base's weights, and factors that differ by expert."""
    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM

    config = AutoConfig.from_pretrained(base, dtype=torch.float32)
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False,
                            experts="torch", dispatcher="torch")  # fmt: skip
    model = Qwen3MoeForCausalLM(config, backend=backend).float()
    model.model.rotary_emb.device = torch.device("cpu")
    stored = load_file(base / "model.safetensors")
    model.load_state_dict(model.state_dict_adapter.from_hf(stored))
    options = PeftConfig(["*q_proj", "*o_proj", "*experts"], dim=RANK, alpha=ALPHA)
    apply_lora_to_linear_modules(model, options)
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval(), options


@torch.no_grad()
def main(base: Path, folder: Path, options: dict) -> None:
    from nemo_automodel._transformers.peft_export import export_merged_peft_checkpoint
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    model, peft_config = with_factors(base)
    ids = torch.randint(4, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    found = model(ids)
    logits = getattr(found, "logits", found)
    save_file({"ids": ids, "logits": logits.contiguous()}, folder / "logits.safetensors")
    saver = CheckpointingConfig(is_peft=True, save_consolidated=False, **options).build(0, 0, 0)
    saver.save_model(model, str(folder / "saved"), peft_config=peft_config)
    saver.close()
    fresh, _ = with_factors(base)
    for name, parameter in fresh.named_parameters():
        if "lora_" in name:
            parameter.zero_()
    adapter = folder / "saved" / "model"
    export_merged_peft_checkpoint(fresh, adapter_path=adapter, output_dir=folder / "merged")


if __name__ == "__main__":
    without_a_gpu()
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
