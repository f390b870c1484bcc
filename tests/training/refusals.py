"""Recipes that cannot train, and what `train` answers before it loads weights.

``python -m tests.training.refusals`` rewrites ``refusals.json``.
"""

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from moe_finetune import cli
from moe_finetune.recipe.tree import merge_mappings
from tests import tiny

FILE = Path(__file__).with_name("refusals.json")
ROWS = {
    "rows": [{"prompt": f"number {n}", "completion": f" before {n + 1}"} for n in range(7)],
    "chat": [{"messages": [{"role": "user", "content": "hi"},
                           {"role": "assistant", "content": f"hello {n}"}]} for n in range(7)],
    "pairs": [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 4,
    "prompts": [{"prompt": f"what is {n}?", "answer": str(n)} for n in range(4)],
    "numbers": [{"prompt": 3, "completion": " x"}],
    "nothing": [{"prompt": "x", "completion": ""}],
    "other": [{"question": "x", "reply": "y"}],
    "empty": [],
    "role": [{"messages": [{"role": "usr", "content": "hi"}]}],
}  # fmt: skip
DPO = "stage: dpo, method: aux_loss, data: {train: pairs.jsonl}"
GRPO = "stage: grpo, data: {train: prompts.jsonl}, rewards: [exact_match]"
CASES = """
modle: {path: x}
lora: {rnak: 4}
lora: {rank: eight}
lora: {rank: -1}
lora: {rank: null}
lora: {rank: 1000000000}
lora: {alpha: .inf}
lora: {alpha: .nan}
lora: {dropout: 1}
lora: {targets: [atention]}
lora: {targets: []}, router: {train: frozen}
lora: {experts: s.json, targets: [attention]}
lora: {experts: s.json}
lora: {parts: {experts: {rank: 0}}}
lora: {parts: {exprts: {rank: 2}}}
lora: {parts: {attention: {rank: auto}}}
lora: {parts: {router: {rank: 2}}}
lora: {parts: {experts: {rank: 2}}, targets: [attention]}
lora: {init: pisa}
lora: {init: pissa}
lora: {use_dora: true}
lora: {start: a, experts: s.json}
lora: {start: nowhere}
lora: {start: a}, model: {offload: experts}
lora: 8
lora: null, router: {train: lora}
lora: null, model: {quantization: nf4}
lora: null, model: {offload: experts}
lora: null, method: {bias_update: 0.001}, model: {path: mixtral}
model: {path: nowhere}
model: {path: ''}
model: {path: 3}
model: {path: broken}
model: {path: dense}
model: {dtype: float16}
model: {quantization: nf5}
model: {quantization: nf4, init: random}, lora: null
model: {tokenizer: nowhere}
model: {attn_implementation: flash}
model: {attn_implementation: flash_attention_2}
model: {offload: experts}
model: {offload: all}
model: {experts_kernel: fast}
model: {init: random}
model: {init: random}, lora: null, router: {train: frozen}
model: {init: random, config: {nope: 1}}, lora: null
model: {config: {hidden_size: 3}}
model: {family: {name: x}}
method: ortogonal_variance
method: 5
method: [erc]
method: {preset: 5}
method: {share: 0.1}
method: {preset: erc, share: -1}
method: {preset: loss_free, share: 0.1}
method: {preset: erc, share: 10%}
method: {terms: {varance: {weight: 1}}}
method: {terms: {variance: {weight: -1.0}}}
method: {terms: {variance: {weight: 3.0e+38}}}
method: {terms: {variance: {share: 0}}}
method: {terms: {variance: {share: 0.1, every: 0}}}
method: {terms: {variance: {weight: 0.1, every: 4}}}
method: {terms: {variance: 0.1}}
method: {terms: {variance: {weight: 1, layers: [99]}}}
method: {terms: {variance: {weight: 1, layers: some}}}
method: {terms: {z_loss: {wieght: 1}}}
method: {terms: {variance: {weight: 1, schedule: {kind: linar}}}}
method: {terms: {variance: {reduction: sum}}}
method: {terms: {teacher_routing: {weight: 1}}}
method: {preset: supervised_routing}
method: {perturbations: {jiter: 0.1}}
method: {perturbations: {jitter: 2}}
method: {bias_update: -1.0}
method: {bias_update: 0.001}, model: {path: mixtral}, export: {merge: true}
method: {token_mask: lables}
method: {strength: {every: 10}}
method: {strength: {first: 3}}
method: erc, router: {train: frozen}, lora: {targets: [attention]}
router: {train: half}
router: {replay: true}
data: {train: 4}
data: {train: nowhere.jsonl}
data: {train: []}
data: {train: [{path: rows.jsonl, limit: 0}]}
data: {train: [{pth: rows.jsonl}]}
data: {train: [{path: rows.jsonl, limit: 99}]}
data: {train: numbers.jsonl}
data: {train: nothing.jsonl}
data: {train: other.jsonl}
data: {train: empty.jsonl}
data: {train: role.jsonl}
data: {train: cut.jsonl}
data: {train: prompts.jsonl}
data: {validation: nowhere.jsonl}
data: {max_length: 1}
data: {max_length: many}
data: {overlong: error, max_length: 3}
data: {overlong: cut}
data: {columns: {prompt: question}}
data: {columns: {promt: prompt}}
data: {columns: {prompt: q}, template: {prompt: '{q}'}}
data: {template: {prompt: '{q'}}
data: {chat_template: nowhere.jinja}
data: {packing: yes please}
data: {packing: true, packing_strategy: wrapped, format: messages}
data: {packing: true, packing_strategy: best}
data: {format: text, completion_only_loss: true}
data: {format: json}
data: {limit: 99}
data: {limit: 0}
data: {num_proc: 0}
data: {ignore: [x]}
stage: stf
stage: kto
stage: pretrain, data: {format: messages}
stage: pretrain
STAGE DPO, data: {packing: true}
STAGE DPO, data: {format: text}
STAGE DPO, data: {train: rows.jsonl}
STAGE DPO, trainer: {beta: big}
STAGE DPO, trainer: {loss_type: nope}
STAGE DPO, model: {init: random}, lora: null
stage: grpo, data: {train: prompts.jsonl}
STAGE GRPO, rewards: [exact_mach]
STAGE GRPO, rewards: [{file: x.py, name: boxed}]
STAGE GRPO, rewards: [{name: exact_match, weight: .inf}]
STAGE GRPO, data: {train: rows.jsonl}
STAGE GRPO, router: {replay: true}, trainer: {use_vllm: true}
STAGE GRPO, router: {replay: true}, method: {perturbations: {random_second_choice: true}}
STAGE GRPO, trainer: {num_generations: 3}
rewards: [exact_match]
trainer: {learning_rat: 1.0}
trainer: {learning_rate: -1.0}
trainer: {learning_rate: 5}
trainer: {learning_rate: fast}
trainer: {per_device_train_batch_size: 0}
trainer: {per_device_train_batch_size: 2000000}
trainer: {per_device_train_batch_size: 1.5}
trainer: {per_device_eval_batch_size: 0}
trainer: {gradient_accumulation_steps: 0}
trainer: {max_steps: 0}
trainer: {max_steps: -2}
trainer: {max_steps: 3000000000}
trainer: {max_steps: -1, num_train_epochs: 0}
trainer: {max_steps: -1, num_train_epochs: -1}
trainer: {warmup_steps: -1}
trainer: {weight_decay: -0.1}
trainer: {adam_beta1: 2.0}
trainer: {adam_beta2: 1.0}
trainer: {adam_epsilon: 0}
trainer: {adam_epsilon: -1}
trainer: {max_grad_norm: -1}
trainer: {label_smoothing_factor: 1.5}
trainer: {label_smoothing_factor: -0.5}
trainer: {neftune_noise_alpha: -1}
trainer: {logging_steps: 0}
trainer: {logging_steps: -1}
trainer: {eval_steps: 0}, data: {validation: rows.jsonl}
trainer: {save_steps: 0}
trainer: {save_steps: -3}
trainer: {save_total_limit: 0}
trainer: {dataloader_num_workers: -1}
trainer: {seed: -1}
trainer: {seed: 4294967296}
trainer: {seed: soon}
trainer: {data_seed: -1}
trainer: {save_strategy: sometimes}
trainer: {eval_strategy: steps}
trainer: {eval_strategy: false}
trainer: {load_best_model_at_end: true}
trainer: {report_to: nolog}
trainer: {deepspeed: zero.json}
trainer: {loss_type: mean}
trainer: {eos_token: <gone>}
trainer: {pad_token: <gone>}
trainer: {lr_scheduler_type: nope}
trainer: {lr_scheduler_kwargs: {nope: 1}}
trainer: {optim: adam9}
trainer: {optim_args: nope}
trainer: {push_to_hub: true}
trainer: {output_dir: x}
trainer: {packing: true}
trainer: {hub_token: secret}
trainer: {fp16: true}
trainer: {bf16: 1}
trainer: {gradient_checkpointing_kwargs: {use_reentrant: true}}
trainer: {use_liger_kernel: true}
trainer: {use_liger_kernel: true, liger_kernel_config: {swiglu: false}}
trainer: {use_liger_kernel: true, liger_kernel_config: {fused_linear_cross_entropy: true}}
trainer: {liger_kernel_config: {rope: true}}
trainer: {activation_offloading: true}
trainer: {beta: 0.1}
trainer: {fsdp: full}
trainer: {accelerator_config: {nope: 1}}
trainer: {dataloader_prefetch_factor: 2}
trainer: {label_smoothing_factor: 0.1}, method: {preset: erc, token_mask: labels}
trainer: 5
learning_rate: 1.0e-3
dropout: 0.1
packing: true
seed: 3
max_length: 512
data: {rank: 4}
logging: {every: 5}
numerics: {on_nan: skip}
numerics: {deterministic: true}
teacher: {path: x}
stages: [a]
plugins: [nowhere.at_all]
plugins: os
export: {merge: false, verify: true}
export: {merge: maybe}
export: {merge: true}, evaluation: {suite: demo, every: 2}, trainer: {load_best_model_at_end: true}
evaluation: {suite: demo}
evaluation: {suite: dmeo}, export: {merge: true}
evaluation: {suite: ''}, export: {merge: true}
evaluation: {suite: demo, only: [nothing]}, export: {merge: true}
evaluation: {suite: demo, every: 0}, export: {merge: true}
evaluation: {suite: demo, backend: cpu}, export: {merge: true}
evaluation: {suite: demo, vllm: {hf_token: hf_abc}}, export: {merge: true}
parallel: {experts: 0}
parallel: {experts: 2}
parallel: {experts: 2}, lora: null
parallel: {experts: 2}, lora: {targets: []}
parallel: {experts: 2}, model: {offload: experts}
parallel: {experts: 2}, trainer: {torch_compile: true}
parallel: {experts: some}
extends: nowhere.yaml
extends: 5
extends: recipe.yaml
"""
OVERRIDES = """
lora.rank
lora..rank=1
data.train=[
trainer.max_steps=soon
lora.rank=0
modle.path=x
trainer.eval_strategy=no
"""
ENVIRONMENTS = {
    "deepspeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "rows cut": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
    },
    "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
}
"""Variables that accelerate's launcher sets."""
LENGTH = 200
"""Characters of a message's line; the rest lists what a library knows."""


