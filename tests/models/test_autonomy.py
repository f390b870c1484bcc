"""Autonomy-of-Experts: its formula a token and expert at a time, its losses, a run from scratch."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import silu

from moe_finetune import Specialization
from moe_finetune.checkpoint.loading import load_model
from moe_finetune.checkpoint.opened import open_checkpoint
from moe_finetune.errors import CaptureError, ObjectiveError, RecipeError
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.functional import orthogonality_loss, specialization_loss
from moe_finetune.models import native
from moe_finetune.models.fresh import fresh_config
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.tree import Tree
from moe_finetune.run import run_recipe

EXPERTS, TOP_K, HIDDEN, WIDTH, RANK = 7, 3, 42, 21, 11


def model(seed: int = 3, layers: int = 2, **changes):
    native.register()
    from moe_finetune.models.autonomy.modeling import AutonomyConfig, AutonomyForCausalLM

    sizes = {"vocab_size": 53, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 3, "num_experts": EXPERTS}
    sizes |= {"num_experts_per_tok": TOP_K, "gate_rank": RANK, "initializer_range": 0.3}
    torch.manual_seed(seed)
    config = AutonomyConfig(**sizes, pad_token_id=None, eos_token_id=0, **changes)
    return AutonomyForCausalLM(config).train()


def token_ids():
    return torch.randint(1, 53, (3, 9), generator=torch.Generator().manual_seed(5))


def slowly(block, hidden, renormalize: bool):
    """The block's output, a token and an expert at a time."""
    first, experts = block.gate.weight, block.experts
    rows = []
    for x in hidden.reshape(-1, HIDDEN):
        projected = [first[e] @ x for e in range(EXPERTS)]
        norms = torch.stack([p.square().sum().sqrt() for p in projected])
        share = norms.exp() / norms.exp().sum()
        chosen = sorted(range(EXPERTS), key=lambda e: -norms[e].item())[:TOP_K]
        total = sum(share[e] for e in chosen) if renormalize else 1.0
        row = torch.zeros_like(x)
        for e in chosen:
            gate = experts.gate_proj[e] @ projected[e]
            z = silu(gate) * (experts.up_proj[e] @ x)
            row = row + share[e] / total * (experts.down_proj[e] @ z)
        rows.append(row)
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize("renormalize", [False, True])
def test_values_and_gradients_are_the_slow_loops(renormalize):
    block = model(norm_topk_prob=renormalize).double().model.layers[0].mlp
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, HIDDEN, dtype=torch.float64, generator=generator)
    upstream = torch.randn(2, 5, HIDDEN, dtype=torch.float64, generator=generator)
    leaves = [hidden.requires_grad_(), *block.parameters()]
    fast, slow = block(hidden), slowly(block, hidden, renormalize)
    assert torch.allclose(fast, slow, rtol=0, atol=1e-12 * float(slow.detach().abs().max()))
    wanted = torch.autograd.grad(slow, leaves, upstream)
    for found, right in zip(torch.autograd.grad(fast, leaves, upstream), wanted, strict=True):
        assert float(right.abs().max()) > 0
        assert torch.allclose(found, right, rtol=0, atol=1e-12 * float(right.abs().max()))


def test_the_rank_gives_an_expert_as_many_weights():
    native.register()
    from moe_finetune.models.autonomy.modeling import AutonomyConfig

    config = AutonomyConfig(hidden_size=1536, intermediate_size=768)
    assert config.gate_rank == 512  # 512 (1,536 + 768) = 1,536 x 768


