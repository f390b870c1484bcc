"""GRPO whose rollouts are vLLM's, in this process or by a server; a file of results for each case.

Arguments: ``FOLDER [URL | gpu]``; under a launcher for several ranks.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.data.load_rows import load_for_stage
from moe_finetune.errors import CaptureError
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training import ranks
from moe_finetune.training.run.trainer import build_trainer
from moe_finetune.training.stages import grpo_trainer
from moe_finetune.training.stages.grpo_trainer import EXPERTS, MISSING
from moe_finetune.training.stages.rewards import REWARDS
from tests.support import tiny, vllm_capture

PROMPTS = ["what is 1+1?", "seven", "what is 1+2?", "a few words more than that"]
LENGTH = 6
BIAS = "e_score_correction_bias"


def reward(completion_ids, **_):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def recipe(base: Path, folder: Path, **changes: Any) -> Any:
    file = folder / f"prompts-{ranks.rank()}.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    trainer = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2 // ranks.world_size(),
        "num_generations": 4,
        "num_iterations": 2,
        "max_completion_length": LENGTH,
        "beta": 0.0,
        "temperature": 0.9,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "gradient_checkpointing": True,
        "use_vllm": True,
        "vllm_max_model_length": 64,
        # Ends nowhere: all completions have LENGTH tokens.
        "generation_kwargs": {"ignore_eos": True},
    }
    REWARDS._values["mine"] = reward
    tree = {
        "stage": "grpo",
        "model": {"path": str(base), "dtype": "float32"},
        "method": changes.get("method", {"terms": {}}) | {"strength": {"first": False}},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(file), "max_length": 64},
        "trainer": trainer | changes.get("trainer", {}),
        "rewards": ["mine"],
        "router": {"train": "full", "replay": changes.get("replay", "rollout")},
    }
    return recipe_from_tree(Tree(tree))


def train(
    base: Path, folder: Path, spoil: Callable[[Any], None] = id, **changes: Any
) -> dict[str, Any]:
    """Train; return the logs, the share of tokens that used the recorded experts, and errors.

    Args:
        spoil: called with the trainer before it trains.
    """
    asked, tokenizer = recipe(base, folder, **changes), tiny.tokenizer()
    data = load_for_stage(asked, tokenizer).train
    model = add_lora(load_model(base, dtype="float32"), asked.lora, "full")
    model.name_or_path = str(base)
    output = folder / "run"
    output.mkdir(exist_ok=True)
    facts, checked = grpo_trainer.model_facts, grpo_trainer.check_rolled_out
    trainer, callback = build_trainer(asked, output, model, tokenizer, data, None)
    used, compute = [], trainer._compute_loss

    def at_loss(model_, inputs):
        recorder, seen = callback.specialization.recorder, []
        observers = (*recorder.plan.observers, lambda record, _: seen.append(record.index_TK))
        with recorder.using(observers=observers):
            loss = compute(model_, inputs)
        if EXPERTS in inputs:
            ran = ~inputs[MISSING]
            for place, index_TK in enumerate(seen[: inputs[EXPERTS].shape[2]]):
                theirs = inputs[EXPERTS][:, :, place][ran].long().sort(-1).values
                own = index_TK.view(*ran.shape, -1)[ran].sort(-1).values
                used.append((own == theirs).all(-1).double().mean().item())
        return loss

    trainer._compute_loss = at_loss
    spoil(trainer)
    try:
        trainer.train()
    except CaptureError as error:
        return {"error": str(error)}
    finally:
        grpo_trainer.model_facts, grpo_trainer.check_rolled_out = facts, checked
        callback.close()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {"logs": logs, "used": used}


# -- what must not go unnoticed -------------------------------------------------------------------


def rows(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Callable[[Any], None]:
    """Replay other experts than those that vLLM returned."""

    def spoil(trainer):
        checked = grpo_trainer.check_rolled_out
        grpo_trainer.check_rolled_out = lambda *given: change(checked(*given))

    return spoil


def returned(change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Any], None]:
    """Let vLLM return something else."""

    def spoil(trainer):
        llm = trainer.vllm_generation.llm
        generate = llm.generate

        def generated(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            llm.routed_experts = [change(array) for array in llm.routed_experts]
            return outputs

        llm.generate = generated

    return spoil


def dense_layer_first(trainer: Any) -> None:
    """Read the experts one decoder layer too low, where the first one is dense."""
    facts = grpo_trainer.model_facts

    def lower(model):
        right = facts(model)
        return replace(right, moe_layers=tuple(layer - 1 for layer in right.moe_layers))

    grpo_trainer.model_facts = lower


def busy_engine(trainer: Any) -> None:
    """The engine has a request in work when its prefix cache is reset."""
    from vllm import SamplingParams

    engine, sampling = trainer.vllm_generation.llm.llm_engine, SamplingParams(ignore_eos=True)
    engine.add_request("other", {"prompt_token_ids": [5, 6, 7]}, sampling)
    engine.step()


def bias_not_sent(trainer: Any) -> None:
    del trainer.vllm_generation._iter_named_params


def swapped(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Each row gets the experts of the row after the next group's, as far as it is long."""
    return [
        np.resize(arrays[(row + 4) % len(arrays)], array.shape) for row, array in enumerate(arrays)
    ]


