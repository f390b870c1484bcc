"""The measurement for the memory plan: a run's first steps.

A model with random weights trains by a recipe for a few steps on random rows of full length.
:func:`counted_peak` counts the bytes of live tensors, which is deterministic.

    python eval/bench/measured.py SETTING.json

prints the system's figure: the peak of resident memory since the model was built, minus the memory
before it; on a GPU the peak of the allocator.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from moe_finetune.torch_extension import TorchDispatchMode, tree_leaves

STEPS = 2
SMALL = {"num_hidden_layers": 3, "intermediate_size": 96, "moe_intermediate_size": 32}


class LiveBytes(TorchDispatchMode):
    """While active, counts every new tensor's storage until the last tensor on it is freed.

    On fake tensors this equals what the same operations on real ones would allocate, except for
    memory inside kernels.

    Attributes:
        now: bytes alive.
        peak: the most bytes alive since :meth:`reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type != "meta":  # fakes have another
                self._count(value.untyped_storage())
        return result

    def reset(self) -> int:
        """Start a new peak and return the previous one."""
        peak, self.peak = self.peak, self.now
        return peak

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def counted_peak(config: Any, recipe: Any) -> int:
    """Bytes of tensors at the peak of a few steps of ``recipe`` on a CPU, in this process.

    Args:
        config: a transformers config; the model gets random weights.
        recipe: the run; its checkpoint and data are not read.
    """
    from trl.kernels import ChunkedLogProbFunction

    apply = ChunkedLogProbFunction.apply

    def narrow(hidden: Any, head: Any, bias: Any, labels: Any, heat: Any, tile: int, *rest: Any):
        """Tiles of logits no wider than the vocabulary, so that only touched memory counts."""
        return apply(hidden, head, bias, labels, heat, min(tile, head.shape[0]), *rest)

    narrowed = patch.object(ChunkedLogProbFunction, "apply", narrow)
    with tempfile.TemporaryDirectory() as folder, narrowed, LiveBytes() as live:
        train(config, few_steps(recipe), Path(folder))
    return live.peak


def few_steps(recipe: Any) -> Any:
    """``recipe``, shortened to the measured steps."""
    trainer = {**recipe.trainer, "max_steps": STEPS, "save_strategy": "no", "report_to": []}
    return recipe.model_copy(update={"trainer": trainer})


def measured_peak(config: Any, recipe: Any) -> int:
    """Bytes at the peak of a few steps of ``recipe``, in a separate process.

    Args:
        config: a transformers config; the model gets random weights.
        recipe: the run; its checkpoint and data are not read.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "setting.json"
        setting = {"config": config.to_dict(), "recipe": recipe.to_mapping()}
        file.write_text(json.dumps(setting), encoding="utf-8")
        environment = {
            **os.environ,
            # Freed blocks return to the system at once, so that resident memory is live memory.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-W", "ignore", __file__, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured run failed:\n{done.stderr[-4000:]}")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["peak"])


def resident(kind: str) -> int:
    """``VmHWM`` (the peak) or ``VmRSS`` of this process, in bytes.

    Not ru_maxrss, which starts at the parent's peak at the fork.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{kind}:")[1].split()[0]) * 1024


def peak_of(setting: dict[str, Any], folder: Path) -> int:
    """Run the setting and return its peak in bytes.

    A small model is trained first in the same way, so that memory that libraries reserve on first
    use does not count.
    """
    import gc

    import torch
    from transformers import AutoConfig

    from moe_finetune.models.deepseek_moe import register
    from moe_finetune.recipe.schema import Recipe

    register()
    recipe = few_steps(Recipe.model_validate(setting["recipe"]))
    values = dict(setting["config"])
    kind = values.pop("model_type")
    small = values | SMALL | {"hidden_size": 16 * values["num_attention_heads"]}
    short = recipe.data.model_copy(update={"max_length": 24})
    train(
        AutoConfig.for_model(kind, **small),
        recipe.model_copy(update={"data": short}),
        folder / "small",
    )
    gc.collect()
    config = AutoConfig.for_model(kind, **values)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(config, recipe, folder / "run")
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    train(config, recipe, folder / "run")
    return resident("VmHWM") - before


def train(config: Any, recipe: Any, folder: Path) -> None:
    """Train a few steps of ``recipe`` with random weights on random rows of full length."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.training.run.trainer import build_trainer

    rows = STEPS * int(recipe.trainer.get("per_device_train_batch_size", 8))
    rows *= int(recipe.trainer.get("gradient_accumulation_steps", 1))
    data = Dataset.from_dict(_columns(recipe, rows, config.vocab_size))
    dtype = getattr(torch, recipe.model.dtype if recipe.lora is not None else "float32")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = add_lora(model, recipe.lora, recipe.router.train)
    run, _ = build_trainer(recipe, folder, model, _tokenizer(), data, None)
    run.train()


def _columns(recipe: Any, rows: int, vocabulary: int) -> dict[str, list]:
    """Rows of full length, in the form of the recipe's stage."""
    import torch

    from moe_finetune.recipe.stages import STAGES

    form, length = STAGES[recipe.stage].form, recipe.data.max_length
    if form == "tokens":
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(4, vocabulary, (rows, length), generator=generator).tolist()
        return {"input_ids": ids, "labels": ids}
    if form != "preference":
        raise ValueError(f"rows of stage {recipe.stage} are not made here")
    half, whole = [4] * (length // 2), [4] * length  # which is truncated
    return {
        "prompt_ids": [half] * rows,
        "chosen_ids": [whole] * rows,
        "rejected_ids": [whole] * rows,
    }


def _tokenizer() -> Any:
    """A tokenizer of a few words; rows come as ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("setting", type=Path)
    setting = json.loads(parser.parse_args().setting.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"peak": peak_of(setting, Path(folder))}))


if __name__ == "__main__":
    main()
