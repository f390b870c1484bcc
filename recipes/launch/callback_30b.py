# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "moe-finetune[quantization] @ git+https://github.com/moe-finetune/moe-finetune@70811c8be3cef687972da4a5f10c94e579f9c120",
# ]
# ///
"""Fine-tune a 30B Mixture-of-Experts model on one rented GPU, by the callback, in one file.

    uv run callback_30b.py --data my.jsonl                # Qwen3-30B-A3B in 4 bits, 60 steps
    hf jobs uv run --flavor a100-large callback_30b.py --data my.jsonl

``--data`` has rows with ``messages``. The run folder has the adapter, the log and the page's
inputs; ``moe-finetune report``, ``merge`` and ``eval`` take it. At its end the script prints the
step's time and memory in the columns of ``make gpu-step``.
"""

import argparse
import json
import statistics
import time

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from moe_finetune import SpecializationCallback, load_model
from moe_finetune.models.config_and_tokenizer import load_tokenizer


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step after the first, which compiles and allocates."""

    def __init__(self):
        self.seconds, self.started = [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if state.global_step > 1:
            self.seconds.append(time.perf_counter() - self.started)


def table(seconds, tokens):
    """The step in the columns of `make gpu-step`: median seconds, tokens per second, peak GB."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    median = statistics.median(seconds)
    row = {"median_s": round(median, 3), "tokens_per_s": round(tokens / median), "gb": peak}
    return json.dumps({"device": device, "torch": torch.__version__, "rows": {"callback": row}})


def main():
    """Train, and print what a step took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--data", required=True, help="file or hub dataset with `messages`")
    parser.add_argument("--method", default="none", help="a preset of the papers' losses")
    parser.add_argument("--output", default="runs/30b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--full", action="store_true", help="16 bits instead of 4")
    options = parser.parse_args()

    local = options.data.endswith((".json", ".jsonl"))
    rows = load_dataset(*(("json",) if local else (options.data,)), split="train",
                        **({"data_files": options.data} if local else {}))  # fmt: skip
    quantization = None if options.full else "nf4"
    model = load_model(options.model, dtype=options.dtype, quantization=quantization)
    model.config.use_cache = False
    names = dict(model.named_parameters())
    experts = [n for n in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
               if any(name.endswith(n) for name in names)]  # fmt: skip
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=experts,
    )
    arguments = SFTConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=1e-4,
        max_length=options.length,
        packing=True,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        router_aux_loss_coef=0.0,
        use_cpu=not torch.cuda.is_available(),
    )
    times = StepTimes()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=load_tokenizer(options.model),
        peft_config=lora,
        callbacks=[times],
    )
    method = SpecializationCallback(options.method, output=options.output)
    method.attach(trainer)
    trainer.train()
    print(table(times.seconds, options.length))
    print(f"next: moe-finetune merge {options.output} --verify --output {options.output}/merged")


if __name__ == "__main__":
    main()
