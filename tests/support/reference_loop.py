"""MoE blocks and ``W + s B A`` once more, in plain loops that share nothing with the package.

A copy of the model in float64 keeps transformers' attention and norms; its MoE blocks are replaced
by a loop over tokens and choices that reads the parameters by their names. Losses are the slow
loops of ``tests/losses/reference.py``, and gradients are autograd's.

T tokens, E experts, K selected, H hidden, D expert width.
"""

import copy
from itertools import pairwise
from types import SimpleNamespace

import peft
import torch
from torch.nn.functional import silu

from tests.losses import reference


def gradients(model, batches, terms, scaling, scale=1.0, language=True):
    """Gradients by name of ``language loss + scale * terms``, summed over forwards of ``batches``.

    Args:
        terms: ``{name: {"weight": w, ...}}`` with the options that :func:`losses` reads.
        scaling: alpha / rank of the adapter.
        language: False leaves out the language loss.
    """
    double = copy.deepcopy(model).double().train()
    double.zero_grad()
    for batch in batches:
        seen = []
        keep = watch(double, scaling, seen)
        output = double(**batch)
        keep.clear()
        counted = batch["attention_mask"].reshape(-1).bool()
        total = scale * sum(losses(seen, counted, terms).values())
        (total + output.loss if language else total).backward()
    return {n: p.grad.float() for n, p in double.named_parameters() if p.grad is not None}


def watch(model, scaling, seen):
    """Replace the forward of every MoE block; each adds what it computed to ``seen``."""
    blocks = [m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
    for block in blocks:
        block.forward = lambda hidden, block=block: moe(block, model.config, scaling, hidden, seen)
    return blocks


def moe(block, config, scaling, hidden_BSH, seen):
    """The block's output, one token at a time."""
    router_EH, up_E2DH, down_EHD = weights(block, scaling)
    x_TH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])
    logits_TE = x_TH @ router_EH.T
    sigmoid = config.model_type == "deepseek_v3"
    scores_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(-1)
    choice_TE = scores_TE
    for name, buffer in block.named_buffers():
        if name.endswith("e_score_correction_bias"):
            choice_TE = scores_TE + buffer
    index_TK = choice_TE.topk(config.num_experts_per_tok).indices
    rows, z_all, y_all = [], [], []
    for t in range(len(x_TH)):
        z_t, y_t = [], []
        for e in index_TK[t].tolist():
            gate, up = (up_E2DH[e] @ x_TH[t]).chunk(2)
            z_t.append(silu(gate) * up)
            y_t.append(down_EHD[e] @ z_t[-1])
        weight_K = scores_TE[t, index_TK[t]]
        if config.model_type == "mixtral" or getattr(config, "norm_topk_prob", False):
            weight_K = weight_K / weight_K.sum()
        weight_K = weight_K * (getattr(config, "routed_scaling_factor", None) or 1.0)
        rows.append(sum(w * y for w, y in zip(weight_K, y_t, strict=True)))
        z_all.append(torch.stack(z_t))
        y_all.append(torch.stack(y_t))
    width = up_E2DH.shape[1] // 2
    seen.append(
        SimpleNamespace(
            logits=logits_TE,
            probs=scores_TE / scores_TE.sum(-1, keepdim=True),
            index=index_TK,
            z=torch.stack(z_all),
            y=torch.stack(y_all),
            router=router_EH,
            gate=up_E2DH[:, :width],
        )
    )
    out_BSH = torch.stack(rows).view_as(hidden_BSH)
    shared = getattr(block, "shared_experts", None)
    return out_BSH if shared is None else out_BSH + shared(hidden_BSH)


OLD_PEFT = tuple(map(int, peft.__version__.split(".")[:2])) < (0, 19)


def weights(block, scaling):
    """Effective router (E, H), gate/up (E, 2D, H), down (E, H, D): adapters added by expert."""
    named = dict(block.named_parameters())

    def find(part, end):
        found = [n for n in named if n.startswith(part) and n.endswith(end)]
        trained = [n for n in found if "modules_to_save" in n]
        return named[(trained or found)[0]] if found else None

    router = find("gate.", ".weight") if find("gate.", ".base_layer.weight") is None else None
    if router is None:
        router = find("gate.", ".base_layer.weight")
        a, b = find("gate.", "lora_A.default.weight"), find("gate.", "lora_B.default.weight")
        router = router + scaling * b @ a
    stacks = []
    for name in ("gate_up_proj", "down_proj"):
        stack = find("experts.", name)
        experts, outer, inner = stack.shape
        if OLD_PEFT:
            inner = outer
        for prefix in {n[: -len("lora_A.default.weight")] for n in named if "lora_A" in n}:
            a, b = named[prefix + "lora_A.default.weight"], named[prefix + "lora_B.default.weight"]
            if not prefix.startswith("experts.") or a.shape[1] != inner:
                continue
            rank = a.shape[0] // experts
            change = [
                b[:, e::experts] @ a[e * rank : (e + 1) * rank] for e in range(experts)
            ]  # in A the expert is the slowest index, in B the fastest
            change_EOI = torch.stack(change)
            # PEFT before 0.19 has them the other way round: A reads the output's dimension.
            stack = stack + scaling * (change_EOI.transpose(1, 2) if OLD_PEFT else change_EOI)
        stacks.append(stack)
    return router, *stacks


def losses(layers, counted_T, terms):
    """Weighted value of each term, summed over layers, mean over the tokens that count."""
    found = {}
    for name, options in terms.items():
        if name == "coupling":
            values = [
                reference.coupling(low.probs, low.index, up.probs, up.index.shape[1], counted_T)
                for low, up in pairwise(layers)
            ]
        else:
            values = [TERMS[name](layer, counted_T) for layer in layers]
        found[name] = options["weight"] * sum(values)
    return found


def scores(layer):
    """Scores after top-k: rows sum to 1."""
    rows = []
    for probs_E, index_K in zip(layer.probs, layer.index, strict=True):
        picked = probs_E[index_K]
        rows.append(torch.zeros_like(probs_E).scatter(0, index_K, picked / picked.sum()))
    return torch.stack(rows)


TERMS = {
    "load_balance": lambda layer, mask: reference.load_balance(layer.probs, layer.index, mask),
    "z_loss": lambda layer, mask: reference.z_loss(layer.logits, mask),
    "orthogonality": lambda layer, mask: reference.orthogonality(layer.y, mask_T=mask),
    "variance": lambda layer, mask: reference.variance(scores(layer), mask),
    "specialization": lambda layer, mask: reference.specialization(layer.z, mask),
    "erc": lambda layer, _: reference.erc_from_table(reference.erc_table(layer.router, layer.gate)),
    "router_orthogonality": lambda layer, _: reference.router_orthogonality(layer.router),
    "dpp": lambda layer, mask: reference.dpp(layer.y, mask),
    "ncl": lambda layer, mask: reference.ncl(layer.y, mask),
}
