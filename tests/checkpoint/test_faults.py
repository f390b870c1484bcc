"""A merge that raises or meets another one leaves nothing or the whole; of kills see tests/io."""

import pytest

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.errors import OutputExistsError
from moe_finetune.io import output_folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_error_in_the_middle(bases, adapters, tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(bases("olmoe"), adapters("olmoe"), tmp_path / "m", progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(
            bases("olmoe"), adapters("olmoe"), tmp_path / "m", progress=stop, overwrite=True
        )
    assert contents(tmp_path / "m") == {"old": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_target_appears_meanwhile(tmp_path):
    with (
        pytest.raises(OutputExistsError, match="appeared"),
        output_folder(tmp_path / "m", 10) as folder,
    ):
        (folder / "new").write_text("new")
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").write_text("theirs")
    assert contents(tmp_path / "m") == {"theirs": b"theirs"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_output_is_hidden_until_it_is_whole(tmp_path):
    (tmp_path / "deep" / ".m.partial-0000000b").mkdir(parents=True)  # of a killed writer
    with output_folder(tmp_path / "deep" / "m", 10) as folder:
        (folder / "new").write_text("new")
        assert not (tmp_path / "deep" / "m").exists()
    assert contents(tmp_path / "deep" / "m") == {"new": b"new"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["m"]
