"""What a server may answer: the forms of several programs, and everything that is refused."""

import os

import numpy as np
import pytest
import torch

from moe_finetune.errors import EvaluationError
from moe_finetune.served import client
from moe_finetune.served.client import Served
from tests.served import stub as stubs
from tests.served.stub import stub
from tests.support import tiny

PROMPT = [17, 5, 90, 41, 41, 7, 203]


@pytest.fixture(scope="module")
def model():
    return tiny.model("qwen3_moe")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def expected(model, ids, first):
    """A loop over positions."""
    values = []
    for at in range(first, len(ids)):
        with torch.no_grad():
            row = model(torch.tensor([ids[:at]])).logits[0, -1].double()
        values.append(float(row[ids[at]] - torch.logsumexp(row, 0)))
    return np.array(values)


@pytest.mark.parametrize("form", ["vllm", "echo"])
def test_a_prompts_tokens_are_scored(model, tokenizer, form):
    with stub({"tuned": model}, tokenizer, form) as server:
        served = Served(server.url)
        answer = served.answer(PROMPT)
    assert answer.ids == PROMPT and answer.first == 1 and served.scores_prompts
    assert answer.logprobs == pytest.approx(expected(model, PROMPT, 1), abs=1e-5)
    assert (answer.next_token is None) == (form == "echo")  # it reports texts, which are not ids
    path, body = server.bodies[-1]
    assert path == "/v1/completions" and body["prompt"] == PROMPT
    assert (body["temperature"], body["max_tokens"]) == (0, 1)


def test_generated_tokens_are_scored_where_prompts_are_not(model, tokenizer):
    with stub({"tuned": model}, tokenizer, "llama.cpp") as server:
        served = Served(server.url)
        answer = served.answer(PROMPT)
        ways = len(server.bodies)
        served.answer(PROMPT[:4])  # the way is known now
        assert len(server.bodies) == ways + 1 == 4
        with pytest.raises(EvaluationError, match="a reference must score given tokens"):
            served.score(answer)
    assert answer.first == len(PROMPT) and len(answer.ids) == len(PROMPT) + client.GENERATED
    assert answer.logprobs == pytest.approx(expected(model, answer.ids, len(PROMPT)), abs=1e-5)
    assert answer.next_token == answer.ids[len(PROMPT)]


def test_a_second_server_scores_the_same_tokens(model, tokenizer):
    with stub({"tuned": model}, tokenizer) as one, stub({"other": model}, tokenizer, "echo") as two:
        answer = Served(one.url).answer(PROMPT)
        assert Served(two.url).score(answer) == pytest.approx(answer.logprobs, abs=1e-6)


