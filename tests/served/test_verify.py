"""``verify`` at the command line: against stubs in each form, and against real vLLM."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from moe_finetune import cli
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import EvaluationError
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.served import client
from moe_finetune.served.client import Served
from moe_finetune.served.rendering import compare_rendering
from tests.checkpoint.helpers import adapter, load
from tests.served import stub as stubs
from tests.served.stub import stub
from tests.support import tiny
from tests.support.vllm_server import ROOT, free_port, needs_vllm

COMPLETIONS = "/v1/completions"
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, two adapters and their merges."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    base = tiny.save("qwen3_moe", folder / "base")
    for name, seed in (("right", 3), ("other", 4)):
        trained = adapter(base, folder / f"{name}-adapter", seed, r=5, scale=0.06)
        merge_adapter(base, trained, folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folder):
    return {name: load(folder / name).eval() for name in ("base", "right", "other")}


@pytest.fixture(autouse=True)
def fewer_prompts(monkeypatch):
    monkeypatch.setattr(client, "GENERATED", 6)


def verify(*arguments, capsys=None):
    code = cli.main(["verify", *map(str, arguments)])
    return code, capsys.readouterr()


@pytest.mark.parametrize("form", ["vllm", "echo", "llama.cpp"])
@pytest.mark.parametrize(
    ("served", "verdict", "code"),
    [
        ("right", "the trained model", 0),
        ("base", "the base: the adapter is not applied", 1),
        ("other", "another model", 1),
    ],
)
def test_the_served_model_is_named(folder, models, capsys, form, served, verdict, code):
    tokenizer = load_tokenizer(folder / "right")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{n * n} rows, {n}"}) + "\n" for n in range(9)))
    with stub({"tuned": models[served]}, tokenizer, form) as server:
        options = [
            "--base",
            folder / "base",
            "--served",
            server.url,
            "--prompts",
            prompts,
            "--json",
        ]
        ended, output = verify(folder / "right", *options, capsys=capsys)
    report = json.loads(output.out)
    assert (report["verdict"], ended) == (verdict, code)
    assert report["prompts"] == 9 and report["rendering"] == "same"
    assert not report["floor"]["measured"]
    assert report["greedy"] == (None if form == "echo" else pytest.approx(report["greedy"]))
    if served == "right" and form != "echo":
        assert report["greedy"] == 1.0


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_run_is_asked_its_own_rows_and_keeps_the_verdict(folder, models, capsys, tmp_path, stage):
    """Validation rows first; ``served.json`` is written again at each check."""

    def row(text):
        turns = [{"role": "user", "content": text}]
        answer = [{"role": "assistant", "content": f"{text} is it."}]
        if stage == "sft":
            return {"messages": turns + answer}
        return {"prompt": turns, "chosen": answer, "rejected": [{**answer[0], "content": "No."}]}

    for name, count in (("train", 40), ("held", 3)):
        rows = [row(f"{name} {n * n}") for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = tmp_path / "run"
    run.mkdir()
    recipe = {
        "stage": stage,
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "method": "none",
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "validation": str(tmp_path / "held.jsonl"),
            "packing": False,
        },
    }
    (run / "recipe.yaml").write_text(recipe_from_tree(Tree(recipe)).to_yaml())
    (run / "merged").symlink_to(folder / "right")
    (run / "adapter").symlink_to(folder / "right-adapter")
    tokenizer = load_tokenizer(folder / "right")
    for served, verdict in (("base", "the base: the adapter is not applied"),
                            ("right", "the trained model")):  # fmt: skip
        with stub({"tuned": models[served]}, tokenizer) as server:
            options = ["--base", folder / "base", "--served", server.url]
            code, output = verify(run, *options, capsys=capsys)
        assert (run / "served.json").is_file(), output
        kept = json.loads((run / "served.json").read_text())
        assert (kept["verdict"], code) == (verdict, int(served == "base")), output
        assert kept["prompts"] == (32 if stage == "sft" else 3)
    prompts = [body["prompt"] for path, body in server.bodies if path == COMPLETIONS]
    asked = [tokenizer.decode(ids) for ids in prompts]
    assert all("held" in text for text in asked[:3])
    assert all("train" in text for text in asked[3:-1])


def test_an_unmerged_adapter_and_a_measured_floor(folder, models, capsys):
    tokenizer = load_tokenizer(folder / "base")
    served = {"tuned": models["right"], "plain": models["base"]}
    options = ["--base", folder / "base", "--model", "tuned", "--base-model", "plain"]
    with stub(served, tokenizer) as server:
        source = folder / "right-adapter"
        code, output = verify(source, *options, "--served", server.url, capsys=capsys)
        assert code == 0 and "the trained model\n" in output.out and "(measured)" in output.out
        options[3], options[5] = "plain", "tuned"  # both exchanged: the floor is an adapter's size
        code, output = verify(source, *options, "--served", server.url, capsys=capsys)
    assert code == 1 and "cannot tell" in output.out


def test_another_template_is_no_trained_model(folder, models, capsys):
    tokenizer = load_tokenizer(folder / "right")
    for form in ("vllm", "echo"):  # one renders chats to ids, the other counts them
        with stub({"tuned": models["right"]}, tokenizer, form, template=OTHER) as server:
            options = ["--base", folder / "base", "--served", server.url]
            code, output = verify(folder / "right", *options, capsys=capsys)
        assert code == 1 and "'tuned': another chat template" in output.out
        assert "tokens on the server" in output.out


def test_a_rounded_model_needs_the_option(folder, models, capsys):
    model = load(folder / "right").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    options = ["--base", folder / "base", "--served"]
    with stub({"tuned": model}, load_tokenizer(folder / "right")) as server:
        code, output = verify(folder / "right", *options, server.url, capsys=capsys)
        assert code == 1 and "the trained model, rounded (" in output.out
        assert verify(folder / "right", *options, server.url, "--rounded", capsys=capsys)[0] == 0


@pytest.mark.parametrize("token", [100_000, -1, 10**30])
def test_a_token_that_the_model_does_not_know_is_refused(folder, models, capsys, token):
    tokenizer = load_tokenizer(folder / "right")
    row = stubs.answers({"logprobs": {"content": [{"id": token, "logprob": -1.5}]}})
    with stub({"tuned": models["right"]}, tokenizer, "llama.cpp", row) as server:
        code, output = verify(folder / "right", "--served", server.url, capsys=capsys)
    assert code == 2 and f"token {token} is not in the model's vocabulary" in output.err


@pytest.mark.parametrize("status", [400, 422])
def test_a_tokenize_with_other_fields_leaves_the_count(folder, models, status):
    tokenizer = load_tokenizer(folder / "right")
    for template, result in ((None, "same"), (OTHER, "another")):
        with stub(models, tokenizer, "echo", template=template, tokenize=status) as server:
            assert compare_rendering(Served(server.url, "right"), tokenizer)[0] == result


def test_a_second_server_is_the_reference(folder, models, capsys):
    tokenizer = load_tokenizer(folder / "right")
    with (
        stub({"tuned": models["right"]}, tokenizer) as served,
        stub({"x": models["right"]}, tokenizer, "echo") as same,
        stub({"y": models["base"]}, tokenizer) as base,
    ):
        source = ["--served", served.url, "--reference"]
        code, output = verify(folder / "right", *source, same.url, capsys=capsys)
        assert code == 0 and "'tuned': the reference" in output.out
        code, output = verify(folder / "right", *source, base.url, capsys=capsys)
        assert code == 1 and "'tuned': not the reference" in output.out
        code, output = verify(folder / "right", *source, served.url, capsys=capsys)
        assert code == 2 and "--reference: is the server that is checked" in output.err
        both = [same.url, "--reference-base", base.url]
        code, output = verify(folder / "right", *source, *both, capsys=capsys)
        assert code == 0 and "'tuned': the trained model" in output.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "x"], "--served: give the server's address"),
        (["--rounded"], "--served: give the server's address"),
        ([], "--adapter"),
        (["--served", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1/models"),
        (["--served", "http://me:secret@127.0.0.1:9"], "OPENAI_API_KEY"),
        (["--served", "SERVER", "--model", "tunde"], "did you mean 'tuned'"),
        (["--served", "SERVER", "--prompts", "none.jsonl"], "none.jsonl"),
        (["--served", "SERVER", "--prompts", "PROMPTS"], "1 prompts of at least 2 tokens"),
        (["--served", "SERVER", "--base-model", "tuned"], "give it with --base"),
        (["--served", "SERVER", "--reference-base", "SERVER"], "is the base of --reference"),
        (
            ["--served", "SERVER", "--base-model", "tuned", "--reference", "SERVER"],
            "give --reference-base URL",
        ),
    ],
)
def test_wrong_input_is_exit_code_2(folder, models, capsys, tmp_path, arguments, words):
    (tmp_path / "few.txt").write_text("Only one line.\n\n")
    with stub({"tuned": models["right"]}, load_tokenizer(folder / "right")) as server:
        places = {"SERVER": server.url, "PROMPTS": tmp_path / "few.txt"}
        chosen = [places.get(argument, argument) for argument in arguments]
        code, output = verify(folder / "right", *chosen, capsys=capsys)
    assert code == 2 and words in output.err.replace("\n", " "), output.err
    assert "secret" not in output.err


def test_a_model_that_does_not_fit_names_the_second_server(folder, models, capsys, monkeypatch):
    monkeypatch.setattr("moe_finetune.served.reference.ROOM", 1e-9)
    with stub({"tuned": models["right"]}, load_tokenizer(folder / "right")) as server:
        options = ["--base", folder / "base", "--served", server.url]
        code, output = verify(folder / "right", *options, capsys=capsys)
    assert code == 2 and "--reference URL" in output.err


def test_a_merge_is_checked_again(folder, capsys):
    options = ["--adapter", folder / "right-adapter", "--base", folder / "base"]
    code, output = verify(folder / "right", *options, capsys=capsys)
    assert code == 0 and "verified: " in output.out
    code, output = verify(folder / "other", *options, capsys=capsys)
    assert code == 1 and "is not base + adapter" in output.err


def test_late_answers_are_refused_with_the_address(folder, models, capsys, monkeypatch):
    monkeypatch.setattr(client, "SECONDS", 0.2)
    tokenizer = load_tokenizer(folder / "right")
    with stub({"tuned": models["right"]}, tokenizer, "vllm", stubs.late) as server:
        options = ["--base", folder / "base", "--served", server.url]
        code, output = verify(folder / "right", *options, capsys=capsys)
    assert code == 2 and "no answer within 0.2 s" in output.err and server.url in output.err


@contextmanager
def vllm(checkpoint, log):
    """A real server of a checkpoint, and its address."""
    port = free_port()
    options = ["--port", str(port), "--served-model-name", "tuned", "--max-model-len", "256"]
    command = [sys.executable, "-m", "moe_finetune.cli", "serve", str(checkpoint), *options]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=os.environ)
    try:
        while True:
            with suppress(EvaluationError):
                yield Served(f"http://127.0.0.1:{port}").url
                return
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_real_vllm(warm_vllm, folder, capsys, tmp_path):
    """Every family and every fault: ``eval/bench/served.py``."""
    verdicts = {"right": "the trained model", "base": "the base: the adapter is not applied"}
    for name, verdict in verdicts.items():
        with vllm(folder / name, tmp_path / "log") as url:
            options = ["--base", folder / "base", "--served", url, "--json"]
            code, output = verify(folder / "right", *options, capsys=capsys)
        report = json.loads(output.out)
        assert (report["verdict"], code) == (verdict, int(name != "right"))
        assert report["rendered"] == "tokens of a chat" and report["prompts"] == 32
