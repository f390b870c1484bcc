"""The backend `server` over a stdlib server that speaks the protocol.

A real one is in ``tests/vllm/test_serve.py``.
"""

import pytest

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.backends import open_backend
from moe_finetune.evaluation.engine import evaluate
from moe_finetune.evaluation.results import load_results
from moe_finetune.evaluation.server import BadReply, only_choice, score, server_models
from tests.evaluation.local import write_suite
from tests.support import tiny


def _echoed(context=2, tokens=4):
    """A right choice: `tokens` sent, the last of them greedy but for the last."""
    own = [None, -0.5, -1.25, -2.0, -0.1][: tokens + 1]
    top = [None, *({"a": value} for value in own[1:])]
    top[3] = {"a": -2.0, "b": -0.75}
    return {"index": 0, "text": "", "logprobs": {"token_logprobs": own, "top_logprobs": top}}


def test_a_continuation_is_scored_by_its_own_tokens():
    assert score(_echoed(), 4, 2) == (-3.25, False)
    assert score(_echoed(), 4, 3) == (-2.0, False)
    assert score({**_echoed(), "index": 0}, 4, 4) == (0.0, True)
    greedy = _echoed()
    greedy["logprobs"]["top_logprobs"][3] = {"a": -2.0}
    assert score(greedy, 4, 2) == (-3.25, True)


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(choice):
        for key in path:
            choice = choice[key]
        choice[last] = value

    return change


BAD_SCORES = {
    "NaN": _set("logprobs", "token_logprobs", 2, float("nan")),
    "positive": _set("logprobs", "token_logprobs", 2, 0.5),
    "a text": _set("logprobs", "token_logprobs", 2, "-1"),
    "null": _set("logprobs", "token_logprobs", 2, None),
    "too few": lambda choice: choice["logprobs"]["token_logprobs"].pop(),
    "too many": lambda choice: choice["logprobs"]["token_logprobs"].append(-1.0),
    "too few best": lambda choice: choice["logprobs"]["top_logprobs"].pop(0),
    "no best": _set("logprobs", "top_logprobs", 3, {}),
    "best below": _set("logprobs", "top_logprobs", 3, {"a": -9.0}),
    "none": _set("logprobs", None),
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_log_probabilities_that_cannot_be_are_refused(name):
    choice = _echoed()
    BAD_SCORES[name](choice)
    with pytest.raises(BadReply):
        score(choice, 4, 2)


@pytest.mark.parametrize(
    "reply",
    [None, {}, {"choices": []}, {"choices": ["x"]}, {"choices": [{"index": 0}, {"index": 0}]},
     {"choices": [{"index": 1}]}],
)  # fmt: skip
def test_a_reply_has_one_choice(reply):
    with pytest.raises(BadReply):
        only_choice(reply)
    assert only_choice({"choices": [{"index": 0, "text": ""}]}) == {"index": 0, "text": ""}


@pytest.mark.parametrize(
    ("change", "task", "said"),
    [
        (_set("text", None), "sums", "text is None"),
        (_set("logprobs", "token_logprobs", -2, 0.7), "colours", "not the logarithm"),
    ],
)
def test_a_reply_that_cannot_be_scored_names_task_and_item(
    server, checkpoint, tmp_path, change, task, said
):
    suite = write_suite(tmp_path / "data", items=5)
    server.change = lambda choice: change(choice) if ("logprobs" in choice) == (
        task == "colours") else None  # fmt: skip
    with pytest.raises(EvaluationError, match=rf"{task}.*, item \d+: the server at .*{said}"):
        evaluate(checkpoint, suite, "server", base_url=server.url, output=tmp_path / "out",
                 progress=False, only=[task])  # fmt: skip
    partial = load_results(tmp_path / "out")
    assert not partial["complete"] and partial["tasks"] == {}


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((400, "too long for 8 tokens", []), "HTTP 400: .*too long for 8 tokens"),
        ((307, "", [("Location", "http://127.0.0.1:9/x")]), "redirects to http://127.0.0.1:9/x"),
    ],
)
def test_a_refused_request_ends_with_the_servers_own_words(
    server, checkpoint, tmp_path, capfd, refusal, message
):
    suite, server.refusal = write_suite(tmp_path / "data", items=2), refusal
    with pytest.raises(EvaluationError, match=f"the server at {server.url} .*{message}"):
        evaluate(checkpoint, suite, "server", base_url=server.url, output=tmp_path / "out",
                 progress=False, only=["sums"])  # fmt: skip
    assert "Requesting API" not in capfd.readouterr().err, "lm-eval's own progress bar"
    assert server.refused == 2, "each of two requests once"


def test_wrong_model_and_wrong_checkpoint(server, checkpoint, tmp_path):
    assert server_models(server.url) == {"tiny": str(checkpoint)}
    with pytest.raises(EvaluationError, match="has no model 'tinny'; did you mean 'tiny'"):
        open_backend(checkpoint, "server", base_url=server.url, model="tinny")
    other = tiny.save("qwen3_moe", tmp_path / "other", seed=3)
    with pytest.raises(EvaluationError, match="which is not the checkpoint"):
        open_backend(other, "server", base_url=server.url)
    with pytest.raises(EvaluationError, match="does not answer like"):
        server_models(server.url + "/nothing")
    with pytest.raises(EvaluationError, match="needs base_url"):
        open_backend(checkpoint, "server")


@pytest.mark.faults
@pytest.mark.slow
def test_a_server_that_dies_keeps_what_it_answered(server, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_finetune.evaluation.server.TRIES", 2)
    suite = write_suite(tmp_path / "data", items=6)
    server.left = 6 + 5  # all of the first task, some of the second
    arguments = {"output": tmp_path / "out", "base_url": server.url, "progress": False}
    with pytest.raises(EvaluationError, match=r"stopped answering .*repeat the command"):
        evaluate(checkpoint, suite, "server", **arguments)
    partial = load_results(tmp_path / "out")
    assert not partial["complete"] and list(partial["tasks"]) == ["sums"]
    server.left = 10**9
    whole = evaluate(checkpoint, suite, "server", **arguments)
    assert (
        whole["complete"] and whole["tasks"]["sums"]["usage"] == (partial["tasks"]["sums"]["usage"])
    )
