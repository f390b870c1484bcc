"""Short fine-tunes of the demo's checkpoint in this process, for studies of many of them.

Learning rate 1e-3, cosine with a warm-up, rank 8 on attention and experts, as the demo; 60 steps of
8 rows, half of its steps and rows.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from moe_finetune import Specialization, load_model
from moe_finetune.data.load_rows import load_examples
from moe_finetune.evaluation.statistics import t_interval
from moe_finetune.lora.targets import add_lora
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.sections import LoraSection

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo"
CHECKPOINT = DEMO / "checkpoint"
STEPS, ROWS, RATE, WARMUP, MEASURED = 60, 8, 1e-3, 5, 1024
IGNORED = -100


@dataclass
class Rows:
    """Token ids with labels: to train, held out, and sums whose answer is the label."""

    train: list[dict]
    validation: list[dict]
    sums: list[dict]


def demo_rows() -> Rows:
    """The demo's rows; the sums are those of its suite."""
    tokenizer = load_tokenizer(CHECKPOINT)
    files = {"train": str(DEMO / "train.jsonl"), "validation": str(DEMO / "validation.jsonl")}
    data = DataSection(**files, format="prompt_completion", max_length=256)
    examples = load_examples(data, tokenizer, seed=0)
    sums = []
    for line in (DEMO / "arithmetic_test.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["question"])["input_ids"]
        answer = tokenizer(f" {row['answer']}", add_special_tokens=False)["input_ids"]
        answer.append(tokenizer.eos_token_id)
        labels = [IGNORED] * len(prompt) + answer
        sums.append({"input_ids": prompt + answer, "labels": labels})
    validation = examples.validation
    assert validation is not None
    return Rows(list(examples.train), list(validation), sums)


def batch_of(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows padded at their ends."""

    def padded(name: str, fill: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row[name]) for row in rows], True, fill)

    ids, labels = padded("input_ids", 0), padded("labels", IGNORED)
    masks = [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows]
    return {"input_ids": ids, "labels": labels, "attention_mask": pad_sequence(masks, True, 0)}


def scores(model, rows: Rows) -> dict[str, float]:
    """Held-out loss, nats per learned token, and percent of sums that are answered greedily."""
    loss = tokens = right = 0.0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for name, part in (("loss", rows.validation), ("sums", rows.sums)):
            for first in range(0, len(part), 20):
                batch = batch_of(part[first : first + 20])
                labels = batch.pop("labels")[:, 1:]
                logits = model(**batch, use_cache=False).logits[:, :-1].float()
                learned = labels != IGNORED
                if name == "loss":
                    loss += float(cross_entropy(logits[learned], labels[learned], reduction="sum"))
                    tokens += int(learned.sum())
                else:  # as greedy decoding: every token of the answer is the likeliest
                    right += int(((logits.argmax(-1) == labels) | ~learned).all(1).sum())
    model.train(was_training)
    return {"held_out": loss / tokens, "sums": 100 * right / len(rows.sums)}


def fine_tune(folder: Path, rows: Rows, seed: int, method="none", experts: str = "all") -> dict:
    """One short run: its scores, trained parameters, and seconds of the median step."""
    router = "full" if method != "none" else "frozen"
    lora = LoraSection(rank=8, alpha=16, targets=["attention", "experts"], experts=experts)
    torch.manual_seed(seed)
    model = add_lora(load_model(folder, dtype="float32"), lora, router).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    order = np.random.default_rng(seed).permutation(len(rows.train))[: STEPS * ROWS]
    seconds = []
    with Specialization(model, method, total_steps=STEPS) as losses:
        for step in range(STEPS):
            start = time.process_time()
            rate = min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / STEPS)) / 2
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate
            chosen = [rows.train[n] for n in order[step * ROWS : (step + 1) * ROWS]]
            model(**batch_of(chosen), use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            losses.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - start)
    states = (s for state in optimizer.state.values() for s in state.values() if s.ndim)
    return scores(model, rows) | {
        "trained": sum(parameter.numel() for parameter in trained),
        "optimizer_bytes": sum(state.numel() * state.element_size() for state in states),
        "step_seconds": sorted(seconds)[len(seconds) // 2],
    }


def paired(arm: list[dict], baseline: list[dict], key: str) -> dict[str, float]:
    """Mean difference of the same seeds, with its 95 % t-interval."""
    both = zip(arm, baseline, strict=True)
    interval = t_interval([one[key] - other[key] for one, other in both])
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}
