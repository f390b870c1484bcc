"""Balanced placement of every layer's experts on ranks (P1 app. D).

The objective is the number of choice pairs of one token, within a layer and in adjacent layers,
that share a rank; loads above a limit cost more than any such pair. The search has three parts:

1. *swap*: in one layer, with its neighbors fixed, exchange two experts of different ranks while
   that helps (Kernighan and Lin's move), with the best exchanges of disjoint pairs of ranks at the
   same time; sweep the layers up and down until nothing helps;
2. *stitch*: of several plans, choose one for each layer. Only adjacent layers interact, and rank
   labels do not matter, so a shortest-path recursion over layers with an optimal matching of rank
   labels at each step finds the best combination exactly;
3. shake the plan, swap, stitch with the previous plan, and repeat.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from eval.placement.coactivation import Coactivation, count_coactivation
from moe_finetune.errors import RecipeError, TraceError
from moe_finetune.metrics.arrays import Array, integers

STARTS = 4
ROUNDS = 24
WORK = 250_000_000  # rounds x L x E^3 of the search: several seconds on two cores
MARGIN = 1.5  # standard deviations of drift: several ranks are near the limit, the largest counts
LEAST_ROOM = 0.25


def plan_placement(
    index_TLK: Array,
    num_experts: int,
    num_ranks: int,
    max_imbalance: float = 1.3,
    seed: int = 0,
) -> np.ndarray:
    """Plan the rank of each expert in every layer, so that a token's experts share few ranks.

    Args:
        index_TLK: ``(T, L, K)`` selected experts of a trace; at least as many tokens as experts.
        num_ranks: R, a divisor of E.
        max_imbalance: bound on largest over mean dispatches per rank for *other* tokens of the same
            kind: the plan keeps a margin for the drift in the trace.

    Returns:
        ``ranks_LE``, ``(L, E)`` int64, with exactly E/R experts per rank and layer.
    """
    if num_ranks < 1 or num_experts % num_ranks:
        fitting = [r for r in range(1, num_experts + 1) if num_experts % r == 0]
        raise RecipeError(
            f"{num_ranks} ranks do not divide {num_experts} experts evenly; use one of {fitting}"
        )
    if not max_imbalance > 1:
        raise RecipeError(f"max_imbalance: got {max_imbalance}, expected more than 1")
    index = integers("index_TLK", index_TLK, ("T", "L", "K"), limit=num_experts)
    if len(index) < num_experts:
        raise TraceError(f"{len(index)} tokens are too few to place {num_experts} experts")
    counts = count_coactivation(index, num_experts)
    slots_LE = _Search(counts, num_ranks, max_imbalance, seed).run().reshape(-1, num_experts)
    # The inverse of a permutation: the slot of each expert.
    return np.argsort(slots_LE, axis=1) // (num_experts // num_ranks)


class _Search:
    """State of the search; a plan is ``slots_LRS``, the experts of each rank in a layer."""

    def __init__(self, counts: Coactivation, num_ranks: int, max_imbalance: float, seed: int):
        self.counts = counts
        self.layers, self.experts = counts.load_LE.shape
        self.ranks = num_ranks
        self.max_imbalance = max_imbalance
        self.limit_L = max_imbalance * counts.load_LE.sum(-1) / num_ranks
        # A dispatch contributes at most this much to the objective, so balance comes first.
        self.price = 4.0 * counts.top_k * max(counts.top_k - 1, 1)
        self.rng = np.random.default_rng(seed)

    def run(self) -> np.ndarray:
        if self.ranks == 1:
            return self.random_plan()
        rounds = min(ROUNDS, WORK // (self.layers * self.experts**3))
        starts = [self.sweep(self.random_plan()) for _ in range(max(1, min(STARTS, rounds)))]
        best = self.stitch(starts)
        self.tighten(best)
        best = self.sweep(best)
        for _ in range(rounds):
            other = self.sweep(self.shaken(best))
            joined = self.sweep(self.stitch([best, other]))
            best = max(best, joined, key=self.value)
        return best

    def tighten(self, plan: np.ndarray) -> None:
        """Lower the limit by the drift of such a plan, so that other tokens also stay below it."""
        room = self.max_imbalance - 1
        room_left = max(room - MARGIN * self.counts.drift(plan), LEAST_ROOM * room)
        self.limit_L *= (1 + room_left) / self.max_imbalance

    def random_plan(self) -> np.ndarray:
        plan = np.stack([self.rng.permutation(self.experts) for _ in range(self.layers)])
        return plan.reshape(self.layers, self.ranks, -1)

    def shaken(self, plan: np.ndarray) -> np.ndarray:
        """A copy with a quarter of each layer's experts exchanged at random."""
        shaken = plan.reshape(self.layers, -1).copy()
        for slots in shaken:
            chosen = self.rng.choice(self.experts, max(2, self.experts // 4), replace=False)
            slots[chosen] = slots[self.rng.permutation(chosen)]
        return shaken.reshape(plan.shape)

    def value(self, plan: np.ndarray) -> float:
        total = sum(self.own_value(layer, slots) for layer, slots in enumerate(plan))
        for layer in range(self.layers - 1):
            total += np.trace(self.shared(layer, plan[layer], plan[layer + 1]))
        return float(total)

    def own_value(self, layer: int, slots_RS: np.ndarray) -> float:
        within = self.counts.within_LEE[layer][slots_RS[:, :, None], slots_RS[:, None, :]]
        load_R = self.counts.load_LE[layer][slots_RS].sum(-1)
        return within.sum() / 2 - self.price * np.maximum(load_R - self.limit_L[layer], 0).sum()

    def shared(self, layer: int, slots_RS: np.ndarray, next_RS: np.ndarray) -> np.ndarray:
        """``(R, R)`` co-activation of the ranks of ``layer`` with those of the next layer."""
        across = self.counts.across_LEE[layer][:, next_RS].sum(-1)
        return across[slots_RS].sum(1)

    def sweep(self, plan: np.ndarray) -> np.ndarray:
        """Swap experts layer by layer, up and down, until no layer changes."""
        plan = plan.copy()
        order = list(range(self.layers))
        while sum(self.swap(plan, layer) for layer in order):
            order.reverse()
        return plan

    def swap(self, plan: np.ndarray, layer: int) -> bool:
        """Exchange experts of one layer while that helps; return whether any moved."""
        counts, slots_RS = self.counts, plan[layer]
        ranks, size = slots_RS.shape
        pull_ER = np.zeros((self.experts, ranks))
        if layer > 0:
            pull_ER += counts.across_LEE[layer - 1][plan[layer - 1]].sum(1).T
        if layer + 1 < self.layers:
            pull_ER += counts.across_LEE[layer][:, plan[layer + 1]].sum(-1)
        changed = False
        while True:
            flat = slots_RS.ravel()
            within = counts.within_LEE[layer][np.ix_(flat, flat)]
            affinity = pull_ER[flat] + within.reshape(self.experts, ranks, size).sum(-1)
            # gain[x, y]: gain of moving expert x to y's rank while y stays.
            stay = affinity[np.arange(self.experts), np.repeat(np.arange(ranks), size)]
            gain = np.repeat(affinity, size, axis=1) - stay[:, None]
            gain += gain.T - 2 * within
            gain -= self.price * self.added_excess(layer, slots_RS)
            best_RR, where_RR = _best_of_blocks(gain, ranks, size)
            exchanges = _disjoint(best_RR)
            if not exchanges:
                return changed
            for a, b in exchanges:
                x, y = divmod(int(where_RR[a, b]), size)
                slots_RS[a, x], slots_RS[b, y] = slots_RS[b, y], slots_RS[a, x]
            changed = True

    def added_excess(self, layer: int, slots_RS: np.ndarray) -> np.ndarray:
        """``(E, E)`` in slot order: load above the limit that an exchange adds."""
        size = slots_RS.shape[1]
        load = self.counts.load_LE[layer][slots_RS]
        rank_load = np.repeat(load.sum(-1), size)
        limit = self.limit_L[layer]
        flat = load.ravel()
        excess = np.maximum(rank_load[:, None] + flat[None, :] - flat[:, None] - limit, 0)
        excess -= np.maximum(rank_load - limit, 0)[:, None]
        return excess + excess.T

    def stitch(self, plans: Sequence[np.ndarray]) -> np.ndarray:
        """The best plan that takes each layer from one of ``plans``, up to rank labels."""
        from scipy.optimize import linear_sum_assignment

        best = np.array([self.own_value(0, plan[0]) for plan in plans])
        steps = []
        for layer in range(1, self.layers):
            mass, match = np.zeros((len(plans), len(plans))), {}
            for (i, lower), (j, upper) in itertools.product(enumerate(plans), repeat=2):
                shared = self.shared(layer - 1, lower[layer - 1], upper[layer])
                rows, columns = linear_sum_assignment(-shared)
                mass[i, j], match[i, j] = shared[rows, columns].sum(), columns
            reached = best[:, None] + mass
            steps.append((reached.argmax(0), match))
            best = reached.max(0) + [self.own_value(layer, plan[layer]) for plan in plans]
        path = [int(best.argmax())]
        for came_from, _ in reversed(steps):
            path.append(int(came_from[path[-1]]))
        path.reverse()
        stitched = plans[0].copy()
        names = np.arange(self.ranks)
        stitched[0] = plans[path[0]][0]
        for layer in range(1, self.layers):
            # names[r] is what the chosen plan calls rank r in this layer.
            names = steps[layer - 1][1][path[layer - 1], path[layer]][names]
            stitched[layer] = plans[path[layer]][layer][names]
        return stitched


def _best_of_blocks(gain: np.ndarray, ranks: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Largest gain for every pair of ranks, ``(R, R)``, and its index in the S x S block."""
    blocks = gain.reshape(ranks, size, ranks, size).swapaxes(1, 2).reshape(ranks, ranks, -1)
    where = blocks.argmax(-1)
    return np.take_along_axis(blocks, where[:, :, None], axis=-1)[:, :, 0], where


def _disjoint(best_RR: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of ranks with a positive gain, best first, no rank twice: all can be made at once."""
    best_RR = np.triu(best_RR, 1)
    pairs = []
    while best_RR.max() > 0:
        a, b = divmod(int(best_RR.argmax()), len(best_RR))
        pairs.append((a, b))
        best_RR[[a, b]] = 0
        best_RR[:, [a, b]] = 0
    return pairs
