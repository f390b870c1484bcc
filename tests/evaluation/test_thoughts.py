"""What of a reply is judged: in texts, chats of suites, programs and rewards."""

import dataclasses
import json
import threading
from http.server import ThreadingHTTPServer

import pytest
from tokenizers.processors import TemplateProcessing

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.cached_lm import CachedLM
from moe_finetune.evaluation.judged_reply import judged, opens_thoughts
from moe_finetune.evaluation.programs import human_eval_program, mbpp_program
from moe_finetune.evaluation.suites import SuiteTask
from moe_finetune.io.row_files import read_rows
from moe_finetune.recipe.sections import RewardSection
from moe_finetune.training.stages.rewards import boxed, exact_match, reward_functions
from tests.evaluation.completions_server import Handler
from tests.support import tiny
from tests.support.conversations import ASK, tokenizer_of

GPT_OSS = "<|channel|>analysis<|message|>5?<|end|><|start|>assistant<|channel|>final<|message|>7"


@pytest.mark.parametrize(
    ("reply", "prompt", "cut", "answer"),
    [
        ("5? No.\n</think>\n\n7", "<|Assistant|><think>\n", False, "7"),  # DeepSeek-R1
        ("<think>\n5?\n</think>\n\n7", "assistant\n", False, "7"),  # Qwen3
        ("7", "assistant\n<think>\n\n</think>\n\n", True, "7"),  # Qwen3 without thoughts
        (GPT_OSS, "<|start|>assistant", False, "7"),
        ("<|channel>thought\n5?<channel|>7", "<|turn>model\n", False, "7"),  # Gemma 4
        ("[THINK]5?[/THINK]7", "[/INST]", None, "7"),
        ("5? or 7", "<think>\n", True, None),
        ("7", "<think>\n", False, "7"),  # no thoughts on a template that opens them
        ("7", "<think>\n", None, "7"),
        ("<think>the number 7", "", None, None),
        ("<think>the number 7", "", True, None),
        ("<|channel|>analysis<|message|>7", "<|start|>assistant", True, None),
        ("7", "assistant\n", True, "7"),
        ("a</think>b</think>7", "", None, "7"),
        ("<|START_THINKING|>5?<|END_THINKING|>7", "", None, "7"),  # Command A
        ("<mm:think>5?</mm:think>7", "", None, "7"),
        ("<longcat_think>5?</longcat_think>7", "", None, "7"),
        ("<Thinking>5?</Thinking>7", "", None, "7"),
        ("<thought>5?</thought>7", "", None, "7"),  # EXAONE
        ("<reasoning>5?</reasoning>7", "", None, "7"),
        ("◁think▷5?◁/think▷7", "", None, "7"),  # Kimi-VL
        ("<|begin_of_thought|>5?<|end_of_thought|>7", "", None, "7"),  # OpenThinker
        ("<unused94>thought\n5?<unused95>7", "", None, "7"),  # MedGemma
        ("<unused94>thought\n5?", "", True, None),
        ("<|inner_prefix|>5?<|inner_suffix|>7", "", None, "7"),  # Apertus
        ("7", "<|CHATBOT_TOKEN|><|START_THINKING|>", True, None),
        ("<think>a</think>So.\n<think>or 7", "", None, None),  # cut in later thoughts
        ("<think>a</think>So.\n<think>or 7", "", True, None),
        ("<think>a</think>{}</tool_call><think>or 7", "", True, None),
        ("Sure.\n<think>so it is 7", "", None, None),
        ("<think>\n5?\n</think>\n \n\n    return 7", "", False, "    return 7"),
        (GPT_OSS.replace("7", "\r\n  7"), "", False, "  7"),
        ("5?</think>The tag is `<think>`: 7", "<think>", True, "The tag is `<think>`: 7"),
    ],
)
def test_the_answer_follows_the_thoughts(reply, prompt, cut, answer):
    assert judged(reply, prompt, cut) == answer


@pytest.mark.parametrize(
    ("name", "opens"), [("qwen3", False), ("qwen3_5_think", True), ("nemotron_3_nano", True)]
)
def test_a_prompt_that_opens_thoughts(name, opens):
    prompt = tokenizer_of(name).apply_chat_template(
        [ASK], tokenize=False, add_generation_prompt=True
    )
    assert opens_thoughts(prompt) is opens