REFUSED = {
    "NaN": (stubs.with_logprob(float("nan")), "not JSON"),
    "minus infinity": (stubs.with_logprob(-9999.0), "minus infinity"),
    "positive": (stubs.with_logprob(0.7), "not the logarithm of a probability"),
    "a text": (stubs.with_logprob("-1"), "'-1'"),
    "another token": (stubs.with_logprob(-1.0, token=250), "does not have the prompt's token 90"),
    "numbers, not lists": (
        stubs.answers({"logprobs": {"token_logprobs": 5, "tokens": 6}, "token_ids": 7}),
        "0 log-probabilities of generated tokens",
    ),
    "an echo without its first null": (
        stubs.answers({"logprobs": {"token_logprobs": [-1.5] * len(PROMPT)}}),
        r"echo: token_logprobs\[0\] is not null",
    ),
    "too few": (stubs.with_logprob(-1.0, drop=2), "5 entries for 7 tokens"),
    "twice": (stubs.twice, r"choices of index \[0, 1\]"),
    "no JSON": (stubs.no_json, "not JSON"),
    "redirected": (stubs.redirects, "redirects are not followed"),
    "wrong key": (stubs.forbidden, "HTTP 401"),
    "always busy": (stubs.busy, "HTTP 503"),
    "closes": (stubs.closes, "no answer"),
    "always late": (stubs.late, "no answer within 0.2 s"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_answers_that_cannot_be_compared_are_refused(model, tokenizer, monkeypatch, name):
    fault, words = REFUSED[name]
    monkeypatch.setattr(client, "SECONDS", 0.2 if name == "always late" else 20.0)
    with stub({"tuned": model}, tokenizer, "vllm", fault) as server:
        served = Served(server.url)
        with pytest.raises(EvaluationError, match=words) as caught:
            served.answer(PROMPT)
    assert server.url in str(caught.value) and "tuned" in str(caught.value)


@pytest.mark.parametrize("fault", [stubs.late, stubs.busy, stubs.closes])
def test_a_request_is_made_once_more(model, tokenizer, monkeypatch, fault):
    monkeypatch.setattr(client, "SECONDS", 0.3 if fault is stubs.late else 20.0)
    with stub({"tuned": model}, tokenizer, "vllm", fault, times=1) as server:
        answer = Served(server.url).answer(PROMPT)
    assert answer.logprobs == pytest.approx(expected(model, PROMPT, 1), abs=1e-5)


def test_a_server_that_asks_to_wait_is_asked_after_it(model, tokenizer, monkeypatch):
    waited = []
    monkeypatch.setattr(client.time, "sleep", waited.append)
    with stub({"tuned": model}, tokenizer, "vllm", stubs.asks_to_wait, times=1) as server:
        answer = Served(server.url).answer(PROMPT)
    assert waited == [7.0]
    assert answer.logprobs == pytest.approx(expected(model, PROMPT, 1), abs=1e-5)


def test_tokens_without_ids_are_refused(model, tokenizer):
    with (
        stub({"tuned": model}, tokenizer, "texts") as server,
        pytest.raises(EvaluationError, match=r"prompt_logprobs: .*echo: .*no id for each"),
    ):
        Served(server.url).answer(PROMPT)


def test_models_are_named(model, tokenizer):
    with stub({"tuned": model, "base": model}, tokenizer) as server:
        with pytest.raises(EvaluationError, match=r"base, tuned; name one with --model"):
            Served(server.url)
        with pytest.raises(EvaluationError, match=r"no model 'tunde'; did you mean 'tuned'"):
            Served(server.url, "tunde")
        assert Served(f"{server.url}/v1/", "base").model == "base"
    with pytest.raises(EvaluationError, match=r"no server answers.*--served"):
        Served(server.url)
    with pytest.raises(EvaluationError, match="--served: 'ftp://x' is not an http address"):
        Served("ftp://x")


def test_the_key_goes_to_this_server_and_into_no_message(model, tokenizer, monkeypatch):
    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", "sk-secret")
    with stub({"tuned": model}, tokenizer, "vllm", stubs.forbidden) as server:
        with pytest.raises(EvaluationError) as caught:
            Served(server.url).answer(PROMPT)
        assert {h["Authorization"] for h in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in str(caught.value)


def test_a_key_that_the_server_repeats_is_not_printed(model, tokenizer, monkeypatch):
    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", "sk-secret\n")  # as from a file
    with stub({"tuned": model}, tokenizer, "vllm", stubs.repeats_the_key) as server:
        with pytest.raises(EvaluationError, match=r"wrong key: Bearer \*\*\*") as caught:
            Served(server.url).answer(PROMPT)
        assert {h["Authorization"] for h in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in str(caught.value)
    with (
        stub({"tuned": model}, tokenizer, closed=stubs.repeats_the_key) as server,
        pytest.raises(EvaluationError, match=r"HTTP 401.*set OPENAI_API_KEY") as caught,
    ):
        Served(server.url)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-\nsecret", "sk-secret\u00fc", "sk secret"])
def test_a_key_that_no_header_can_contain_is_refused_unprinted(model, tokenizer, monkeypatch, key):
    monkeypatch.setitem(os.environ, "OPENAI_API_KEY", key)
    with (
        stub({"tuned": model}, tokenizer) as server,
        pytest.raises(EvaluationError, match="OPENAI_API_KEY: the key has") as caught,
    ):
        Served(server.url)
    assert "secret" not in str(caught.value)


def test_the_second_servers_part_after_the_prompt_is_taken(model, tokenizer):
    """Only the generated tokens have log-probabilities on one server, and all on the other."""
    with (
        stub({"tuned": model}, tokenizer, "llama.cpp") as one,
        stub({"other": model}, tokenizer) as two,
    ):
        answer = Served(one.url).answer(PROMPT)
        assert Served(two.url).score(answer) == pytest.approx(answer.logprobs, abs=1e-5)
