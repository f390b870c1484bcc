import re
from fractions import Fraction

import pytest

from moe_finetune.evaluation.final_answers import (
    boxed,
    final_number,
    math_answer,
    math_equal,
    numbers,
    strict_number,
)
from moe_finetune.io.row_files import read_rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 1,000", 1000),
        ("#### 1000", 1000),
        ("#### 1000.00", 1000),
        ("#### $1,234.50 per year", Fraction(2469, 2)),
        ("####18", 18),
        ("#### **18**", 18),
        ("#### -5", -5),
        ("#### \u22125", -5),
        ("#### $-3", -3),
        ("#### -$3", -3),
        ("#### 50%", 50),
        ("#### 1/2", Fraction(1, 2)),
        ("#### 0.5", Fraction(1, 2)),
        ("#### .5", Fraction(1, 2)),
        ("#### 2 1/2 hours", Fraction(5, 2)),
        ("#### 18 dollars. #### 99", 18),
        ("It costs $18.", 18),
        ("It costs 18 $ in total", 18),
        ("The answer is 1,319,000 people.", 1319000),
        ("The answer is: **12** apples, out of 40.", 12),
        (r"so \boxed{\dfrac{3}{4}}", Fraction(3, 4)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        ("10-5", 5),
        ("10 - 5 = 5", 5),
        ("(-4)", -4),
        ("that leaves -5", -5),
        ("x = - 5", -5),
        ("4 - (-3)", -3),
        ("3/0", None),
        ("no number", None),
        ("", None),
        ("1,5", 5),
        ("3.5e3", 3500),
        ("It weighs 2E-3 kg", Fraction(1, 500)),
        ("So the answer is 10 - 3 = 7.", 7),
        ("The answer is $18 - $3 = $15, which leaves 2.", 15),
        ("Answer: 4 * 6 = 24 apples in 2 days. Then 3", 24),
        ("The answer is 2 ** 3 = 8 and 9 more", 8),
        ("The answer is 5 apples + 3 apples = 8 apples. 1", 8),
        (r"The answer is $4 \times 6 = 24$. Not 9.", 24),
        ("The answer is 7 = 10 - 3. Bye 5", 7),
        ("The answer is 2 + 2 + 3 = 4 + 3 = 7; 9", 7),
        ("The answer is x = 7. Not 9", 7),
        ("The answer is 3! = 6. 9", 6),
        ("The answer is 12, since x = 3.", 12),
        ("The answer is 12 because 3 + 4 = 7", 12),
        ("The answer is 12 (3 + 4 = 7)", 12),
        ("The answer is 12.\n3 + 4 = 7", 12),
        ("The answer is 1 - 1/4 = 3/4.", Fraction(3, 4)),
        ("The answer is 1/2 + 1/4 = 3/4 cups, or 2", Fraction(3, 4)),
        ("#### 9 / 3 = 3", 3),
        ("#### 10 - 3 = 7", 7),
        (r"\boxed{7 = 10 - 3}", 7),
    ],
)
def test_hard_forms(text, expected):
    assert final_number(text) == expected


def test_strict_wants_the_mark():
    assert strict_number("The answer is 5") is None
    assert strict_number("2+3=5\n#### 5 apples") == 5
    assert strict_number("####\n5") is None or strict_number("####\n5") == 5
    assert numbers("from 10-5 to -3") == [10, 5, -3]


@pytest.mark.parametrize("rule", [strict_number, final_number])
def test_gsm8k_references_are_right_and_changed_ones_wrong(data_folder, rule):
    answers = [row["answer"] for row in read_rows(data_folder / "gsm8k_test.jsonl")]
    assert len(answers) == 1319

    def changed(answer):
        head, number = answer.rsplit("#### ", 1)
        return f"{head}#### {int(number.replace(',', '')) + 1}"

    def right(reply, reference):
        expected = Fraction(re.sub(",", "", reference.rsplit("#### ", 1)[1]))
        return rule(reply) == expected

    assert sum(right(a, a) for a in answers) == 1319
    assert sum(right(changed(a), a) for a in answers) == 0


def test_boxed_is_balanced_and_last():
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}.") == r"\frac{1}{\sqrt{2}}"
    assert boxed(r"\boxed{unfinished") is None
    assert math_answer("So the answer is $x = 5$.") == "x = 5"
    assert math_answer("nothing\nat all") is None


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"\frac12", r"\dfrac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1,000", "1000", True),
        (r"5\text{ cm}", "5", True),
        (r"\text{Monday}", "Monday", True),
        (r"90^\circ", "90", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("x=5", "5", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        (r"\$18", "18", True),
        ("2", "3", False),
        ("(1,2)", "(2,1)", False),
        ("1/2", "1/3", False),
        (None, "1", False),
        ("", "", False),
        ("10 - 3 = 7", "7", True),
        ("10 - 3 = 7", "10", False),
        ("10 - 3 = 7", "3", False),
        ("y = 2x + 1", "2x+1", True),
        ("a=5", "b=5", False),
        ("a=5", "5=a", True),
        ("5", "x=5", True),
        ("x=1,x=2", "2", False),
        ("(2,100)", "(2100)", False),
        (r"\{1,000\}", r"\{1000\}", False),
        (r"\frac{1,000}{3}", r"\frac{1000}{3}", True),
        (r"1,\!000", "1000", True),
        ("1{,}000", "1000", True),
        ("3, 400", "3400", False),
        ("3.5e3", "3500", True),
    ],
)
def test_math_answers(answer, reference, equal):
    assert math_equal(answer, reference) is equal
