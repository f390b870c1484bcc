"""Kill, signal, damage and soak training runs, and count wrong results.

    python eval/bench/faults.py kills --repeat 40
    python eval/bench/faults.py signals --repeat 20
    python eval/bench/faults.py writes
    python eval/bench/faults.py files
    python eval/bench/faults.py soak --steps 2000

Each part adds one line to ``eval/bench/results/faults.jsonl``. "Wrong" is a final adapter whose
bytes, or a log whose numbers, differ from those of an undisturbed run.
"""

import argparse
import datetime
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_finetune.training.checkpoint import checkpoints, newest_checkpoint  # noqa: E402
from tests.faults.harness import (  # noqa: E402
    METHODS,
    SAVE,
    STEPS,
    adapter_hash,
    logged,
    train,
    write_inputs,
)
from tests.warm import Server, forked_from  # noqa: E402


class Bench:
    """For each family a recipe and the undisturbed run's hash, log and duration."""

    def __init__(self, folder: Path, families: list[str]):
        self.folder = folder
        self.straight = {}
        for family in families:
            (folder / family).mkdir()
            recipe = write_inputs(family, folder / family)
            run = folder / family / "straight"
            started = time.perf_counter()
            child = train(recipe, run)
            assert child.code == 0, child.text
            seconds = time.perf_counter() - started
            self.straight[family] = (recipe, adapter_hash(run), logged(run), seconds)

    def run(self, family: str, **disturbance) -> tuple[int, bool]:
        """Disturb a run, then resume it until it ends.

        Returns the exit code of the disturbed part, and whether the result is right.

        ``disturbance`` are arguments of :func:`~tests.faults.harness.train`.
        """
        recipe, wanted, log, _ = self.straight[family]
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        child = train(recipe, run, **disturbance)
        first = child.code
        for _ in range(3):
            if child.code == 0:
                break
            child = train(recipe, run)
        right = child.code == 0 and adapter_hash(run) == wanted and logged(run) == log
        if not right:
            print(family, child.code, child.text[-1500:])
        return first, right


def kills(bench: Bench, repeat: int) -> dict:
    chooser = random.Random(0)
    families, done, right = list(bench.straight), 0, 0
    while done < repeat:
        family = families[done % len(families)]
        # Half of them during a save, which a uniform moment seldom hits.
        if done % 2:
            code, fine = bench.run(family, die_at=chooser.choice(SAVE))
        else:
            moment = chooser.uniform(0.1, 1.0) * bench.straight[family][3]
            code, fine = bench.run(family, signal_after=moment)
        if code == 0:
            continue  # it ended before the signal
        done += 1
        right += fine
    return {"killed": done, "right": right}


def signals(bench: Bench, repeat: int) -> dict:
    families, codes, right = list(bench.straight), 0, 0
    for number in range(repeat):
        family, step = families[number % len(families)], 1 + number % (STEPS - 1)
        code, fine = bench.run(family, signal_at_step=step, number=signal.SIGTERM)
        codes, right = codes + (code == 130), right + fine
    return {"signalled": repeat, "ended with 130": codes, "right": right}


def writes(bench: Bench, repeat: int) -> dict:
    points = right = 0
    for family in bench.straight:
        for place in SAVE:
            code, fine = bench.run(family, die_at=place)
            assert code == -signal.SIGKILL
            points, right = points + 1, right + fine
    return {"points": points, "right": right}


def files(bench: Bench, repeat: int) -> dict:
    """Damage every file of the newest checkpoint; count which checkpoint a resume picks."""
    cases = silent = 0
    for family, (recipe, *_) in bench.straight.items():
        root = recipe.parent / "straight" / "checkpoints"
        newest, older = checkpoints(root)[:2]
        for file in sorted(newest.iterdir()):
            whole = file.read_bytes()
            flipped = bytearray(whole)
            flipped[random.Random(0).randrange(len(whole))] ^= 1
            for content in (None, whole[: len(whole) // 2], bytes(flipped)):
                file.unlink() if content is None else file.write_bytes(content)
                found, problems = newest_checkpoint(root)
                cases += 1
                if found != older or newest.name not in problems[0]:
                    silent += 1
                    print("silent:", family, file.name)
                file.write_bytes(whole)
    return {"cases": cases, "silent": silent}


def soak(steps: int) -> dict:
    """Memory of one long run that saves and logs throughout."""
    import torch
    from transformers import TrainerCallback

    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.recipe.tree import merge_mappings
    from moe_finetune.run import run_recipe
    from moe_finetune.training import trainer as stage_trainer

    torch.set_num_threads(1)
    seen: list[tuple[int, int]] = []

    class Memory(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 10 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                seen.append((state.global_step, pages * 4096))

    build = stage_trainer.build_trainer

    def watched(*args):
        trainer, callback = build(*args)
        trainer.add_callback(Memory())
        return trainer, callback

    stage_trainer.build_trainer = watched
    with tempfile.TemporaryDirectory() as name:
        recipe = json.loads(write_inputs("qwen3_moe", Path(name)).read_text())
        changes = {"max_steps": steps, "save_steps": 100, "logging_steps": 10}
        changes |= {"gradient_accumulation_steps": 1, "learning_rate": 1e-4}
        recipe = merge_mappings(recipe, {"trainer": changes})
        run_recipe(Recipe.model_validate(recipe), Path(name) / "run")
    later = [size for step, size in seen if step >= 200]
    tenth = max(1, len(later) // 10)
    first, last = sum(later[:tenth]) / tenth, sum(later[-tenth:]) / tenth
    return {
        "steps": steps,
        "growth_after_200_percent": round(100 * (last / first - 1), 3),
        "resident_mb": round(last / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["kills", "signals", "writes", "files", "soak"])
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--families", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    started = time.perf_counter()
    if options.part == "soak":
        figures = soak(options.steps)
    else:
        server = Server.begin()
        with tempfile.TemporaryDirectory() as folder, forked_from(server):
            bench = Bench(Path(folder), options.families)
            figures = globals()[options.part](bench, options.repeat)
        server.close()
    from moe_finetune.io.environment import describe_environment

    environment = describe_environment()
    row = {
        "part": options.part,
        **figures,
        "families": ["qwen3_moe"] if options.part == "soak" else options.families,
        "seconds": round(time.perf_counter() - started, 1),
        "date": datetime.date.today().isoformat(),
        "packages": environment["packages"],
        "processor": environment["processor"],
    }
    print(json.dumps({k: v for k, v in row.items() if k != "packages"}))
    results = ROOT / "eval" / "bench" / "results" / "faults.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
