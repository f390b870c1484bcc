"""Does each method move its own metric, against `aux_loss` with the same seed and data?

Trains the demo checkpoint (pretrained on the spot and cached) for 200 steps with each method and
measures routing on held-out examples. Numbers that go the wrong way stay in the table.

    python eval/bench/directions.py --steps 200 --save directions
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from moe_finetune.capture.recorder import Recorder
from moe_finetune.demo.data import TRAIN_FILE, VALIDATION_FILE, write_demo_data
from moe_finetune.demo.pretrain import ensure_demo_checkpoint
from moe_finetune.environment import describe_environment
from moe_finetune.families.loading import load_model, load_tokenizer
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.presets import PRESETS
from moe_finetune.metrics import (
    conditional_mean_rank,
    coupling_mass,
    erc_table,
    gram_cosine,
    max_violation,
    routing_entropy,
    score_variance,
)
from moe_finetune.recipe import DataSection, LoraSection
from moe_finetune.training.data import load_dataset_for
from moe_finetune.training.specialization import Specialization

RESULTS = Path(__file__).parent / "results"
METRICS = (
    "max_violation",
    "score_variance",
    "entropy",
    "activation_cosine",
    "output_cosine",
    "coupling_mass",
    "erc_loss",
    "router_cosine_squared",
    "conditional_mean_rank",
)
# method -> (metric, wanted sign of the change against the baseline, baseline)
CLAIMS = {
    "orthogonal_variance": [("score_variance", +1), ("output_cosine", -1)],
    "orthogonal_variance_sum": [("score_variance", +1), ("output_cosine", -1)],
    "specialization_coupling": [("activation_cosine", -1), ("coupling_mass", +1)],
    "erc": [("erc_loss", -1)],
    "dpp": [("output_cosine", -1)],
    "ncl": [("output_cosine", -1)],
    "cosine_orthogonality": [("output_cosine", -1)],
    "router_orthogonality": [("router_cosine_squared", -1)],
    "supervised_routing": [("conditional_mean_rank", -1), ("entropy", -1)],
    "loss_free": [("max_violation", -1)],
    "aux_loss": [("max_violation", -1)],
}
BASELINE = {"aux_loss": "none", "loss_free": "none"}


def frequency_table(rows, vocabulary, experts) -> torch.Tensor:
    """A token-frequency table: the examples dealt to experts by a hash of their first tokens."""
    counts = torch.full((vocabulary, experts), 1e-3)
    for row in rows:
        expert = sum(row["input_ids"][:3]) % experts
        counts[:, expert] += torch.bincount(torch.tensor(row["input_ids"]), minlength=vocabulary)
    return counts / counts.sum(1, keepdim=True)


def batches(rows, size, steps, pad):
    for step in range(steps):
        chosen = [rows[(step * size + i) % len(rows)] for i in range(size)]
        width = max(len(row["input_ids"]) for row in chosen)

        def stack(key, value, chosen=chosen, width=width):
            return torch.tensor([r[key] + [value] * (width - len(r[key])) for r in chosen])

        ids, labels = stack("input_ids", pad), stack("labels", -100)
        lengths = torch.tensor([len(row["input_ids"]) for row in chosen])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def measure(model, rows, table, perturbation, pad) -> dict[str, float]:
    """Metrics over all MoE layers on held-out rows, without noise or gradients."""
    seen: dict[str, list] = {name: [] for name in METRICS}
    below = []

    def observer(record, _):
        keep = record.mask_T
        load = torch.bincount(record.index_TK[keep].flatten(), minlength=record.logits_TE.shape[1])
        probs = record.distribution_TE[keep].numpy()
        seen["max_violation"].append(max_violation(load))
        seen["score_variance"].append(score_variance(record.scores_TE[keep].numpy()))
        seen["entropy"].append(routing_entropy(probs))
        seen["activation_cosine"].append(gram_cosine(record.activations_gram_TKK[keep].numpy()))
        seen["output_cosine"].append(gram_cosine(record.outputs_gram_TKK[keep].numpy()))
        if below:
            seen["coupling_mass"].append(
                coupling_mass(below[-1][0], below[-1][1], probs, record.index_TK.shape[1])
            )
        below.append((probs, record.index_TK[keep].numpy()))
        gate = record.expert_factors("gate")
        weight = gate.weight_EOI
        if gate.a_ErI is not None:
            weight = weight + gate.scaling * gate.b_EOr @ gate.a_ErI
        router = record.router_weight_EH
        seen["erc_loss"].append(erc_table(router.numpy(), weight.numpy(), alphas=(1,))["loss"][1])
        unit = torch.nn.functional.normalize(router, dim=1)
        off = (unit @ unit.t()).square().fill_diagonal_(0)
        seen["router_cosine_squared"].append(off.sum().item() / (len(off) * (len(off) - 1)))
        ids = record.token_ids_T[keep].numpy()
        logits = record.logits_TE[keep].numpy()
        seen["conditional_mean_rank"].append(float(conditional_mean_rank(logits, ids, table, k=1)))

    model.eval()
    inputs = next(batches(rows, len(rows), 1, pad))
    inputs.pop("labels")
    needs = frozenset({"activations_gram", "outputs_gram"})
    recorder = Recorder(
        model, observers=[observer], needs=needs, observe="all", perturbation=perturbation
    )
    with torch.no_grad(), recorder:
        model(**inputs, logits_to_keep=1)
    return {name: float(np.mean(values)) for name, values in seen.items()}


def train(method, checkpoint, train_rows, held_out, table_file, table, arguments, pad):
    torch.manual_seed(arguments.seed)
    model = add_lora(
        load_model(checkpoint, dtype="float32"),
        LoraSection(rank=8, alpha=32.0, targets=["attention", "experts"]),
        "full",
    ).train()
    options = dict(PRESETS[method].method())
    if "supervised_routing" in options["terms"]:
        options["terms"]["supervised_routing"]["table"] = str(table_file)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=arguments.learning_rate
    )
    losses, start = [], time.perf_counter()
    with Specialization(model, options, total_steps=arguments.steps) as work:
        for batch in batches(train_rows, arguments.batch, arguments.steps, pad):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            work.step()
            losses.append(loss.item())
    values = measure(model, held_out, table, work.perturbation, pad)
    values["train_loss"] = float(np.mean(losses[-20:]))
    values["seconds"] = time.perf_counter() - start
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(CLAIMS))
    parser.add_argument("--save", help="name of the file in results/")
    arguments = parser.parse_args()
    checkpoint = ensure_demo_checkpoint()
    tokenizer = load_tokenizer(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        data = write_demo_data(Path(folder) / "data")
        section = DataSection(
            train=str(data / TRAIN_FILE),
            validation=str(data / VALIDATION_FILE),
            format="prompt_completion",
            max_length=256,
        )
        training, validation = load_dataset_for(section, tokenizer, 0)
        train_rows, held_out = training.to_list(), validation.to_list()[:96]
        experts = 16
        table = frequency_table(train_rows, len(tokenizer), experts)
        table_file = Path(folder) / "table.safetensors"
        save_file({"token_frequencies": table}, table_file)
        wanted = list(dict.fromkeys(["none", "aux_loss", *arguments.methods]))
        found = {}
        for method in wanted:
            found[method] = train(
                method, checkpoint, train_rows, held_out, table_file, table.numpy(), arguments, 0
            )
            print(
                method, json.dumps({k: round(v, 5) for k, v in found[method].items()}), flush=True
            )
    rows = []
    for method in arguments.methods:
        base = BASELINE.get(method, "aux_loss")
        for metric, sign in CLAIMS[method]:
            before, after = found[base][metric], found[method][metric]
            rows.append(
                {
                    "method": method,
                    "metric": metric,
                    "baseline": base,
                    "baseline_value": before,
                    "value": after,
                    "as_the_paper_says": bool((after - before) * sign > 0),
                }
            )
            verdict = "" if rows[-1]["as_the_paper_says"] else "NOT "
            print(
                f"{method:28s}{metric:24s}{before:12.5f} -> {after:12.5f}  "
                f"{verdict}as the paper says"
            )
    if arguments.save:
        result = {
            "date": datetime.date.today().isoformat(),
            "arguments": {k: v for k, v in vars(arguments).items() if k != "save"},
            "environment": describe_environment(),
            "values": found,
            "claims": rows,
        }
        (RESULTS / f"{arguments.save}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