def test_rewards_judge_the_answer():
    texts = [
        "<think>The answer is 5? No.</think>\nSo it is 7.",
        "<think>#### 5</think> #### 7",
        "<think>perhaps 7",
        "7",
    ]
    assert exact_match(texts, ["7"] * 4) == [1, 1, 0, 1]
    texts = [
        r"<think>\boxed{5}</think> \boxed{7}",
        r"\boxed{5}</think> \boxed{7}",
        r"<think>\boxed{7}",
    ]
    assert boxed(texts, ["7"] * 3) == [1, 1, 0]


def test_a_reward_reads_the_result_of_an_announced_equation():
    text = "So the answer is 10 - 3 = 7."
    assert exact_match([text] * 4, ["7", "10", "3", "5 + 2 = 7"]) == [1, 0, 0, 1]
    assert exact_match(["b = 5", "a = 5", "5"], ["a=5"] * 3) == [0, 1, 1]


@pytest.mark.parametrize(("end", "points"), [("<|im_end|>", 1), ("<|endoftext|>", 1), ("7", 0)])
def test_a_reply_ended_at_any_token_that_ends_one(end, points):
    """A base model's tokenizer ends texts; its template's turns and generation have other ends."""
    tokenizer = tokenizer_of("qwen3_5_think")
    tokenizer.eos_token = "<|fim_pad|>"
    listed = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (reward,) = reward_functions(
        [RewardSection(name="exact_match")], ["answer"], tokenizer, None, [listed]
    )
    ids = tokenizer("7" + end, add_special_tokens=False)["input_ids"]
    assert len(ids) == 2 and ids[-1] != tokenizer.eos_token_id
    completion = [{"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}]
    options = {"prompts": [[ASK]], "completion_ids": [ids], "answer": ["7"]}
    assert reward(completions=[completion], **options) == [points]


def test_rewards_of_a_trainer_read_prompt_and_tokens():
    """TRL decodes without special tokens; a prompt may open thoughts that are then cut."""
    tokenizer = tokenizer_of("qwen3_5_think")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]}
    )
    (reward,) = reward_functions([RewardSection(name="exact_match")], ["answer"], tokenizer)
    end = tokenizer.eos_token
    replies = ["5\n</think>\n\n7" + end, "5 or 7", "7" + end, GPT_OSS + end]
    ids = [tokenizer(reply, add_special_tokens=False)["input_ids"] for reply in replies]
    completions = [
        [{"role": "assistant", "content": tokenizer.decode(each, skip_special_tokens=True)}]
        for each in ids
    ]
    assert completions[3][0]["content"] == "analysis5?assistantfinal7"
    options = {"prompts": [[ASK]] * 4, "completion_ids": ids, "answer": ["7"] * 4}
    assert reward(completions=completions, **options) == [1, 0, 1, 1]


def test_the_last_program_that_defines_the_function_counts():
    doc = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c): pass"}
    reply = (
        "<think>```python\ndef f(x):\n    return 'a long draft'\n```</think>Here is\n\n"
        "```python\nimport math\n\ndef f(x):\n    return x\n```\nUse it so:\n"
        "```python\nprint(f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9))\n```"
    )
    code = human_eval_program(doc, reply).code
    assert code.endswith("import math\n\ndef f(x):\n    return x")
    item = {"test_list": ["assert g(Node(1)) == 2"]}
    reply = "```python\nclass Node: ...\ndef g(n): return 2\n```\n```\nx = 'longer' * 90000000\n```"
    assert "def g(n)" in mbpp_program(item, reply).code
    assert human_eval_program(doc, "<think>def f").code == doc["prompt"]


@pytest.mark.parametrize("thoughts", ["", "<think>\nA loop.\n</think>\n\n", GPT_OSS[:-1]])
def test_a_body_keeps_its_indentation_after_thoughts(thoughts):
    doc = {"prompt": "def f(x):\n", "entry_point": "f", "test": ""}
    names: dict = {}
    exec(human_eval_program(doc, f"{thoughts}    y = x + 1\n    return y").code, names)
    assert names["f"](1) == 2


RIGHT = "def add(a, b):\n    return a + b"
FENCED = f"```python\n{RIGHT}\n```\n"
DRAFT = "```python\ndef add(a, b): return 0\n```\n"
EXAMPLE = "\n    '''\n    ```\n    1\n    ```\n    '''\n"


