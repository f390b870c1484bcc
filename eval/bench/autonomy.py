"""Cost of Autonomy-of-Experts against a router, with and without ERC: P2's comparison.

Times training steps from scratch (forward, backward, AdamW) of three models with the same number of
weights, in float32 on one thread, interleaved. Times are processor times, so other work on the
machine matters little. Peak memory is measured in a separate process for each.

    python eval/bench/autonomy.py --save
"""

import argparse
import multiprocessing
import time
from pathlib import Path
from statistics import median

import torch
from saved import add_save, finish
from transformers import AutoModelForCausalLM, OlmoeConfig

from moe_finetune import Specialization
from moe_finetune.models import native

ERC = {"preset": "erc", "strength": {"first": False}}  # which would take a forward more
BALANCE = {**ERC, "terms": {"erc": {"weight": 0}}}
ARMS = {"vanilla": BALANCE, "erc": ERC, "autonomy": BALANCE}


class Arm:
    """A model, its method and its optimizer."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        native.register()
        from moe_finetune.models.autonomy.modeling import AutonomyConfig

        kind = AutonomyConfig if name == "autonomy" else OlmoeConfig
        config = kind(
            vocab_size=arguments.vocabulary,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.width,
            num_hidden_layers=arguments.layers,
            num_attention_heads=8,
            num_experts=arguments.experts,
            num_experts_per_tok=8,
        )
        torch.manual_seed(1)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = torch.randint(1, arguments.vocabulary, (arguments.tokens // 512, 512))
        self.method = Specialization(self.model, ARMS[name], total_steps=1000)

    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> float:
        """Processor seconds of one step."""
        start = time.process_time()
        with self.method:
            self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
            self.optimizer.step()
            self.method.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start


def peak_bytes(name: str, arguments: argparse.Namespace) -> int:
    """Peak memory in bytes of three steps in a separate process, minus its memory at the start."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def measure() -> None:
        before = highest()
        arm = Arm(name, arguments)
        for _ in range(3):
            arm.step()
        theirs.send(highest() - before)

    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return int(found)


def highest() -> int:
    """Peak resident bytes of this process; in a fork, since the fork (unlike ru_maxrss)."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, value in {
        "rounds": 5, "tokens": 1024, "layers": 1, "hidden": 512, "width": 256, "experts": 64,
        "vocabulary": 2048,
    }.items():  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=value)
    add_save(parser, "autonomy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peaks = {name: peak_bytes(name, arguments) for name in ARMS}
    arms = {name: Arm(name, arguments) for name in ARMS}
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for round_ in range(arguments.rounds + 1):
        order = list(ARMS) if round_ % 2 else list(ARMS)[::-1]
        for name in order:
            taken = arms[name].step()
            if round_:
                seconds[name].append(taken)
    figures = {
        name: {
            "weights": arms[name].weights(),
            "processor_s_median": round(median(seconds[name]), 3),
            "time": round(median(seconds[name]) / median(seconds["vanilla"]), 3),
            "peak_gb": round(peaks[name] / 1e9, 3),
            "memory": round(peaks[name] / peaks["vanilla"], 3),
        }
        for name in ARMS
    }
    finish(arguments, {"arms": figures})


if __name__ == "__main__":
    main()