def cases() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Each recipe as text, its overrides, and the launcher's environment."""
    for line in CASES.strip().splitlines():
        yield line, [], {}
    for line in OVERRIDES.strip().splitlines():
        yield "", [line], {}
    for name, environment in ENVIRONMENTS.items():
        yield f"LAUNCH {name}", [], environment


def write_inputs(folder: Path) -> None:
    """Checkpoints and rows that the recipes name, relative to ``folder``."""
    tiny.save("qwen3_moe", folder / "base")
    tiny.save("mixtral", folder / "mixtral")
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "cut.jsonl").write_text('{"prompt": "a", "comp')
    for name, content in {"broken": "{", "dense": '{"model_type": "llama"}'}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)


def recipe_of(text: str) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"path": "base", "dtype": "float32"},
        "method": "orthogonal_variance",
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": "rows.jsonl", "max_length": 40},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": "none"},
        "export": {"merge": False},
    }
    if text.startswith("LAUNCH"):
        return base
    for name, stage in (("DPO", DPO), ("GRPO", GRPO)):
        if text.startswith(f"STAGE {name}, "):
            base = merge_mappings(base, yaml.safe_load(f"{{{stage}}}"))
            text = text.removeprefix(f"STAGE {name}, ")
    return merge_mappings(base, yaml.safe_load(f"{{{text}}}") or {})


