"""What each rank of ``test_sharded.py`` runs: methods plain, sharded, and both sharded and
checkpointed; and checkpointed with the experts spread over the ranks, the rest whole or sharded.

Its argument is OUT, under RANK and WORLD_SIZE 2; rank 0 writes OUT.
The plain model sees both ranks' batches, one after the other, in every process: one rank of an
accumulation of two. The others see their own batch, and gradients are averaged over ranks.
"""

import copy
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_finetune.errors import ObjectiveError
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses import TERMS
from moe_finetune.losses.presets import PRESETS
from moe_finetune.moe.large.spread_experts import spread_experts, spread_modules
from moe_finetune.moe.layers import moe_layers
from moe_finetune.plugins import use_file
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.sharded_state import check_all_sharded
from moe_finetune.training.specialization import Specialization
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.near_ties import disturb_recomputations, near_tied
from tests.support.ranks import furthest
from tests.support.tiny_adapter import random_factors

MODES = ("plain", "sharded", "both", "spread", "spread and sharded")
SPREAD = MODES[3:]
WORLD = 2
# Large enough that a term which is lost or quieter is seen in the gradients.
WEIGHT = {
    **{"z_loss": 0.02, "coupling": 2.0, "orthogonality": 0.5, "variance": 3.0},
    **{"router_orthogonality": 6.0, "softmax_variance": 3.0},
}
COUPLED = {
    "coupling alone": {"coupling": {}},
    "coupling above a layer without balance": {
        "coupling": {"layers": [2]},
        "load_balance": {"layers": [0, 2, 3]},
    },
}
EVERY_TERM = "every term"
# Beside all terms at once those whose weights are gathered for them alone, noise, and the bias.
CASES = (
    *("none", EVERY_TERM, "gshard", "st_moe", "loss_free", "orthogonal_variance_released"),
    *("erc", "router_orthogonality", "densemixer", *COUPLED),
)
SHARDED_ALONE = {
    *(EVERY_TERM, "st_moe", "loss_free", "erc", "coupling above a layer without balance"),
    "densemixer",
}
"""Without a checkpointed layer, too; the others are sharded and checkpointed at once."""
TIED = ("ddp", "both", *SPREAD)
"""Where a recomputation is disturbed, so that routers would select other experts."""
MEASURED = (EVERY_TERM, "erc")
"""Their strength is compared, too."""


def modes(case: str) -> list[str]:
    """The modes that are compared with the plain one."""
    chosen = [mode for mode in MODES[1:] if mode != "sharded" or case in SHARDED_ALONE]
    if case == "densemixer":  # refused where the experts are spread
        return ["ddp", *(mode for mode in chosen if mode not in SPREAD)]
    return chosen


def method(case: str, table: str) -> dict:
    """The case's method with weights that are seen."""
    terms = {EVERY_TERM: {name: {} for name in TERMS}, **COUPLED}.get(case)
    chosen = {"terms": copy.deepcopy(terms)} if terms else PRESETS[case].method()
    for name, options in chosen["terms"].items():
        options["weight"] = WEIGHT.get(name, 0.3)
        if name == "supervised_routing":
            options["table"] = table
    return chosen


def model(spread: bool = False, tied: bool = False) -> torch.nn.Module:
    """Four small MoE layers, with LoRA everywhere and routers that train in full.

    ``spread``: half of the experts on each rank, by transformers' plan.
    """
    base = tiny.model(
        "olmoe", num_hidden_layers=4, hidden_size=96, intermediate_size=20, vocab_size=300
    )
    if tied:
        near_tied(base)
    if spread:
        spread_experts(base)
    torch.manual_seed(1)
    built = add_lora(base, LoraSection(rank=4, alpha=8.0), "full")
    random_factors(built, 0.1)
    return built.train()


