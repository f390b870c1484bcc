"""Compare each loss with its plain form: forward + backward time and peak memory, interleaved.

The plain form follows the formula directly: all K x K pairs as vectors, one-hot loads, projections
with the adapter added to the weights.

    python eval/bench/losses.py --tokens 1024 --save losses
"""

import argparse
import statistics
import time

import torch
from saved import add_save, finish
from torch.nn.functional import cosine_similarity, one_hot, relu

from moe_finetune.losses import functional as ours


def cases(arguments):
    """name -> (ours, plain, inputs that get gradients)."""
    torch.manual_seed(0)
    tokens, experts, top_k = arguments.tokens, arguments.experts, arguments.top_k
    hidden, width = arguments.hidden, arguments.width
    logits = torch.randn(tokens, experts, requires_grad=True)
    index = logits.detach().topk(top_k).indices
    outputs = torch.randn(tokens, top_k, hidden, requires_grad=True)
    activations = torch.randn(tokens, top_k, width, requires_grad=True)
    router = torch.randn(experts, hidden, requires_grad=True)
    gate = (torch.randn(experts, width, hidden) * hidden**-0.5).requires_grad_()
    pairs = ~torch.eye(top_k, dtype=torch.bool)

    def scores():
        picked = logits.softmax(-1).gather(-1, index)
        picked = picked / picked.sum(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, index, picked)

    def plain_orthogonality():
        y_j, y_k = outputs.unsqueeze(2), outputs.unsqueeze(1)
        inner = (y_j * y_k).sum(-1, keepdim=True)
        projection = inner / ((y_k * y_k).sum(-1, keepdim=True) + 1e-8) * y_k
        return (projection.square().sum(-1) * pairs).sum((1, 2)).mean()

    def plain_specialization():
        cosine = cosine_similarity(activations.unsqueeze(2), activations.unsqueeze(1), dim=-1)
        return (cosine.square() * pairs).sum((1, 2)).mean()

    def specialization():
        return ours.specialization_loss(activations)

    def balance():
        return ours.load_balancing_loss(logits.softmax(-1), index)

    def plain_variance():
        return -(scores() - scores().mean(0)).square().mean(1).mean()

    def plain_balance():
        share = one_hot(index, experts).float().sum(1).mean(0)
        return experts * (share * logits.softmax(-1).mean(0)).sum()

    def plain_dpp():
        unit = outputs / outputs.norm(dim=-1, keepdim=True)
        gram = (unit.unsqueeze(2) * unit.unsqueeze(1)).sum(-1)
        return -torch.linalg.slogdet(gram + 1e-4 * torch.eye(top_k)).logabsdet.mean()

    def plain_ncl():
        scaled = outputs / outputs.norm(dim=-1).mean(1)[:, None, None]
        apart = scaled - scaled.mean(1, keepdim=True)
        total = apart.sum(1, keepdim=True)
        return (apart * (total - apart)).sum((1, 2)).mean()

    def plain_erc():
        table = torch.einsum("ih,jdh->ijd", router, gate).norm(dim=-1)
        own = table.diagonal().unsqueeze(1)
        excess = relu(table - own) + relu(table.t() - own)
        return excess.fill_diagonal_(0).sum() / experts**2

    return {
        "load_balance": (balance, plain_balance, [logits]),
        "variance": (lambda: ours.variance_loss(scores()), plain_variance, [logits]),
        "orthogonality": (lambda: ours.orthogonality_loss(outputs), plain_orthogonality, [outputs]),
        "specialization": (specialization, plain_specialization, [activations]),
        "dpp": (lambda: ours.dpp_loss(outputs), plain_dpp, [outputs]),
        "ncl": (lambda: ours.ncl_loss(outputs), plain_ncl, [outputs]),
        "erc": (lambda: ours.erc_loss(router, gate, noise=False), plain_erc, [router, gate]),
    }


def run(loss, inputs) -> float:
    start = time.perf_counter()
    torch.autograd.grad(loss(), inputs)
    return time.perf_counter() - start


def saved_bytes(loss) -> int:
    """Bytes that the graph saves for the backward; inputs count once."""
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"tokens": 1024, "experts": 64, "top-k": 8, "hidden": 512, "width": 256, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    add_save(parser, "losses")
    arguments = parser.parse_args()
    rows = {}
    for name, (mine, plain, inputs) in cases(arguments).items():
        a, b = mine(), plain()
        assert torch.allclose(a, b, rtol=1e-3), (name, a.item(), b.item())
        times = {"ours": [], "plain": []}
        for _ in range(arguments.rounds):
            times["ours"].append(run(mine, inputs))
            times["plain"].append(run(plain, inputs))
        rows[name] = row = {f"{k}_ms": statistics.median(t) * 1e3 for k, t in times.items()}
        row |= {
            "ours_saved_mb": saved_bytes(mine) / 1e6,
            "plain_saved_mb": saved_bytes(plain) / 1e6,
        }
        print(
            f"{name:16s} {row['ours_ms']:8.1f} ms against {row['plain_ms']:8.1f} ms;"
            f" kept {row['ours_saved_mb']:.1f} MB against {row['plain_saved_mb']:.1f}"
        )
    finish(arguments, {"rows": rows}, show=False)


if __name__ == "__main__":
    main()
