"""Two models side by side: what they say, what they remember, and who took the last token."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

from moe_finetune import cli
from moe_finetune.errors import DataError
from moe_finetune.evaluation.chat import experts_table, open_speakers, talk, visible
from moe_finetune.io.environment import describe_environment
from tests import tiny


@pytest.fixture
def run(tiny_checkpoint, tmp_path):
    """A run's folder: its base by the recipe, and another model as merged."""
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = {"model": {"path": str(tiny_checkpoint("qwen3_moe"))}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    (folder / "environment.json").write_text(json.dumps(describe_environment()))
    tiny.save("qwen3_moe", folder / "merged", seed=7)
    return folder


def greedy(model, ids: list[int], most: int) -> list[int]:
    """Tokens by the highest logit, each from a forward of everything before it."""
    ids = list(ids)
    for _ in range(most):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_a_run_is_its_base_and_its_merged_checkpoint(run):
    base, merged = open_speakers(str(run))
    assert (base.name, merged.name) == ("base", "merged")
    for speaker in (base, merged):
        speaker.model.generation_config.eos_token_id = speaker.tokenizer.chat_template = None
        speaker.reply("abcab", 5)
        prompt = speaker.tokenizer("abcab")["input_ids"]
        assert speaker.ids == greedy(speaker.model, prompt, 5)
    assert base.ids != merged.ids
    with pytest.raises(DataError, match=r"tokens and a reply of 100000 exceed its context"):
        base.reply("a", 100_000)


def test_experts_of_the_last_token_are_those_of_the_router(run):
    (speaker,) = open_speakers(str(run / "merged"))
    speaker.reply("abc", 3)
    inputs = {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]}))
        for n, layer in enumerate(speaker.model.model.layers)
    ]
    found = dict(speaker.last_experts())
    for hook in hooks:
        hook.remove()
    assert sorted(found) == sorted(inputs)
    for n, hidden_BTH in inputs.items():
        weight_EH = speaker.model.model.layers[n].mlp.gate.weight
        probs_E = (hidden_BTH[0, -1] @ weight_EH.T).softmax(-1)
        top_K, experts_K = probs_E.topk(len(found[n]))
        assert [expert for expert, _ in found[n]] == experts_K.tolist()
        weights = [weight for _, weight in found[n]]
        torch.testing.assert_close(torch.tensor(weights), top_K / top_K.sum())


def test_a_conversation_is_remembered_until_it_is_reset(run, capsys):
    (speaker,) = open_speakers(str(run / "merged"))
    speaker.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    speaker.reply("ab", 2)
    first = len(speaker.ids)
    speaker.reply("cd", 2)
    text = "".join(turn["content"] for turn in speaker.turns[:3])
    prompt = speaker.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert speaker.ids[: len(prompt)] == prompt and len(speaker.ids) > first
    talk([speaker], ["/reset", "/experts", "/nonsense", "/exit", "never said"])
    said = capsys.readouterr().out
    assert "no message yet; ask something first" in said and "/reset: start over" in said
    assert not speaker.turns


def test_the_verb_answers_lines_and_prompts(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\n/exit\ndef\n"))
    assert cli.main(["chat", str(run), "--max-tokens", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["base", "merged"]
    arguments = ["--prompt", "abc", "--experts", "--max-tokens", "4"]
    assert cli.main(["chat", str(run / "merged"), *arguments]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("model: ") and re.match(r" *0  \d+ \(0\.\d\d\)", said[2])
    assert cli.main(["chat", str(run / "nowhere"), "--prompt", "a"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("token", ["[/INST]", "[red]", "[/]", "[link=http://x]"])
def test_a_token_that_looks_like_markup_is_shown_as_it_is(token, run, monkeypatch, capsys):
    (speaker,) = open_speakers(str(run / "merged"))
    speaker.reply("abc", 2)
    monkeypatch.setattr(speaker.tokenizer, "decode", lambda *_, **__: f"{token}\x1b[2J")
    Console(width=120).print(experts_table([speaker]))
    talk([speaker], ["abc"], 2)
    heading, *_, answer = capsys.readouterr().out.splitlines()
    assert f"model: '{token}\\x1b[2J'" in heading
    assert answer == f"model: {token}[2J" == f"model: {visible(token + chr(27))}[2J"


@pytest.mark.parametrize("recipe", ["7", "model: x", "model: {path: 3}", "[1]", ""])
def test_a_run_s_recipe_without_a_model_is_refused(recipe, run, capsys):
    (run / "recipe.yaml").write_text(recipe)
    assert cli.main(["chat", str(run), "--prompt", "a"]) == 2
    assert "has no model.path" in capsys.readouterr().err
    (run / "environment.json").unlink()  # and is not read where no run of ours wrote it
    assert cli.main(["chat", str(run), "--prompt", "a", "--max-tokens", "2"]) == 0
