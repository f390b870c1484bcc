"""The model card names what matters and no path of the machine it was written on."""

import shutil

import pytest
import yaml

from moe_finetune.checkpoint.adapters.files import write_metadata
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.small_files import license_of, write_card
from moe_finetune.losses.presets import PAPERS, PRESETS
from tests.checkpoint import helpers


def test_a_merge_writes_it(tiny_checkpoint, tmp_path):
    """The base's own card gives the license and is not taken for the export's."""
    base = shutil.copytree(tiny_checkpoint("olmoe"), tmp_path / "the-base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# The base's own card\n")
    adapter = helpers.adapter(tiny_checkpoint("olmoe"), tmp_path / "adapter")
    write_metadata(adapter, method="erc", data=["law.jsonl", "openai/gsm8k"])
    merge_adapter(base, adapter, tmp_path / "merged")
    text = (tmp_path / "merged" / "README.md").read_text()
    assert "# the-base, fine-tuned with erc" in text and "own card" not in text
    assert "`law.jsonl`, `openai/gsm8k`" in text and front(text)["license"] == "mit"
    assert str(tmp_path) not in text


def front(text):
    return yaml.safe_load(text.split("---")[1])


def test_contents(tmp_path):
    base = tmp_path / "some-base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
    export = tmp_path / "merged"
    export.mkdir()
    file = write_card(
        export,
        base,
        method="orthogonal_variance",
        data=[tmp_path / "train.jsonl", "openai/gsm8k"],
        options={"note": "a|b", "rank": 32, "init": tmp_path / "other"},
    )
    text = file.read_text()
    assert file == export / "README.md"
    assert str(tmp_path) not in text
    for part in ("some-base", "orthogonal_variance", "train.jsonl", "openai/gsm8k", "apache-2.0"):
        assert part in text
    assert "| note | a\\|b |" in text and "| rank | 32 |" in text
    assert front(text)["license"] == "apache-2.0" and "base_model" not in front(text)


def test_hub_base(tmp_path):
    text = write_card(tmp_path, "Qwen/Qwen3-30B-A3B").read_text()
    assert front(text)["base_model"] == "Qwen/Qwen3-30B-A3B"
    assert front(text)["pipeline_tag"] == "text-generation" and "datasets" not in front(text)
    assert "not stated" in text and "Paper" not in text


def test_a_folder_of_the_hubs_cache_has_the_hubs_name(tiny_checkpoint, tmp_path):
    """Not the commit, which is the folder's own name."""
    base = tmp_path / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "ad44e777bcd18fa4"
    shutil.copytree(tiny_checkpoint("olmoe"), base)
    adapter = helpers.adapter(tiny_checkpoint("olmoe"), tmp_path / "adapter")
    merge_adapter(base, adapter, tmp_path / "merged")
    text = (tmp_path / "merged" / "README.md").read_text()
    assert front(text)["base_model"] == "Qwen/Qwen3-30B-A3B" and "ad44e777" not in text
    assert "# Qwen/Qwen3-30B-A3B, fine-tuned" in text


def test_the_paper_and_the_hubs_datasets_are_linked(tmp_path):
    data = ["openai/gsm8k", "rows.jsonl"]
    text = write_card(tmp_path, "Qwen/Qwen3-30B-A3B", method="erc", data=data).read_text()
    assert front(text)["datasets"] == ["openai/gsm8k"]
    assert "(https://huggingface.co/papers/2512.23447)" in text
    text = write_card(tmp_path, "Qwen/Qwen3-30B-A3B", method="loss_free").read_text()
    assert "Paper" not in text


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_of_a_paper_has_its_link(name):
    paper = PRESETS[name].paper
    assert (paper is not None) == (PRESETS[name].source[:2] in PAPERS)


@pytest.mark.parametrize(
    ("files", "license"),
    [
        ({"LICENSE": "\n  Apache License\nVersion 2.0\n"}, "Apache License"),
        ({"README.md": "---\nlicense: other\nlicense_name: deepseek\n---\n"}, "deepseek"),
        ({"README.md": "# no front matter\n---\nlicense: mit\n---\n"}, None),
        ({"README.md": "---\n: [\n---\n", "LICENSE": "MIT License"}, "MIT License"),
        ({}, None),
    ],
)
def test_license(tmp_path, files, license):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == license