@pytest.mark.parametrize(
    "reply",
    [
        f"{FENCED}Done.",
        f"Install:\n```bash\npip install numpy\n```\nThen:\n{FENCED}",
        f"```text\nadd(1, 2)\n```\n```\n{RIGHT}\n```",
        f'```json\n{{"a": 1}}\n```\n{DRAFT}```py\n{RIGHT}\n```\nDone.',
        f"```python3\n{RIGHT}\n```\nThis adds.",
        f"```PYTHON\n{RIGHT}\n```\nThis adds.",
        f"``` python\n{RIGHT}\n```\nThis adds.",
        f'```python title="add.py"\n{RIGHT}\n```\nThis adds.',
        FENCED.replace("\n", "\r\n") + "This adds.",
        f"~~~python\n{RIGHT}\n~~~\nThis adds.",
        "1. So:\n\n   " + FENCED.replace("\n", "\n   ") + "\nDone.",
        "- " + FENCED.replace("\n", "\n  ") + "\nDone.",
        f"Here: {FENCED}Done.",
        f"Here: ```\n{RIGHT}\n```\nDone.",
        f"I wrap it in ```\n{FENCED}Done.",
        f"Use ```a + b``` so.\n{FENCED}Done.",
        f"{FENCED}Output:\n```console\n3\n```\nBye.",
        f"{FENCED}Usage:\n```python\nfrom add import add\nprint(add(1, 2), 'longer')\n```",
        f"`{FENCED}".replace("\n```", "\n````") + "Done.",
        f"Here\n```python\n{RIGHT}",
        f"```js\n{RIGHT}\n```\nDone.",
        FENCED.replace("\n    ", f"{EXAMPLE}    ") + "Done.",
        "```python\n    return a + b\n```\nDone.",
        "```python\n    def add(a, b):\n        return a + b\n```\nDone.",
    ],
)
def test_a_right_program_in_any_fence_is_found(reply):
    doc = {"prompt": "def add(a, b):\n", "entry_point": "add", "test": ""}
    names: dict = {}
    exec(human_eval_program(doc, reply).code, names)
    assert names["add"](1, 2) == 3


def test_a_reply_whose_prompt_opens_the_fence_is_what_precedes_its_end():
    item = {"test_list": ["assert add(1, 2) == 3"]}
    assert mbpp_program(item, f"{RIGHT}\n```\nThis adds, and is longer.").code.strip() == RIGHT


class Inner:
    """An lm-eval model with fixed replies."""

    max_gen_toks, max_length = 40, 500

    def __init__(self, tokenizer, replies):
        self.tokenizer, self.replies, self.asked = tokenizer, replies, []

    def generate_until(self, requests, **_):
        self.asked += [request.args for request in requests]
        return [self.replies[request.args[0]] for request in requests]

    def apply_chat_template(self, history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=add_generation_prompt
        )


def model(tmp_path, entry, replies, tokenizer=None):
    from moe_finetune.evaluation.backends import Backend
    from moe_finetune.evaluation.reply_cache import ReplyStore

    inner = Inner(tokenizer or tiny.tokenizer(), replies)
    backend = Backend(kind="hf", lm=inner, identity="x", checkpoint="x", settings={}, chunk=8)
    lm = CachedLM(backend, ReplyStore(tmp_path / "replies.sqlite", {}), "error", entry, False)
    return lm, inner


