"""Made rows with the hub's fields for every task of every suite, and one who knows the answers.

The rows say which answer is right where a model would read it: an option that is right says
``rightly``, the others ``wrongly``, and a question of two or three fixed answers ends with
``say WORD``. So the oracle answers from the prompt and from nothing that the task computes.
"""

import random
import re
from typing import Any

from lm_eval.api.model import LM

ROWS = 6
MATH = [r"2\sqrt{3}", r"\frac{3}{4}", r"\pi", r"(2, -\infty)", "x^2-1", "1,024"]


def _options(number: int, count: int) -> tuple[list[str], int]:
    right = (number + 1) % count
    return [f"{'rightly' if i == right else 'wrongly'} {number}{i}" for i in range(count)], right


def _value(number: int) -> str:
    return MATH[number % len(MATH)]


def _solution(number: int) -> str:
    return f"We get $x = 1$, then $y$.\nSo it is $\\boxed{{{_value(number)}}}$. Check: $1 = 1$."


def _glue(name: str, n: int) -> dict[str, Any]:
    # The classes in the order of the published labels (gluebenchmark.com, the hub's features).
    classes = {
        "cola": ("no", "yes"), "sst2": ("negative", "positive"), "mrpc": ("no", "yes"),
        "qqp": ("no", "yes"), "mnli": ("True", "Neither", "False"), "qnli": ("yes", "no"),
        "rte": ("True", "False"), "wnli": ("False", "True"),
    }[name]  # fmt: skip
    label = n % len(classes)
    fields = {
        "cola": ["sentence"], "sst2": ["sentence"], "mrpc": ["sentence1", "sentence2"],
        "qqp": ["question1", "question2"], "mnli": ["premise", "hypothesis"],
        "qnli": ["question", "sentence"], "rte": ["sentence1", "sentence2"],
        "wnli": ["sentence1", "sentence2"],
    }[name]  # fmt: skip
    row = {field: f"text {n} {field}, say {classes[label]}" for field in fields}
    return row | {"label": label, "idx": n}


def _agieval(path: str, n: int) -> dict[str, Any]:
    if path.endswith(("agieval-math", "mathcloze")):
        return {"query": f"Q: problem {n}\nA: The answer is", "answer": _value(n)}
    options, right = _options(n, 4)
    choices = [f"({letter}){text}" for letter, text in zip("ABCD", options, strict=True)]
    return {"query": f"Q: question {n}", "choices": choices, "gold": [right]}


def made_row(path: str, name: str | None, n: int) -> dict[str, Any]:
    """Row ``n`` of the hub data set ``path`` in configuration ``name``."""
    if path.startswith("hails/agieval"):
        return _agieval(path, n)
    if path == "nyu-mll/glue":
        return _glue(str(name), n)
    four, right = _options(n, 4)
    letter = "ABCD"[right]
    labelled = {"text": four, "label": list("ABCD")}
    two, of_two = _options(n, 2)
    five, of_five = _options(n, 5)
    rows: dict[str, dict[str, Any]] = {
        "cais/mmlu": {"question": f"q{n}", "subject": name, "choices": four, "answer": right},
        "ceval/ceval-exam": {
            "id": n, "question": f"q{n}", **dict(zip("ABCD", four, strict=True)),
            "answer": letter, "explanation": "",
        },
        "SaylorTwift/bbh": {"input": f"question {n}", "target": f"({letter})"},
        "Idavidrein/gpqa": {
            "Question": f"q{n}", "Correct Answer": f"rightly {n}",
            **{f"Incorrect Answer {i}": f"wrongly {n}{i}" for i in (1, 2, 3)},
        },
        "aps/super_glue/boolq": {
            "question": f"is {n} so", "passage": f"say {('no', 'yes')[n % 2]}", "idx": n,
            "label": n % 2,
        },
        "aps/super_glue/copa": {
            "premise": f"It rained {n}.", "choice1": two[0], "choice2": two[1],
            "question": ("cause", "effect")[n % 2], "idx": n, "label": of_two,
        },
        "allenai/ai2_arc": {
            "id": str(n), "question": f"q{n}", "choices": labelled, "answerKey": letter,
        },
        "allenai/openbookqa": {
            "id": str(n), "question_stem": f"q{n}", "choices": labelled, "answerKey": letter,
        },
        "tau/commonsense_qa": {
            "id": str(n), "question": f"q{n}", "question_concept": "c",
            "choices": {"label": list("ABCDE"), "text": five}, "answerKey": "ABCDE"[of_five],
        },
        "truthfulqa/truthful_qa": {
            "question": f"q{n}?", "mc1_targets": {"choices": ["rightly a", "wrongly b"],
                                                  "labels": [1, 0]},
            "mc2_targets": {"choices": ["rightly a", "rightly b", "wrongly c"],
                            "labels": [1, 1, 0]},
        },
        "baber/piqa": {"goal": f"g{n}", "sol1": two[0], "sol2": two[1], "label": of_two},
        "Rowan/hellaswag": {
            "ind": n, "activity_label": "Activity", "ctx_a": f"a{n}", "ctx_b": "b",
            "ctx": f"a{n} b", "endings": four, "source_id": "", "split": "val",
            "split_type": "", "label": str(right),
        },
        "allenai/sciq": {
            "question": f"q{n}", "support": "s", "correct_answer": f"rightly {n}",
            **{f"distractor{i}": f"wrongly {n}{i}" for i in (1, 2, 3)},
        },
        "lighteval/siqa": {
            "context": f"c{n}", "question": "q?", "label": str(n % 3 + 1),
            **{f"answer{letter}": f"{'rightly' if i == n % 3 else 'wrongly'} {i}"
               for i, letter in enumerate("ABC")},
        },
        "allenai/winogrande": {
            "sentence": f"Number {n} saw _ because it rained.", "option1": two[0],
            "option2": two[1], "answer": str(of_two + 1),
        },
        "mandarjoshi/trivia_qa": {
            "question": f"Who is {n}", "question_id": str(n),
            "answer": {"aliases": [f"Name {n}", f"The Other {n}"], "value": f"Name {n}"},
        },
        "google-research-datasets/mbpp": {
            "task_id": n + 2, "text": f"Add {n}.", "code": f"def add(x):\n    return x + {n}",
            "test_list": [f"assert add(3) == {3 + n}", f"assert add(-5) == {n - 5}"],
            "test_setup_code": "", "challenge_test_list": [],
        },
        "HuggingFaceH4/MATH-500": {
            "problem": f"p{n}", "solution": _solution(n), "answer": _value(n), "subject": "Algebra",
            "level": 2, "unique_id": f"test/{n}",
        },
        "EleutherAI/hendrycks_math": {
            "problem": f"p{n}", "solution": _solution(n), "level": "Level 2", "type": "Algebra",
        },
        "AI-MO/NuminaMath-CoT": {
            "source": "olympiads", "problem": f"p{n}", "solution": _solution(n), "messages": [],
        },
        "openai/gsm8k": {"question": f"{n} + 1,000?", "answer": f"Add.\n#### {n + 1000:,}"},
        "openai/openai_humaneval": {
            "task_id": f"HumanEval/{n}",
            "prompt": 'def add(x):\n    """Add."""\n', "entry_point": "add",
            "canonical_solution": f"    return x + {n + 1}\n",
            "test": f"def check(candidate):\n    assert candidate(2) == {n + 3}\n",
        },
    }  # fmt: skip
    if path == "TIGER-Lab/MMLU-Pro":
        raise ValueError("MMLU-Pro's rows are asked for by category")
    return rows[f"{path}/{name}" if path == "aps/super_glue" else path]


