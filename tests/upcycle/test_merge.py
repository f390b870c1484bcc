import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.upcycle import merge_experts
from tests.support import vllm_server
from tests.upcycle import dense

EXPERTS = 5


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return [dense.save("llama", folder / str(seed), seed) for seed in range(EXPERTS)]


def tensors_of(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("kind", dense.KINDS)
def test_copies_of_one_model_compute_its_function_whatever_the_routers_say(kind, tmp_path):
    folder = dense.save(kind, tmp_path / "dense", 3)
    report = merge_experts([folder] * EXPERTS, tmp_path / "moe", router_std=2.0, seed=4)
    moe, original = load_model(tmp_path / "moe"), dense.model(kind, 3)
    ids = torch.randint(4, 260, (2, 41), generator=torch.Generator().manual_seed(1))
    chosen = []
    router = moe.model.layers[1].mlp.gate
    router.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        got, expected = moe(ids).logits, original(ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert len(chosen[0].unique()) > 2, "tokens differ in their experts"
    assert report.model_type == moe.config.model_type == ("mixtral", "qwen3_moe")["qwen" in kind]
    assert report.bytes_written == sum(f.stat().st_size for f in (tmp_path / "moe").iterdir())
    assert load_tokenizer(tmp_path / "moe").get_vocab() == load_tokenizer(folder).get_vocab()
    card = (tmp_path / "moe" / "README.md").read_text()
    assert f"# Mixture of {EXPERTS} experts" in card and str(tmp_path) not in card


def test_feed_forwards_lie_side_by_side_and_the_rest_is_averaged(experts, tmp_path):
    merge_experts(experts, tmp_path / "moe", top_k=3, router_std=0.5, seed=7)
    held = [tensors_of(folder) for folder in experts]
    merged = tensors_of(tmp_path / "moe")
    expected = {}
    for name in held[0]:
        if ".mlp." not in name:
            total = torch.zeros_like(held[0][name], dtype=torch.float64)
            for tensors in held:
                total += tensors[name].double()
            expected[name] = (total / EXPERTS).float()
            continue
        before, _, projection = name.partition(".mlp.")
        part = {"gate": "w1", "up": "w3", "down": "w2"}[projection.partition("_")[0]]
        for number, tensors in enumerate(held):
            place = f"{before}.block_sparse_moe.experts.{number}.{part}.weight"
            expected[place] = tensors[name]
    routers = {name for name in merged if name.endswith("block_sparse_moe.gate.weight")}
    assert len(routers) == 3 and merged.keys() == expected.keys() | routers
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name
    values = torch.stack([merged[name] for name in sorted(routers)])
    assert values.shape == (3, EXPERTS, 192)
    assert abs(values.std() - 0.5) < 0.03 and abs(values.mean()) < 0.03
    assert not torch.equal(values[0], values[1]), "every layer has a router of its own"
    assert load_model(tmp_path / "moe").config.num_experts_per_tok == 3


def test_the_seed_alone_decides_the_routers(experts, tmp_path):
    for name, seed, workers in (("a", 1, 1), ("b", 1, 3), ("c", 2, 1)):
        merge_experts(experts, tmp_path / name, seed=seed, workers=workers)
    a, b, c = (tensors_of(tmp_path / name) for name in "abc")
    differ = {name for name in a if not torch.equal(a[name], c[name])}
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert differ == {name for name in a if name.endswith(".gate.weight")}


def test_shards_hold_the_same_tensors(experts, tmp_path):
    merge_experts(experts, tmp_path / "one")
    merge_experts(experts, tmp_path / "many", shard_bytes=400_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert len(files) > 5 and one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert max(len(safe_open(file, "pt").keys()) for file in files) > 1
    assert open_checkpoint(tmp_path / "many").experts == dict.fromkeys(range(3), EXPERTS)
    load_model(tmp_path / "many")


def test_experts_may_be_sharded_and_in_bfloat16(tmp_path):
    folders = []
    for seed in range(3):
        model = dense.model("qwen3", seed).to(torch.bfloat16)
        model.save_pretrained(tmp_path / str(seed), max_shard_size="200KB")
        dense.tiny.tokenizer().save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    assert len(list(folders[0].glob("*.safetensors"))) > 1
    merge_experts(folders, tmp_path / "moe")
    merged, held = tensors_of(tmp_path / "moe"), [tensors_of(folder) for folder in folders]
    name = "model.layers.2.self_attn.q_norm.weight"
    mean = torch.stack([tensors[name].float() for tensors in held]).mean(0).bfloat16()
    assert merged[name].dtype == torch.bfloat16
    torch.testing.assert_close(merged[name], mean)
    assert load_model(tmp_path / "moe").dtype == torch.bfloat16


def _other(kind="llama", **changes):
    """Write another model than the experts'."""
    return lambda folder: dense.save(kind, folder, 1, **changes)


def _edited(change):
    """Write an expert whose files ``change`` edits."""
    return lambda folder: change(dense.save("llama", folder, 1))


def _with_tensors(edit):
    """Write an expert whose tensors ``edit`` changes in place."""

    def spoil(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return _edited(spoil)


def _swap_tokens(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _truncate(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other(intermediate_size=96), "intermediate_size is 96 and 112"),
        (_other(num_hidden_layers=2), "num_hidden_layers is 2 and 3"),
        (_other("qwen3"), "a qwen3 and a llama cannot be experts of one model"),
        (_edited(_swap_tokens), "their tokenizers differ"),
        (_edited(lambda folder: (folder / "tokenizer.json").unlink()), "no tokenizer.json"),
        (_with_tensors(lambda tensors: tensors.pop(UP)), f"'{UP}' is missing"),
        (
            _with_tensors(lambda tensors: tensors.update({BIAS: torch.zeros(128)})),
            f"'{BIAS}' does not belong to a llama",
        ),
        (
            _with_tensors(lambda tensors: tensors.update({NORM: tensors[NORM].half()})),
            f"'{NORM}' is F16",
        ),
        (_edited(_truncate), "truncated or corrupt .* copy or download this file again"),
    ],
)
def test_an_expert_that_does_not_fit_is_refused(experts, tmp_path, spoil, said):
    spoil(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=said) as raised:
        merge_experts([*experts[:2], tmp_path / "bad"], tmp_path / "moe")
    assert str(tmp_path / "bad") in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad"], "nothing may be left"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen2"}, "its attention has biases but no norms, unlike"),
        ({"model_type": "gpt2"}, "llama -> mixtral, mistral -> mixtral, qwen3 -> qwen3_moe"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_a_model_without_a_moe_is_refused(experts, tmp_path, changes, said):
    shutil.copytree(experts[0], tmp_path / "odd")
    config = json.loads((tmp_path / "odd/config.json").read_text())
    (tmp_path / "odd/config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError, match=said):
        merge_experts([tmp_path / "odd", experts[1]], tmp_path / "moe")


def test_fewer_experts_than_a_token_selects_are_refused(experts, tmp_path):
    with pytest.raises(CheckpointError, match="2 experts with top_k 3"):
        merge_experts(experts[:2], tmp_path / "moe", top_k=3)
    assert not (tmp_path / "moe").exists()


SERVED = ("llama", "qwen3")


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 9, 21, 34)]


@pytest.fixture(scope="module")
def served(warm_vllm, tmp_path_factory):
    """A merged checkpoint of each kind, and vLLM's completions of it."""
    merged = []
    for kind in SERVED:
        folder = tmp_path_factory.mktemp(kind)
        folders = [dense.save(kind, folder / str(seed), seed) for seed in range(4)]
        merge_experts(folders, folder / "moe", router_std=0.5)
        merged.append(folder / "moe")
    found = vllm_server.complete_each(merged, _prompts(), 48)
    return dict(zip(SERVED, zip(merged, found, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.vllm
@vllm_server.needs_vllm
@pytest.mark.parametrize("kind", SERVED)
def test_vllm_on_the_moe_gives_the_tokens_of_transformers(kind, served):
    folder, completions = served[kind]
    assert not isinstance(completions, str), completions
    model, answers = load_model(folder), [completion.tokens for completion in completions]
    assert len({token for row in answers for token in row}) > 20
    for prompt, answer in zip(_prompts(), answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
