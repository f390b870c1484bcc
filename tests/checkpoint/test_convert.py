"""Published folders become folders that load without their code."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_finetune import cli
from moe_finetune.checkpoint.convert_checkpoint import convert_checkpoint
from moe_finetune.errors import CheckpointError, OutputExistsError
from moe_finetune.io.safetensors_header import build_header
from moe_finetune.models import deepseek_moe
from moe_finetune.models.class_structure import shapes_on_disk
from moe_finetune.models.config_and_tokenizer import load_config, load_tokenizer
from tests.models import moonlight_files
from tests.published import fixture
from tests.support import tiny

CODE = "raise SystemExit('remote code ran')\n"


def _publish(family: str, published: str, folder: Path) -> Path:
    """A tiny model with its family's published files: config with auto_map, shards, code."""
    tiny.model(family).save_pretrained(folder, max_shard_size="300KB")
    auto_map = fixture.read(published).config["auto_map"]
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = auto_map
    (folder / "config.json").write_text(json.dumps(config))
    for module in {target.split(".")[0] for target in auto_map.values()}:
        (folder / f"{module}.py").write_text(CODE)
    if family == "deepseek_v3":
        moonlight_files.write(folder)
    else:
        tiny.tokenizer().save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["tokenizer_class"] = "LlamaTokenizerFast"
        file.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("deepseek_moe", "deepseek_moe_16b"),
        ("deepseek_v2", "deepseek_v2_lite"),
        ("deepseek_v3", "moonlight_16b_a3b"),
    ],
)
def test_public_files_become_a_folder_without_code(family, published, tmp_path):
    source = _publish(family, published, tmp_path / "public")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    output = convert_checkpoint(source, tmp_path / "out" / "converted")

    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert not list(output.glob("*.py"))
    for file in output.glob("*.json"):
        assert "auto_map" not in json.loads(file.read_text()), file
    source_config, config = (
        json.loads(before["config.json"]),
        json.loads((output / "config.json").read_text()),
    )
    del source_config["auto_map"]
    assert config == source_config
    for shard in source.glob("*.safetensors"):
        assert (output / shard.name).read_bytes() == before[shard.name]
        with (output / shard.name).open("r+b") as copy:  # changing the copy leaves the source
            copy.seek(-1, os.SEEK_END)
            copy.write(bytes([before[shard.name][-1] ^ 1]))
        assert shard.read_bytes() == before[shard.name]
        (output / shard.name).write_bytes(before[shard.name])
    assert [p.name for p in output.parent.iterdir()] == ["converted"]
    card = (output / "README.md").read_text()
    assert "# public, converted" in card and str(tmp_path) not in card

    deepseek_moe.register()
    model = AutoModelForCausalLM.from_pretrained(output)
    batch = tiny.batch()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, tiny.model(family)(**batch).logits)
    texts = moonlight_files.TEXTS if family == "deepseek_v3" else ["two  words, größer"]
    fast, ours = AutoTokenizer.from_pretrained(output), load_tokenizer(source)
    for text in texts:
        assert fast.encode(text) == ours.encode(text)
        assert fast.decode(ours.encode(text)) == text
    assert fast.get_chat_template() == ours.get_chat_template()


def test_shards_without_an_index_get_one(tmp_path):
    source = _publish("deepseek_moe", "deepseek_moe_16b", tmp_path / "public")
    index = source / "model.safetensors.index.json"
    expected = json.loads(index.read_text())
    index.unlink()
    output = convert_checkpoint(source, tmp_path / "converted")
    made = json.loads((output / index.name).read_text())
    assert made["weight_map"] == expected["weight_map"]
    assert made["metadata"]["total_size"] == expected["metadata"]["total_size"]


def test_nothing_is_left_or_changed_when_it_cannot_be_done(tmp_path):
    source = _publish("deepseek_v3", "moonlight_16b_a3b", tmp_path / "public")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(OutputExistsError, match="there: is not empty"):
        convert_checkpoint(source, tmp_path / "there")
    (source / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor"):
        convert_checkpoint(source, tmp_path / "converted")
    shutil.copy(source / "config.json", tmp_path / "there")
    with pytest.raises(CheckpointError, match="no safetensors files"):
        convert_checkpoint(tmp_path / "there", tmp_path / "converted")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["public", "there"]


def test_space_is_asked_for_before_weights_are_read(tmp_path, capsys):
    """A checkpoint of 6 TB of zeros, of which only the header is on the disk."""
    source = _publish("deepseek_moe", "deepseek_moe_16b", tmp_path / "public")
    for file in source.glob("*.safetensors"):
        file.unlink()
    (source / "model.safetensors.index.json").unlink()
    written = json.loads((source / "config.json").read_text())
    written |= {"vocab_size": 1 << 25, "hidden_size": 12_288}
    (source / "config.json").write_text(json.dumps(written))
    shapes = shapes_on_disk(load_config(source))
    header = build_header(source / "model.safetensors", [(n, "F64", s) for n, s in shapes.items()])
    with header.file.open("wb") as stream:
        stream.write(header.raw)
        stream.truncate(header.file_bytes)
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "out")]) == 1
    assert "are needed, but only" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["public"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.EIO])
def test_weights_are_copied_where_the_kernel_stops(number, checkpoint, tmp_path, monkeypatch):
    """Not after an error of the disk."""
    kernel, calls = os.copy_file_range, []

    def once(source, target, count):
        calls.append(count)
        if len(calls) > 1:
            raise OSError(number, "as said")
        return kernel(source, target, 999)

    monkeypatch.setattr(os, "copy_file_range", once)
    if number == errno.EIO:
        with pytest.raises(OSError, match="as said"):
            convert_checkpoint(checkpoint, tmp_path / "out")
        return
    convert_checkpoint(checkpoint, tmp_path / "out")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
