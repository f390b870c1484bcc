"""Published checkpoints open: what every verb reads from their headers, nothing loaded."""

import pytest

from tests.published import fixture, verbs


@pytest.mark.parametrize("name", fixture.NAMES)
def test_the_rows_are_the_published_file(name):
    published = fixture.read(name)
    names = [tensor for tensor, _ in published.tensors]
    assert len(names) == len(set(names)) > 100
    assert published.stated
    assert published.stated == {key: published.counted[key] for key in published.stated}


@pytest.mark.parametrize("name", fixture.NAMES)
def test_every_verb_reads_the_published_file(name, tmp_path):
    published = fixture.shortened(fixture.read(name))
    answers = verbs.run(published, tmp_path)
    # A refusal that has become a pass is to be removed from the fixture.
    assert {verb: text for verb, text in answers.items() if text} == {
        verb: answers[verb] for verb in published.refused
    }
    for verb, part in published.refused.items():
        assert part in answers[verb]
