"""Start each writing verb twice into one output, many times, and count the outcomes.

    python eval/bench/pairs.py --repeat 40
    python eval/bench/pairs.py --verbs train --repeat 10

A pair is right if one process wins and the other is refused (exit code 2, naming the output), or if
both finish one after the other with the same result. The output must then contain exactly what a
single process writes, byte for byte (``train``: the recipe and the adapter of one of the two), and
no other file. Where the verb allows it, the two have different settings, so a mixture would show.
Adds one line to ``eval/bench/results/pairs.jsonl``.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VERBS = ("merge", "convert", "select", "analyze", "report", "eval", "train")
# Files that differ between two equal runs.
CLOCK = ("environment.json", "summary.json", "metrics.jsonl", "checkpoints")


def prepare(folder: Path) -> dict[str, list[list[str]]]:
    """Inputs, and for every verb its two commands (without ``--output``)."""
    import torch

    from tests import tiny
    from tests.checkpoint.helpers import adapter
    from tests.faults.harness import write_inputs

    torch.set_num_threads(1)
    bases = [folder / name / "qwen3_moe" for name in "ab"]
    for base in bases:
        tiny.save("qwen3_moe", base)
    adapters = [adapter(bases[0], folder / f"adapter{seed}", seed=seed) for seed in (3, 4)]
    (folder / "t").mkdir()
    recipe = write_inputs("qwen3_moe", folder / "t")
    text = folder / "text.jsonl"
    rows = [{"text": f"{i} and {7 * i}"} for i in range(6)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = [{"question": f"{i}?", "choices": ["a", "b"], "answer": i % 2} for i in range(4)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    for name, split in (("x", "one"), ("y", "two")):
        task = {"task": split, "template": "local_loglikelihood", "metric": "acc"}
        suite = {"name": name, "tasks": [{**task, "files": {"test": "test.jsonl"}}]}
        (folder / f"{name}.yaml").write_text(json.dumps(suite))
    analyze = ["analyze", str(bases[0]), "--data", str(text), "--limit"]
    from moe_finetune import cli

    assert cli.main([*analyze, "5", "-o", str(folder / "analysis")]) == 0
    trace = str(folder / "analysis")
    return {
        "merge": [["merge", str(a), "--base", str(bases[0])] for a in adapters],
        "convert": [["convert", str(base)] for base in bases],
        "select": [["select", trace, "--top-p", share] for share in ("0.2", "0.8")],
        "analyze": [[*analyze, n] for n in ("2", "3")],
        "report": [["report", trace, "--title", title] for title in ("one", "two")],
        "eval": [
            ["eval", str(bases[0]), "-s", str(folder / f"{s}.yaml"), "-b", "hf", "--limit", n]
            for s, n in (("x", "3"), ("y", "2"))
        ],
        "train": [
            ["train", str(recipe), f"trainer.seed={seed}", "trainer.max_steps=2"] for seed in (1, 2)
        ],
    }


def start(command: list[str], log: Path, delay: float) -> int:
    """Fork a process that runs ``command`` after ``delay`` seconds; imports are already done."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        time.sleep(delay)
        from moe_finetune import cli

        code = cli.main(command)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def state(output: Path) -> dict[str, str]:
    """Hash of every file of an output, except files with times."""
    files = [output] if output.is_file() else sorted(p for p in output.rglob("*") if p.is_file())
    found = {}
    for path in files:
        name = path.relative_to(output.parent).as_posix()
        if any(part in CLOCK for part in path.parts):
            continue
        content = path.read_bytes()
        if path.name in ("results.json", "result.json"):
            held = json.loads(content)
            for key in ("started", "wall_seconds", "environment", "usage"):
                held.pop(key, None)
            for task in held.get("tasks", {}).values():
                for key in ("wall_seconds", "usage"):
                    task.pop(key, None)
            content = json.dumps(held, sort_keys=True).encode()
        if path.suffix == ".html" and "train" in output.name:
            continue  # it contains the seconds
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def pairs(commands: list[list[str]], folder: Path, repeat: int, verb: str) -> dict[str, int]:
    """Run ``repeat`` pairs and count their outcomes."""
    chooser, alone, logs = random.Random(0), [], [folder / "log0", folder / "log1"]
    home = folder / "out"
    output = home / ("plan.json" if verb == "select" else f"out-{verb}")
    duration = 0.0
    for command in commands:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        began = time.perf_counter()
        _, status = os.waitpid(start([*command, "-o", str(output)], logs[0], 0), 0)
        duration = time.perf_counter() - began
        assert status == 0, logs[0].read_text()
        alone.append(state(output))
    found = {"one won": 0, "both, one after the other": 0, "wrong": 0}
    for number in range(repeat):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        # Most start at the same moment, the rest anywhere during the other's work.
        delay = 0.0 if number % 2 else chooser.uniform(0, 0.8 * duration)
        both = [[*command, "-o", str(output)] for command in commands]
        chooser.shuffle(both)
        pids = [start(both[0], logs[0], 0.0), start(both[1], logs[1], delay)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [log.read_text() for log in logs]
        clear = all(
            code == 0 or (code == 2 and str(output.name) in text and "Traceback" not in text)
            for code, text in zip(codes, said, strict=True)
        )
        now = state(output)
        whole = now in alone
        clean = [path.name for path in home.iterdir()] == [output.name]
        if verb == "eval" and codes == [0, 0]:  # the second found the first's replies there
            merged = {**alone[0], **alone[1]}
            whole = all(now[name] in (alone[0].get(name), alone[1].get(name)) for name in merged)
        if not (clear and whole and clean and 0 in codes):
            found["wrong"] += 1
            print(verb, codes, whole, [p.name for p in home.iterdir()], *said, sep="\n")
        elif codes == [0, 0]:
            found["both, one after the other"] += 1
        else:
            found["one won"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    from moe_finetune import cli  # noqa: F401
    from moe_finetune.io.environment import describe_environment

    row = {"date": datetime.date.today().isoformat(), "repeat": options.repeat, "verbs": {}}
    with tempfile.TemporaryDirectory() as name:
        commands = prepare(Path(name))
        for verb in options.verbs:
            row["verbs"][verb] = pairs(commands[verb], Path(name), options.repeat, verb)
            print(verb, row["verbs"][verb], flush=True)
    row["packages"] = describe_environment()["packages"]
    results = ROOT / "eval" / "bench" / "results" / "pairs.jsonl"
    with results.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