def run(
    built: torch.nn.Module,
    mode: str,
    options: dict,
    measured: bool = False,
    tied: bool = False,
    disturbed: bool = False,
    keeps: bool = True,
) -> dict:
    """Gradients, logged values and state of one optimizer step.

    The strength is measured where most is at once. ``measured``: measure it also here.
    """
    measured = measured or mode == "both"
    options = {**options, "strength": {"first": measured}}
    built = model(spread=True, tied=tied) if mode in SPREAD else copy.deepcopy(built)
    if disturbed:
        disturb_recomputations(built)
    if mode in ("ddp", "both", *SPREAD):
        built.gradient_checkpointing_enable({"use_reentrant": False})
        built.enable_input_require_grads()
    if mode in SPREAD:
        experts = built.get_base_model().model.layers[1].mlp.experts
        assert experts.base_layer.base_layer.num_experts == 6, "the experts are not spread"
    if mode not in ("plain", "ddp", "spread"):
        mesh = init_device_mesh("cpu", (WORLD,))
        ignored = {p for experts in spread_modules(built) for p in experts.parameters()}
        for layer in built.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        fully_shard(built, mesh=mesh, ignored_params=ignored)
        check_all_sharded(built)
    batches = range(WORLD) if mode == "plain" else [ranks.rank()]
    called = DistributedDataParallel(built) if mode == "ddp" else built
    with Specialization(built, options, accumulation=len(batches)) as work:
        work.recorder.change(keeps_choice=keeps)
        if work.balancer is not None:
            for layer, bias in work.balancer.bias.items():
                work.balancer.bias[layer] = torch.linspace(-0.05, 0.05, bias.numel()).roll(layer)
        for rank in batches:
            torch.manual_seed(100 + rank)
            batch = tiny.batch(rows=2, length=11 + rank, seed=7 + rank)
            (called(**batch).loss / len(batches)).backward()
        if mode == "spread":  # as the Trainer does for adapters on a model that it did not shard
            for parameter in built.parameters():
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= WORLD
        gradients = {
            name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
            for name, p in built.named_parameters()
            if p.grad is not None
        }
        work.step()
        values, state = work.read(), work.state_dict()
        rows = [row.row() for row in work.strength.rows]
        strength = {row.pop("term"): row for row in rows}
    changed = values.get("routing/changed_in_recomputation")
    losses = {k: v for k, v in values.items() if k.startswith("losses/")}
    biases = {k: v for k, v in state.items() if k.startswith("bias.")}
    return {
        "gradients": gradients,
        "losses": losses,
        "biases": biases,
        "strength": strength,
        "changed": changed,
    }


def refusal() -> str:
    """The message when PEFT's wrappers, with their factors, are ignored in place of the experts."""
    built, mesh = model(spread=True), init_device_mesh("cpu", (WORLD,))
    ignored = {p for layer in moe_layers(built) for p in layer.outer_experts.parameters()}
    for layer in built.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(built, mesh=mesh, ignored_params=ignored)
    try:
        check_all_sharded(built)
    except ObjectiveError as error:
        return str(error)
    return ""


def compare(case: str, table: str, built: torch.nn.Module, without: dict) -> dict:
    """By mode: the distance to the plain run, or the error."""
    options = method(case, table)
    plain = run(built, "plain", options, case in MEASURED)
    found = {"plain": {"acts": furthest(plain["gradients"], without)}}
    for term in TERMS if case == EVERY_TERM else ():
        others = {"terms": {n: o for n, o in options["terms"].items() if n != term}}
        lacks = run(built, "plain", others)["gradients"]
        found["plain"][term] = furthest(plain["gradients"], lacks)
    for mode in modes(case):
        if mode in SPREAD and case == "st_moe":
            # Dropout inside the experts is drawn where they are, in another order.
            options["perturbations"]["expert_dropout"] = None
            plain = run(built, "plain", options)
        try:
            got = run(built, mode, options)
        except Exception as error:
            found[mode] = {"error": f"{type(error).__name__}: {error}"[:400]}
            continue
        found[mode] = {
            "gradients": furthest(got["gradients"], plain["gradients"]),
            "losses": [[plain["losses"][k], got["losses"][k]] for k in plain["losses"]],
            "biases": furthest(got["biases"], plain["biases"]) if plain["biases"] else 0.0,
            "strength": [plain["strength"], got["strength"]],
        }
    return found


def compare_ties(mode: str) -> dict[str, float]:
    """With a disturbed recomputation: the distance to the same run without, kept and not kept."""
    tied, terms = model(tied=True), ("orthogonality", "variance", "load_balance", "coupling")
    options = {"terms": {name: {"weight": WEIGHT.get(name, 0.3)} for name in terms}}
    ways = {
        "calm": {},
        "kept": {"disturbed": True},
        # Rows that other ranks do not expect would end in an error, or in a wait.
        **({} if mode in SPREAD else {"repeated": {"disturbed": True, "keeps": False}}),
    }
    ran = {name: run(tied, mode, options, tied=True, **how) for name, how in ways.items()}
    calm = ran.pop("calm")
    assert calm["changed"] == 0
    distances = {name: furthest(r["gradients"], calm["gradients"]) for name, r in ran.items()}
    return {**distances, "changed": ran["kept"]["changed"]}


def main(out: Path) -> None:
    """Run all cases in one job."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks.join_group()
    use_file(ROOT / "recipes" / "plugins" / "p0_released.py")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/table.safetensors"
        torch.manual_seed(3)
        save_file({"token_frequencies": torch.randn(300, 12).softmax(-1)}, table)
        built = model()
        without = run(built, "plain", {"terms": {}})["gradients"]
        found["refused"] = refusal()
        found["ties"] = {mode: compare_ties(mode) for mode in TIED}
        for case in CASES:
            found[case] = compare(case, table, built, without)
    if ranks.rank() == 0:
        out.write_text(json.dumps(found))
    ranks.barrier()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]))
