"""The tokenizer of demo and miniature: lossless, a token a digit, chats with marked replies."""

import pytest

from recipes.upcycle.tokenizer import SPECIALS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def wrap(self, text):\n    return 1234", "the answer is 42"] * 9, 290)


def test_any_text_comes_back(tokenizer):
    for text in ("def f(x):\n\treturn  x + 17\n", "Zürich — 北京 🙂", "  a 007 b "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token_and_the_space_before_another(tokenizer):
    ids = tokenizer(" 1234")["input_ids"]
    assert [tokenizer.decode([i]) for i in ids] == [" ", "1", "2", "3", "4"]


def test_prompt_and_completion_join_at_a_token(tokenizer):
    prompt, completion = "Question: 4 and 2?\nAnswer:", " 42"
    joined = tokenizer(prompt + completion)["input_ids"]
    assert joined == tokenizer(prompt)["input_ids"] + tokenizer(completion)["input_ids"]


def test_specials_are_single_tokens_that_text_cannot_forge_into_pieces(tokenizer):
    assert [tokenizer.convert_tokens_to_ids(s) for s in SPECIALS] == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == 0 and tokenizer.pad_token_id == 3
    assert len(tokenizer) == 290


def test_chats_mark_the_assistant(tokenizer):
    chat = [{"role": "user", "content": "6 + 7"}, {"role": "assistant", "content": "13"}]
    out = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "13<|im_end|>"
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")