MMLU_PRO = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health",
    "history", "law", "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


def made_rows(path: str, name: str | None) -> list[dict[str, Any]]:
    """Some rows of a hub data set, of all classes that it has."""
    if path == "TIGER-Lab/MMLU-Pro":
        rows = []
        for category in MMLU_PRO:
            for n in range(ROWS):
                options, right = _options(n, 10)
                rows.append({
                    "question_id": n, "question": f"{category} {n}", "options": options,
                    "answer": "ABCDEFGHIJ"[right], "answer_index": right, "category": category,
                    "cot_content": "A: Let's think step by step. The answer is (A).", "src": "",
                })  # fmt: skip
        return rows
    return [made_row(path, name, n) for n in range(ROWS)]


class Oracle(LM):
    """Gives right answers, or wrong ones; multiple choice from the prompt alone."""

    def __init__(self, right: bool):
        super().__init__()
        self.right = right

    def loglikelihood(self, requests, **_):
        return [(0.0 if _is_right(*r.args) == self.right else -1e3, False) for r in requests]

    def loglikelihood_rolling(self, requests, **_):
        raise NotImplementedError

    def generate_until(self, requests, **_):
        return [self._reply(request.doc) for request in requests]

    def _reply(self, doc: dict[str, Any]) -> str:
        if "canonical_solution" in doc:
            return doc["canonical_solution"] if self.right else "    pass\n"
        if "test_list" in doc:
            return f"{doc['code']}\n[DONE]" if self.right else "def add(x):\n    return None"
        if "options" in doc:
            letters = "ABCDEFGHIJ"
            shift = 0 if self.right else 1
            return f"Well. The answer is ({letters[(letters.index(doc['answer']) + shift) % 10]})."
        if "solution" in doc:
            return doc["solution"] if self.right else "We get $x$.\nIt is $\\boxed{17}$."
        if "query" in doc:
            return f" ${doc['answer']}$." if self.right else random.choice(["", " $17$.", " so"])
        if "target" in doc:
            return f"Hm. So the answer is {doc['target'] if self.right else '(E)'}."
        if isinstance(doc["answer"], dict):
            return f" {doc['answer']['aliases'][-1]}" if self.right else " nobody"
        return doc["answer"] if self.right else "It is 0.125.\n#### 0.125"


def _is_right(context: str, continuation: str) -> bool:
    for text in (continuation, context.rsplit("\n", 1)[-1]):
        if "rightly" in text.lower() or "wrongly" in text.lower():
            return "rightly" in text.lower()
    word = continuation.strip().strip("()")
    if re.fullmatch("[A-J]", word):
        shown = re.findall(rf"^\(?{word}[.)] ?(.*)$", context, re.MULTILINE)
        return "rightly" in shown[-1]
    return re.findall(r"say (\w+)", context)[-1] == word