def answer(text: str, overrides: list[str], environment: dict[str, str]) -> list[str]:
    """The message of `train` in the working folder, whose exit code is 2; nothing is written."""
    folder = Path.cwd()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(text), sort_keys=False))
    before = sorted(folder.iterdir())
    arguments = ["train", "recipe.yaml", *overrides, "--output", "run"]
    out, err = StringIO(), StringIO()
    loaded = AssertionError("weights were loaded")
    with (
        patch("moe_finetune.checkpoint.loading.load_model", side_effect=loaded),
        patch("moe_finetune.models.fresh.fresh_model", side_effect=loaded),
        patch.dict("os.environ", environment),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = cli.main(arguments)
    assert sorted(folder.iterdir()) == before and code == 2, f"{text}: {code} {err.getvalue()}"
    message = err.getvalue().partition("error: ")[2].strip().replace(str(folder), "FOLDER")
    message = re.sub(r"this machine has [\d.]+", "this machine has SOME", message)
    return [line[:LENGTH] for line in message.splitlines()]


def main() -> None:
    """Write the answers of this version."""
    logging.disable(logging.WARNING)
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        os.chdir(folder)
        for text, overrides, environment in cases():
            answers[" ".join([text, *overrides])] = answer(text, overrides, environment)
    FILE.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