def gradients(trained):
    return {name: p.grad.clone() for name, p in trained.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_on_activations_and_outputs_reach_the_factors(checkpointing):
    ids = token_ids()
    trained = model(layers=1)
    experts, kept = trained.model.layers[0].mlp.experts, {}

    def keep(_, args):
        kept["z"], kept["y"] = experts.run(*args)[1:]

    handle = experts.register_forward_pre_hook(keep)
    loss = trained(ids, labels=ids).loss
    extra = 0.7 * specialization_loss(kept["z"]) + 0.2 * orthogonality_loss(kept["y"])
    (loss + extra).backward()
    handle.remove()
    wanted = gradients(trained)
    trained.zero_grad()
    if checkpointing:
        trained.gradient_checkpointing_enable({"use_reentrant": False})
    terms = {"specialization": {"weight": 0.7}, "orthogonality": {"weight": 0.2}}
    with Specialization(trained, {"terms": terms}, total_steps=3):
        trained(ids, labels=ids, use_cache=False).loss.backward()
    found = gradients(trained)
    for name, right in wanted.items():
        scale = float(right.abs().max())
        assert torch.allclose(found[name], right, rtol=0, atol=1e-5 * scale), name
    trained.zero_grad()
    trained(ids, labels=ids).loss.backward()
    plain = gradients(trained)["model.layers.0.mlp.gate.weight"]
    assert not torch.allclose(plain, wanted["model.layers.0.mlp.gate.weight"], rtol=0.01)


def test_what_reads_a_router_or_adapts_experts_is_refused():
    trained, ids = model(), token_ids()
    for preset in ("erc", "router_orthogonality"):
        with pytest.raises(ObjectiveError, match=f"{preset} reads the router's rows, but this"):
            Specialization(trained, preset, total_steps=3).__enter__()
    with (
        Specialization(trained, "st_moe", total_steps=3),
        pytest.raises(CaptureError, match="have no dropout on their activations"),
    ):
        trained(ids, labels=ids)
    with pytest.raises(
        RecipeError, match="Autonomy-of-Experts supports only full training; set lora: null"
    ):
        add_lora(trained, LoraSection(rank=4, alpha=8), "frozen")


@pytest.mark.slow
def test_a_run_from_scratch_out_of_olmoes_config(tiny_checkpoint, tmp_path):
    ignored = shutil.ignore_patterns("*.safetensors*")
    folder = shutil.copytree(tiny_checkpoint("olmoe"), tmp_path / "olmoe", ignore=ignored)
    rows = [{"text": f"{a} and {a} are {2 * a}. " * 3} for a in range(40)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"model_type": "autonomy_of_experts", "num_hidden_layers": 2, "gate_rank": 13}
    tree = {
        "model": {"path": str(folder), "init": "random", "config": changes},
        "method": {"preset": "erc", "terms": {"erc": {"weight": 0}}},
        "lora": None,
        "data": {"train": str(data), "validation": str(data), "max_length": 64},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.01,
                    "logging_steps": 1, "seed": 3},
    }  # fmt: skip
    run = run_recipe(recipe_from_tree(Tree(tree)), tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert train[-1]["loss"] < train[0]["loss"] - 0.2, "it learns"
    assert "losses/load_balance" in train[0] and "routing/max_violation" in train[0]
    assert not any("router_cosine" in name for line in lines for name in line)
    assert any("eval_routing/activation_cosine" in line for line in lines)
    saved = json.loads((run / "merged" / "config.json").read_text())
    assert (saved["model_type"], saved["gate_rank"]) == ("autonomy_of_experts", 13)
    open_checkpoint(run / "merged", values=True)
    trained = load_model(run / "merged")
    gates = trained.model.layers[1].mlp.gate.weight
    assert gates.shape[1] == 13 and not torch.equal(gates[0], gates[1])


def test_only_a_type_that_extends_the_checkpoints_is_taken(tiny_checkpoint):
    with pytest.raises(RecipeError, match=" cannot be changed to 'autonomy_of_experts'"):
        fresh_config(tiny_checkpoint("qwen3_moe"), {"model_type": "autonomy_of_experts"})
    with pytest.raises(RecipeError, match="to 'mixtral'; it may be changed to autonomy_of_experts"):
        fresh_config(tiny_checkpoint("olmoe"), {"model_type": "mixtral"})
