"""`ask`: one answer of a run, a checkpoint or an adapter, as transformers and PEFT give it."""

import pytest
import torch

from moe_finetune import cli
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.evaluation.ask import Source
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from tests.checkpoint.helpers import adapter, load
from tests.support import tiny

QUESTION = "Which of 12?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    base = tiny.save("qwen3_moe", folder / "base")
    trained = adapter(base, folder / "run" / "adapter", r=5, scale=0.06)
    merge_adapter(base, trained, folder / "merged")
    return folder


def greedy(model, tokenizer, ids, count):
    """A loop over tokens, without a cache; ends at the tokenizer's end."""
    ids, first = list(ids), len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[first:], skip_special_tokens=True)


def asked(tokenizer, system=None):
    turns = [{"role": "user", "content": QUESTION}]
    turns = turns if system is None else [{"role": "system", "content": system}, *turns]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return chat["input_ids"]


@pytest.mark.parametrize(
    ("source", "model"),
    [("base", "base"), ("merged", "merged"), ("run", "merged"), ("run/adapter", "merged")],
)
def test_the_answer_is_that_of_a_loop(folder, capsys, source, model):
    tokenizer = load_tokenizer(folder / "base")
    options = ["--max-tokens", "9", "--base", str(folder / "base")]
    assert cli.main(["ask", str(folder / source), QUESTION, *options]) == 0
    output = capsys.readouterr()
    wanted = greedy(load(folder / model).eval(), tokenizer, asked(tokenizer), 9)
    assert output.out.strip("\n") == wanted.strip("\n") and wanted
    assert "cut after 9 tokens" in output.err


def test_a_run_with_a_merge_answers_with_it(folder, capsys):
    (folder / "run" / "merged").symlink_to(folder / "merged")
    tokenizer = load_tokenizer(folder / "base")
    options = ["--max-tokens", "7", "--system", "Be brief."]
    assert cli.main(["ask", str(folder / "run"), QUESTION, *options]) == 0
    ids = asked(tokenizer, "Be brief.")
    wanted = greedy(load(folder / "merged").eval(), tokenizer, ids, 7)
    assert capsys.readouterr().out.strip("\n") == wanted.strip("\n")
    (folder / "run" / "merged").unlink()


def test_raw_text_and_what_is_refused(folder, capsys, tmp_path):
    base, tokenizer = folder / "base", load_tokenizer(folder / "base")
    assert cli.main(["ask", str(base), QUESTION, "--raw", "--max-tokens", "5"]) == 0
    ids = tokenizer(QUESTION)["input_ids"]
    wanted = greedy(load(base).eval(), tokenizer, ids, 5)
    assert capsys.readouterr().out.strip("\n") == wanted.strip("\n")
    for arguments, words in (
        ([str(base), "  "], "the question is empty"),
        ([str(base)], f'add it in quotes, as in moe-finetune ask {base} "What'),
        ([str(base), QUESTION, "--raw", "--system", "x"], "leave --raw out"),
        ([str(tmp_path / "nowhere"), QUESTION], "no such folder"),
    ):
        assert cli.main(["ask", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_run_on_texts_names_raw_and_words_need_no_quotes(folder, capsys, tmp_path):
    """A run on prompts and completions was asked through a chat template that it never saw."""
    run, rows = folder / "run", tmp_path / "rows.jsonl"
    columns = "{prompt: ask, completion: say}"
    recipe = f"model: {{path: m}}\ndata: {{train: {rows}, columns: {columns}}}\n"
    (run / "recipe.yaml").write_text(recipe)
    rows.write_text('{"ask": "Which of", "say": " 12?"}\n')
    options = ["--max-tokens", "5", "--base", str(folder / "base")]
    said = "was trained on rows of prompt and completion, not on chats; --raw"
    answers = []
    for words, more in (([QUESTION], []), (QUESTION.split(), []), ([QUESTION], ["--raw"])):
        assert cli.main(["ask", str(run), *words, *options, *more]) == 0
        output = capsys.readouterr()
        assert (said in output.err) == (not more) and "Loading weights" not in output.err
        answers.append(output.out)
    assert answers[0] == answers[1]
    rows.write_text('{"ask": [{"role": "user", "content": "Why?"}], "say": "x"}\n')
    (run / "recipe.yaml").write_text(recipe.replace(columns, "{messages: ask}"))
    assert cli.main(["ask", str(run), QUESTION, *options]) == 0
    assert "not on chats" not in capsys.readouterr().err
    (run / "recipe.yaml").unlink()


def test_the_tokenizer_is_the_adapter_s_own_where_it_has_one(tmp_path):
    """A run saves the tokenizer that it trained with beside the adapter."""
    base, own, none = (tmp_path / name for name in ("base", "own", "none"))
    none.mkdir()
    for folder in (base, own):
        tiny.tokenizer().save_pretrained(folder)
    assert Source(base, own).tokenizer == own
    assert Source(base, none).tokenizer == base
    assert Source(base).tokenizer == base
