"""Loading a checkpoint: the same model back, and one clear message for each way to break it."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.small_files import write_tokenizer
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models import deepseek_moe
from moe_finetune.models.config_and_tokenizer import (
    existing_folder,
    load_config,
    load_tokenizer,
    local_folder,
)
from tests.support import tiny


@pytest.mark.parametrize("family", tiny.FAMILY_NAMES)
def test_a_saved_model_comes_back_whole(family, tiny_checkpoint):
    model, expected = load_model(tiny_checkpoint(family)), tiny.model(family)
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert not model.training
    assert load_model(tiny_checkpoint(family), dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_tokenizer(tiny_checkpoint(family)).decode([*range(100, 110)])


@pytest.mark.parametrize("inside", ["merged", "snapshots/ad44e777"])
def test_a_folder_around_a_checkpoint_is_refused_with_the_checkpoint_s(inside, tmp_path):
    """A run's folder, and a repository's in the hub's cache."""
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no config\.json; .* did you mean ") as raised:
        load_config(tmp_path)
    assert str(raised.value).endswith(f"{tmp_path / inside}?")


def test_missing_folder_config_and_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json; give the folder"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="this is an adapter"):
        load_config(tmp_path)
    tiny.config("qwen3_moe").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tiktoken\.model"):
        load_tokenizer(tmp_path)


def test_hub_id_that_cannot_be_fetched():
    with pytest.raises(
        CheckpointError, match="nobody/nothing-at-all: neither a local folder nor a model on the"
    ):
        load_config("nobody/nothing-at-all")


def test_remote_code_is_refused(tiny_checkpoint):
    with pytest.raises(UnsupportedModelError, match="never executed"):
        load_model(tiny_checkpoint("qwen3_moe"), trust_remote_code=True)


def test_published_deepseek_tokenizer_is_taken_as_its_file_defines_it(tmp_path):
    """Its config names Llama's class, which would split at spaces and not byte by byte."""
    folder = tiny.save("deepseek_moe", tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    settings |= {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "two  words, größer"
    expected = tiny.tokenizer().encode(text)
    bos = tiny.tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert load_tokenizer(folder).encode(text) == [bos, *expected]
    deepseek_moe.register()
    assert AutoTokenizer.from_pretrained(folder).encode(text) == expected  # drops add_bos_token
    write_tokenizer(folder, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == [bos, *expected]
    assert load_tokenizer(tmp_path).encode(text) == [bos, *expected]  # once, not twice


def test_importing_the_families_is_quick():
    """No heavy library behind `import moe_finetune.models`, which every command needs."""
    heavy = "torch", "transformers", "vllm", "huggingface_hub"
    code = (
        "import sys, moe_finetune.models.config_and_tokenizer;"
        "import moe_finetune.checkpoint.convert_checkpoint;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_revision_belongs_to_a_hub_id(tiny_checkpoint, monkeypatch):
    folder = tiny_checkpoint("qwen3_moe")
    with pytest.raises(CheckpointError, match="a folder has no revision 'v1'"):
        local_folder(folder, revision="v1")
    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert local_folder("me/moe", revision="v1") == folder
    assert asked["repository"] == "me/moe" and asked["revision"] == "v1"
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="me/moe at revision 'v1'"):
        local_folder("me/moe", revision="v1")


def test_a_run_that_is_not_there_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert existing_folder("runs/nope") is None, "an id of the hub, until there are runs"
    for name in ("second", "first"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").write_text("")
    with pytest.raises(CheckpointError, match="runs/nope: no such run; runs has first, second"):
        existing_folder("runs/nope")
    with pytest.raises(CheckpointError, match="runs/firts: no such run; did you mean 'runs/first'"):
        existing_folder("runs/firts")
    assert existing_folder("runs/first") is not None
    (tmp_path / "Qwen").mkdir()
    assert existing_folder("Qwen/Qwen3-30B-A3B") is None
