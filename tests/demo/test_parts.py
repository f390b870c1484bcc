"""What a second demo keeps: parts by what they follow from."""

import pytest

from moe_finetune.demo import parts as module
from moe_finetune.demo.parts import Parts, code_identity
from moe_finetune.errors import OutputExistsError


def test_only_what_follows_from_the_same_is_kept(tmp_path):
    folder = tmp_path / "demo"
    parts = Parts(folder)
    assert not parts.kept("one", "a")
    parts.begin("one", "a")
    (folder / "one").mkdir()
    (folder / "one" / "half").touch()
    reopened = Parts(folder)
    assert not reopened.kept("one", "a"), "it was interrupted"
    reopened.begin("one", "a")
    assert (folder / "one" / "half").exists(), "an interrupted part goes on"
    reopened.finish("one")
    assert Parts(folder).kept("one", "a") and not Parts(folder).kept("one", "b")
    (folder / "one").rename(folder / "gone")
    assert not Parts(folder).kept("one", "a"), "its folder was taken away"
    (folder / "gone").rename(folder / "one")
    changed = Parts(folder)
    changed.begin("one", "b")
    assert not (folder / "one").exists() and not Parts(folder).kept("one", "a")


@pytest.mark.parametrize("name", ["mine.txt", "steps/texts.json"])  # also steps of a run
def test_a_folder_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(OutputExistsError, match="contains other files; choose another --output"):
        Parts(tmp_path)


def test_the_code_is_known_by_its_files(tmp_path, monkeypatch):
    for name in ("package/demo", "eval/tasks", "eval/suites"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "package" / "demo" / "parts.py"))
    monkeypatch.setattr(module, "eval_root", lambda: tmp_path / "eval")
    seen = {code_identity()}
    for name in ("package/demo/a.py", "eval/tasks/b.yaml", "eval/suites/c.yaml"):
        (tmp_path / name).write_text("x")
        seen.add(code_identity())
        assert code_identity() in seen
    (tmp_path / "package/demo/a.py").write_text("y")
    assert len(seen | {code_identity()}) == 5
