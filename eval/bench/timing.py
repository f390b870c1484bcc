"""Time variants step by step in turn, so that a noisy machine slows all of them."""

import math
import resource
import statistics
import time

import torch


def time_steps(variants, batch, arguments, settle=0, until=math.inf):
    """Seconds and page faults of each variant's timed steps, interleaved.

    Ends early, after three rounds or more, once ``until`` (of time.monotonic) has passed.
    """
    clock = time.process_time if getattr(arguments, "processor_time", False) else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    faults: dict[str, list[int]] = {name: [] for name in variants}
    for round_ in range(arguments.rounds + arguments.warmup):
        if round_ > arguments.warmup + 2 and time.monotonic() > until:
            break
        order = list(variants.values())
        for variant in order if round_ % 2 == 0 else order[::-1]:
            for _ in range(settle):
                variant.step(batch)
            synchronize(arguments.device)
            faulted, start = page_faults(), clock()
            variant.step(batch)
            synchronize(arguments.device)
            if round_ >= arguments.warmup:
                seconds[variant.name].append(clock() - start)
                faults[variant.name].append(page_faults() - faulted)
    return seconds, faults


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def cuda_peak_gb(step) -> float:
    """GB that ``step`` allocates at its peak, above what is allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def batch_of(arguments, vocab):
    generator = torch.Generator().manual_seed(1)
    length = min(arguments.length, arguments.tokens)
    rows = max(arguments.tokens // arguments.length, 1)
    ids = torch.randint(0, vocab, (rows, length), generator=generator).to(arguments.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def add_step(parser, **defaults) -> None:
    """The options of a step's size; ``defaults`` differ from script to script."""
    parser.add_argument("--layers", type=int, help="default: the geometry's, or as many as fit")
    for name in ("tokens", "length", "rank", "rounds", "warmup"):
        parser.add_argument(f"--{name}", type=int, default=defaults[name])
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gradient-checkpointing", action="store_true")


def timed_row(seconds, tokens) -> dict[str, float]:
    """What is kept of a variant's steps."""
    median = statistics.median(seconds)
    return {"median_s": median, "min_s": min(seconds), "rounds": len(seconds),
            "tokens_per_s": tokens / median}  # fmt: skip


def ratios(rows, pairs) -> dict[str, float]:
    """``pairs`` maps a label to two variants and a figure; those not measured are left out."""
    return {
        label: rows[top][key] / rows[bottom][key]
        for label, (top, bottom, key) in pairs.items()
        if all(rows.get(name, {}).get(key) for name in (top, bottom))
    }
