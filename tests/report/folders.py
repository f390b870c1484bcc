"""Run folders with plausible results, made up from a seed."""

import json
from pathlib import Path

import numpy as np
import yaml

TASKS = ("arithmetic", "code_completion", "prose_cloze", "gsm8k")
WORDS = (
    *("def", "add", "(", "a", ",", "b", "):", "return", "a", "+", "b"),
    *("Tom", "buys", "4", "more"),
)
DOMAINS = ("arithmetic", "code", "prose")


def routing(
    rng: np.random.Generator,
    *,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 4,
    evenness: float = 1.0,
    sharpness: float = 1.0,
) -> dict:
    """A snapshot; a larger ``evenness`` spreads the load, a larger ``sharpness`` parts domains."""
    probs_LE = rng.dirichlet(np.full(experts, evenness), size=layers)
    load_LE = np.round(probs_LE * 20_000 * top_k).astype(int)
    domains = {}
    for index, name in enumerate(DOMAINS):
        own_E = 1 + sharpness * (np.arange(experts) % len(DOMAINS) == index)
        domains[name] = np.round(load_LE * own_E * rng.uniform(0.7, 1.3, load_LE.shape) / 3 + 1)
    shares_EE = rng.dirichlet(np.full(experts, 0.8 / sharpness), size=experts)
    transition_EE = np.minimum(shares_EE * top_k, 1.0)
    violation = load_LE.max(1) / load_LE.mean(1) - 1
    per_layer = {
        "max_violation": violation.tolist(),
        "entropy": rng.uniform(1.6, 2.1, layers).tolist(),
        "score_variance": (0.008 + 0.006 * sharpness * rng.uniform(0.8, 1.2, layers)).tolist(),
        "expert_overlap": rng.uniform(0.3, 0.5, layers).tolist(),
        "silhouette": rng.uniform(-0.1, 0.2, layers).tolist(),
        "router_cosine": rng.uniform(0.1, 0.2, layers).tolist(),
    }
    words = WORDS
    return {
        "layers": list(range(layers)),
        "num_experts": experts,
        "top_k": top_k,
        "tokens": 20_000,
        "load": load_LE.tolist(),
        "conditional_activation": {"layers": [1, 2], "matrix": transition_EE.tolist()},
        "domains": {name: counts.tolist() for name, counts in domains.items()},
        "metrics": {
            name: {"per_layer": values, "mean": float(np.mean(values))}
            for name, values in per_layer.items()
        },
        "coherence": {
            "per_layer": [
                {"mean": float(m), "share_below": float(rng.uniform(0.1, 0.6))}
                for m in rng.uniform(0.1, 0.4, layers) / sharpness
            ],
            "barrier": 1 / (2 * top_k - 1),
        },
        "colored_text": [
            {
                "tokens": [f"{w} " for w in words * 4],
                "experts": rng.choice(experts, size=4 * len(words), p=probs_LE[0]).tolist(),
                "selected": rng.permuted(np.tile(np.arange(experts), (4 * len(words), 1)), axis=1)[
                    :, :top_k
                ].tolist(),
                "layer": 2,
            }
        ],
    }


def metrics_lines(rng: np.random.Generator, steps: int = 300, drop: float = 1.4) -> list[str]:
    """Training and evaluation lines as the callback writes them."""
    lines = []
    for step in range(5, steps + 1, 5):
        done = step / steps
        record = {
            "kind": "train",
            "step": step,
            "epoch": round(2 * done, 3),
            "loss": 1.1 + drop * np.exp(-4 * done) + 0.06 * rng.normal(),
            "learning_rate": 1e-4 * (1 - done),
            "grad_norm": 1 + rng.exponential(0.4),
            "num_tokens": 4096.0 * step,
            "entropy": 1.4 - 0.2 * done,
            "tokens_per_second": 2400 + 80 * rng.normal(),
            "losses/load_balance": 4.2 + 0.6 * np.exp(-3 * done) + 0.03 * rng.normal(),
            "losses/orthogonality": 0.9 * np.exp(-2 * done) + 0.02 * abs(rng.normal()),
            "losses/variance": -0.02 - 0.01 * done,
            "routing/max_violation": 0.6 + 0.7 * np.exp(-3 * done) + 0.04 * rng.normal(),
            "routing/entropy": 2.0 - 0.3 * done,
            "routing/score_variance": 0.01 + 0.008 * done,
            "routing/load_entropy": 2.5 + 0.2 * done,
        }
        lines.append(
            json.dumps({k: v if isinstance(v, str) else float(v) for k, v in record.items()})
        )
        if step % 50 == 0:
            lines.append(
                json.dumps(
                    {"kind": "eval", "step": step, "eval_loss": 1.2 + drop * np.exp(-4 * done)}
                )
            )
    end = {"kind": "end", "step": steps, "train_runtime": 131.4, "train_loss": 1.31}
    return [*lines, json.dumps(end)]


