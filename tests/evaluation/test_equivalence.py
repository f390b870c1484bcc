import importlib.util
import threading

import pytest

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation import math_equivalence
from moe_finetune.evaluation.final_answers import boxed, final_number, math_answer
from moe_finetune.evaluation.math_equivalence import same_answer


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("2,1", "1,2", True),
        (r"[1,\infty)", r"[1, \infty)", True),
        (r"3 \pm 2\sqrt{2}", r"3+2\sqrt{2},3-2\sqrt{2}", True),
        ("1010", "1010_2", True),
        ("1010_3", "1010_2", False),
        ("10_2", "10", False),
        ("(2,1)", "(1,2)", False),
        ("1-x", "x-1", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
        ("3.14", r"\pi", False),
        ("dayMon", r"\text{Monday}", False),  # the same letters
        (r"\text{ddo}", r"\text{odd}", False),
        ("", "5", False),
        (None, "5", False),
        ("a=5", "b=5", False),
        ("y=x+1", "z=x+1", False),
        ("y=x+1", "y=1+x", True),
        ("2x+4y=8", "x+2y=4", True),
        ("x=1,x=2", "1,2", True),
        ("f(x)=x^2", "x^2", True),
        ("(2,100)", "(2100)", False),
        ("3, 400", "3400", False),
        ("(" * 400, "5", False),
        ('__import__("os").system("false")', "5", False),
    ],
)
def test_equal_mathematics(answer, reference, same):
    assert same_answer(answer, reference) is same


def test_an_answer_that_never_ends_is_wrong_and_the_next_is_compared(monkeypatch, capsys):
    """Outside of the main thread, where no alarm can be set."""
    comparer = math_equivalence._Comparer()
    monkeypatch.setattr(math_equivalence, "CPU_SECONDS", 1)
    found = []

    def compare():
        found.append(comparer.same("2^{10^{10}}", "5"))
        found.append(comparer.same(r"\frac{2}{4}", r"\frac{1}{2}"))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    comparer._stop()
    assert found == [False, True]
    assert "comparing '2^{10^{10}}' with '5' took too much" in capsys.readouterr().err


def test_without_the_library_it_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"math-verify.*pip install 'moe-finetune\[eval\]'"):
        math_equivalence.require()


def test_final_answers_of_solutions():
    assert boxed("so \\boxed 5$, as $x$") == "5"
    assert boxed("\\fbox{7}") == "7"
    assert math_answer("It is $x$.\nSo $\\boxed{\\frac{1}{2}}$, where $y$.") == r"\frac{1}{2}"
    assert math_answer(" $\\frac{3}{4}$. ") == r"\frac{3}{4}"
    assert math_answer("First this.\nThen that.") is None


def test_a_number_of_more_digits_than_python_reads_is_no_number():
    assert final_number("It is 7 or " + "1" * 5000) == 7