def ask(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def test_a_chat_is_stopped_after_its_thoughts(tmp_path):
    entry = SuiteTask(task="sums", metric="exact_match", chat=True, max_tokens=30)
    thought = "<think>\n5\n</think>\n\n7\nQuestion: 8"
    replies = {"a": thought, "assistant\n<think>\n": "x" * 400, "b": "7\n8"}
    lm, inner = model(tmp_path, entry, replies)
    arguments = {"until": ["\n", "<|im_end|>"], "max_gen_toks": 9}
    requests = [ask("generate_until", prompt, arguments) for prompt in replies]
    assert lm.generate_until(requests) == ["7", "", "7"]
    assert inner.asked[0][1] == {"until": ["<|im_end|>"], "max_gen_toks": 30}
    assert (lm.usage.thoughts, lm.usage.unanswered) == (1, 1)


@pytest.mark.parametrize(("kind", "prompt", "fits"), [
    ("hf", "a" * 470, True), ("hf", "a" * 471, False), ("server", "a" * 471, True),
    ("hf", "<s>" + "a" * 470, True),
])  # fmt: skip
def test_a_beginning_that_the_tokenizer_adds_counts(tmp_path, kind, prompt, fits):
    """A prompt of exactly the limit would be cut by one token without a word."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    entry = SuiteTask(task="sums", metric="exact_match", max_tokens=29)
    lm, _ = model(tmp_path, entry, {prompt: "7"}, tokenizer)
    lm._backend = dataclasses.replace(lm._backend, kind=kind, lm=lm._inner)
    assert len(tokenizer("aa").input_ids) == 3
    request = ask("generate_until", prompt, {"until": ["\n"]})
    if fits:
        assert lm.generate_until([request]) == ["7"]
    else:
        with pytest.raises(EvaluationError, match="do not fit into the context of 500 tokens"):
            lm.generate_until([request])


def test_a_fenced_program_of_a_chat_is_whole(tmp_path):
    entry = SuiteTask(task="code", metric="pass@1", chat=True, code="humaneval")
    reply = "Here:\n```python\nimport math\n\ndef f(x):\n    return x\n```"
    lm, _ = model(tmp_path, entry, {"a": reply})
    request = ask("generate_until", "a", {"until": ["\ndef"], "max_gen_toks": 90})
    assert lm.generate_until([request]) == [reply]


def test_choices_inside_open_thoughts_are_refused_and_closed_on_request(tmp_path):
    tokenizer = tokenizer_of("qwen3_5_think")
    lm, _ = model(tmp_path, SuiteTask(task="arc", metric="acc", chat=True), {}, tokenizer)
    prompt = lm.apply_chat_template([ASK])
    with pytest.raises(EvaluationError, match=r"arc: .*set enable_thinking: false"):
        lm.loglikelihood([ask("loglikelihood", prompt, "A")])
    entry = SuiteTask(task="arc", metric="acc", chat=True, enable_thinking=False)
    lm, _ = model(tmp_path, entry, {}, tokenizer)
    assert lm.apply_chat_template([ASK]).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ValueError, match="enable_thinking: is for the chat template"):
        SuiteTask(task="arc", metric="acc", enable_thinking=False)


@pytest.mark.parametrize("overflow", ["error", "truncate"])
def test_a_reply_longer_than_the_context_is_refused(tmp_path, overflow):
    lm, _ = model(tmp_path, SuiteTask(task="sums", metric="exact_match", max_tokens=600), {})
    lm.usage.policy = overflow
    with pytest.raises(EvaluationError, match="600 tokens does not fit into the context of 500"):
        lm.generate_until([ask("generate_until", "a", {"until": ["\n"]})])


def test_a_line_of_a_suite_records_how_it_was_asked():
    from moe_finetune.evaluation.lm_eval_results import task_result

    entry = SuiteTask(task="t", metric="acc", chat=True, enable_thinking=False, max_tokens=7)
    raw = {"results": {}, "versions": {}, "n-samples": {}}
    result = task_result(entry, [], raw)
    recorded = {key: result[key] for key in ("chat", "enable_thinking", "max_tokens")}
    assert recorded == {"chat": True, "enable_thinking": False, "max_tokens": 7}
    assert json.dumps(recorded)


class Solver(Handler):
    """Answers HumanEval as a chat: thoughts with a draft, then the program in a fence."""

    def _choice(self, body, ids, index):
        prompt = self.server.tokenizer.decode(ids)
        problem = next(each for each in self.server.problems if each["entry_point"] in prompt)
        program = problem["prompt"] + problem["canonical_solution"]
        draft = "```python\n" + problem["prompt"] + "    pass\n" * 90 + "```"
        text = f"<think>\n{draft}\n</think>\n\nHere is\n\n```python\n{program}\n```"
        for stop in body.get("stop") or []:
            text = text.split(stop)[0]
        return {"index": index, "text": text}


@pytest.mark.slow
def test_right_programs_of_a_chat_score_one(data_folder, tmp_path):
    from moe_finetune.evaluation.engine import evaluate
    from moe_finetune.evaluation.sandbox.install import no_sandbox

    if trouble := no_sandbox():
        pytest.skip(trouble)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Solver)
    server.folder = tiny.save("qwen3_moe", tmp_path / "base", max_position_embeddings=40_000)
    server.tokenizer, server.problems = (
        tiny.tokenizer(),
        read_rows(data_folder / "HumanEval.jsonl.gz"),
    )
    server.refusal, server.left, server.lock = None, 100, threading.Lock()
    server.change = lambda choice: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        results = evaluate(
            server.folder, "paper1_qwen3", "server", output=tmp_path / "eval", data_dir=data_folder,
            only=["humaneval"], limit=3, progress=False,
            base_url=f"http://127.0.0.1:{server.server_port}/v1",
        )  # fmt: skip
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    task = results["tasks"]["humaneval"]
    assert (task["value"], task["n"], task["max_tokens"]) == (1.0, 3, 16384)
    assert "the thoughts of 3 replies are not judged" in task["notes"]