def results(rng: np.random.Generator, lift: float) -> dict:
    """An evaluation of four tasks, one of them a perplexity."""
    tasks: dict[str, dict] = {}
    for index, name in enumerate(TASKS):
        value = round(min(0.97, 0.2 + 0.15 * index + lift * rng.uniform(0.5, 1.5)) * 200) / 200
        tasks[name] = {
            "metric": "exact_match",
            "value": value,
            "stderr": float(np.sqrt(value * (1 - value) / 199)),
            "n": 200,
            "chance": 0.01 * index,
        }
    tasks["wikitext"] = {"metric": "perplexity", "value": 14.2 - 8 * lift, "stderr": 0.4, "n": 62}
    for task in tasks.values():
        task["metrics"] = {
            f"{task['metric']},none": {"value": task["value"], "stderr": task["stderr"]},
            "bleu,none": {"value": 0.31, "stderr": None},
        }
        task["notes"] = []
    return {
        "schema": 1,
        "complete": True,
        "suite": {"name": "demo", "sha256": "0" * 64},
        "checkpoint": {"path": "merged", "sha256": "1" * 64},
        "backend": "vllm",
        "settings": {"limit": None, "dtype": "float32"},
        "tasks": tasks,
        "unfinished": [],
        "notes": [],
    }


def write_run(
    folder: Path,
    seed: int = 0,
    *,
    preset: str = "orthogonal_variance",
    lift: float = 0.2,
    evenness: float = 6.0,
    sharpness: float = 2.0,
    layers: int = 4,
    experts: int = 16,
    steps: int = 300,
    base: bool = True,
) -> Path:
    """Write a run's folder with every file that the report can read."""
    rng = np.random.default_rng(seed)
    for inner in ("routing", "eval", "eval_base"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    recipe = {
        "model": {"path": "demo/qwen3-moe-tiny", "dtype": "float32"},
        "method": {
            "preset": preset,
            "terms": {"load_balance": {"weight": 0.001, "layers": "all"}},
        },
        "router": {"train": "full"},
        "lora": {"rank": 32, "alpha": 128, "targets": ["attention", "experts"]},
        "data": {"train": "gsm8k_train.jsonl", "max_length": 256},
        "trainer": {
            "learning_rate": 1e-4,
            "max_steps": steps,
            "seed": 42,
            "hub_token": "hf_secret",
        },
    }
    environment = {
        "date": "2026-01-02",
        "python": "3.11.2",
        "packages": {"torch": "2.13.0", "transformers": "5.19.0", "peft": "0.21.2", "vllm": None},
        "processor": "Some CPU @ 2.4GHz",
        "cores": 2,
        "accelerators": [],
    }
    # the checkpoint before fine-tuning is the same for every run of one architecture
    before = routing(np.random.default_rng(99), layers=layers, experts=experts)
    after = routing(rng, layers=layers, experts=experts, evenness=evenness, sharpness=sharpness)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (folder / "metrics.jsonl").write_text("\n".join(metrics_lines(rng, steps)) + "\n")
    for name, data in (
        ("environment.json", environment),
        ("summary.json", {"seconds": 194.6, "verify": "largest difference 2e-6"}),
        ("routing/before.json", before),
        ("routing/after.json", after),
        ("eval/results.json", results(rng, lift)),
    ):
        (folder / name).write_text(json.dumps(data))
    held = ("layers", "num_experts", "top_k", "tokens", "load", "conditional_activation")
    lines = []
    for step in (steps // 3, 2 * steps // 3, steps):
        found = routing(rng, layers=layers, experts=experts, evenness=evenness)
        lines.append(json.dumps({"step": step, **{key: found[key] for key in held}}) + "\n")
    (folder / "routing" / "steps.jsonl").write_text("".join(lines))
    if base:
        data = results(np.random.default_rng(99), 0.0)
        (folder / "eval_base" / "results.json").write_text(json.dumps(data))
    return folder
