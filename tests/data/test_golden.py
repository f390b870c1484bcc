import pytest

from tests.data.golden import TEMPLATES, golden, hashes

GOLDEN = golden()


@pytest.mark.parametrize("template", TEMPLATES)
def test_learned_tokens_stay_those_that_were_checked(template):
    assert hashes(template) == GOLDEN[template]