# -- this process's engine ------------------------------------------------------------------------


def prepare_engines() -> None:
    """Engines as TRL builds them, on a CPU; a checkpoint's engine is built once."""
    from trl.generation import vllm_generation

    original: Any = vllm_generation.LLM
    built: dict[str, Any] = {}

    class CpuLLM(original):
        def __init__(self, *args, **kwargs):
            before = built.setdefault(kwargs["model"], self)
            if before is not self:
                self.__dict__.update(before.__dict__)
                return
            cpu = {"enforce_eager": True, "dtype": "float32", "attention_backend": "CPU_MLA"}
            super().__init__(*args, **{**kwargs, **cpu})

    def synchronized(self):
        """Weights are equal in the first rollout, and CPU's packed layers load none again."""
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        for name, parameter in self._iter_named_params():
            if name.endswith(BIAS):
                model.load_weights([(name, parameter)])
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = CpuLLM
    vllm_generation.VLLMGeneration.sync_weights = synchronized
    vllm_capture.install()


def in_process(folder: Path) -> dict[str, Any]:
    prepare_engines()
    qwen = tiny.save("qwen3_moe", folder / "qwen")
    deepseek = tiny.save("deepseek_v3", folder / "deepseek")
    # Weights stay; only the bias moves, by more than scores differ.
    biased = {
        "method": {"terms": {}, "bias_update": 0.05},
        "trainer": {"learning_rate": 1e-12, "max_steps": 3, "num_iterations": 1},
    }
    return {
        "qwen3_moe": train(qwen, folder),
        "off": train(qwen, folder, replay="off"),
        "old_policy": train(qwen, folder, replay="old_policy"),
        "shifted": train(
            qwen, folder, rows(lambda arrays: [np.roll(array, 1, axis=0) for array in arrays])
        ),
        "swapped": train(qwen, folder, rows(swapped)),
        "a row missing": train(qwen, folder, returned(lambda array: array[:-1])),
        "nothing": train(qwen, folder, returned(lambda array: None)),
        "deepseek_v3": train(deepseek, folder),
        "dense layer first": train(deepseek, folder, dense_layer_first),
        "bias not sent": train(deepseek, folder, bias_not_sent, **biased),
        "bias": train(deepseek, folder, **biased),
        "busy": train(qwen, folder, busy_engine),
    }


def on_gpu(folder: Path) -> dict[str, Any]:
    """vLLM's own capture and TRL's own transfer of weights; each batch is sampled anew."""
    sizes = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 64}
    base = tiny.save("qwen3_moe", folder / "base", **sizes)
    options = {"num_iterations": 1, "max_steps": 3, "vllm_gpu_memory_utilization": 0.3}
    return train(base, folder, trainer=options)


# -- a server -------------------------------------------------------------------------------------


def by_server(folder: Path, url: str) -> dict[str, Any]:
    """Two rollouts of unequal prompts; NCCL, which sends weights, needs GPUs."""
    from trl.generation.vllm_client import VLLMClient

    VLLMClient.init_communicator = lambda self, device: None
    VLLMClient.update_named_params = lambda self, metadata, parameters: list(parameters)
    server = {"vllm_mode": "server", "vllm_server_base_url": url}
    return train(folder / "qwen", folder, trainer=server)


def main(folder: str, url: str = "") -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    ranks.join_group()
    if url == "gpu":
        name, found = "gpu", on_gpu(Path(folder))
    elif url:
        name, found = f"server-{ranks.world_size()}-{ranks.rank()}", by_server(Path(folder), url)
    else:
        name, found = "engine", in_process(Path(folder))
    (Path(folder) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
