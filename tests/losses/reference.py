"""Every loss as a slow loop straight from its formula, for float64 tensors.

Nothing here uses a Gram matrix, a gather or a trick; sums over tokens, experts and pairs are Python
loops. Masked tokens are never read.
"""

import torch


def zero():
    return torch.zeros((), dtype=torch.float64)


def counted(mask_T, tokens):
    return [t for t in range(tokens) if mask_T is None or bool(mask_T[t])]


def over_tokens(per_token, mask_T, tokens):
    rows = counted(mask_T, tokens)
    total = sum((per_token(t) for t in rows), zero())
    return total / max(len(rows), 1)


def dot(a, b):
    return (a * b).sum()


def length(vector):
    squares = dot(vector, vector)
    return squares.sqrt() if squares > 0 else zero()


def cosine(a, b):
    la, lb = length(a), length(b)
    return dot(a, b) / (la * lb) if la > 0 and lb > 0 else zero()


def pairs(n):
    return [(j, k) for j in range(n) for k in range(n) if j != k]


def load_balance(
    probs_TE, index_TK, mask_T=None, variant="switch", sequence_lengths=None, probabilities="all"
):
    tokens, experts = probs_TE.shape
    chosen = index_TK.shape[1]
    bounds, start = [], 0
    for size in [tokens] if sequence_lengths is None else sequence_lengths.tolist():
        bounds.append((start, start + size))
        start += size
    values = []
    for first, last in bounds:
        rows = [t for t in counted(mask_T, tokens) if first <= t < last]
        if not rows:
            continue
        value = zero()
        for e in range(experts):
            load, mass = 0, zero()
            for t in rows:
                selected = sorted(index_TK[t].tolist())
                if variant == "gshard":
                    selected = [max(selected, key=lambda i, t=t: (probs_TE[t, i].item(), -i))]
                load += selected.count(e)
                if probabilities == "all":
                    mass = mass + probs_TE[t, e]
                elif e in index_TK[t].tolist():
                    mass = mass + probs_TE[t, e] / sum(probs_TE[t, i] for i in index_TK[t].tolist())
            value = value + experts * (load / len(rows)) * (mass / len(rows))
        values.append(value / chosen if variant == "deepseek" else value)
    return sum(values, zero()) / max(len(values), 1)


def z_loss(logits_TE, mask_T=None):
    def one(t):
        return sum(x.exp() for x in logits_TE[t]).log() ** 2

    return over_tokens(one, mask_T, logits_TE.shape[0])


def orthogonality(
    outputs_TKH,
    scores_TK=None,
    mask_T=None,
    form="projection",
    tau_gate=0.0,
    eps=1e-8,
):
    def one(t):
        total = zero()
        for j, k in pairs(outputs_TKH.shape[1]):
            if scores_TK is not None and not (
                scores_TK[t, j] > tau_gate and scores_TK[t, k] > tau_gate
            ):
                continue
            yj, yk = outputs_TKH[t, j], outputs_TKH[t, k]
            if form == "cosine":
                total = total + cosine(yj, yk) ** 2
            else:
                projected = dot(yj, yk) / (dot(yk, yk) + eps) * yk
                total = total + dot(projected, projected)
        return total

    return over_tokens(one, mask_T, outputs_TKH.shape[0])


def variance(scores_TE, mask_T=None):
    tokens, experts = scores_TE.shape
    rows = counted(mask_T, tokens)
    mean = [
        sum((scores_TE[t, e] for t in rows), zero()) / max(len(rows), 1) for e in range(experts)
    ]

    def one(t):
        return -sum((scores_TE[t, e] - mean[e]) ** 2 for e in range(experts)) / experts

    return over_tokens(one, mask_T, tokens)


def softmax_variance(logits_TE, mask_T=None):
    tokens, experts = logits_TE.shape

    def one(t):
        exps = [logits_TE[t, e].exp() for e in range(experts)]
        probs = [value / sum(exps) for value in exps]
        mean = sum(probs) / experts
        return -sum((p - mean) ** 2 for p in probs) / (experts - 1)

    return over_tokens(one, mask_T, tokens)


def span_projection(vector_H, others, eps=1e-6):
    """Squared length of the projection on the span of ``others``, by Gram-Schmidt."""
    basis = []
    for other_H in others:
        rest_H = other_H
        for direction_H in basis:
            rest_H = rest_H - (direction_H @ rest_H) * direction_H
        basis.append(rest_H / (rest_H.norm() + eps))
    return sum((((d @ vector_H) * d) ** 2).sum() for d in basis) if basis else zero()


def span_orthogonality(outputs_TKH, mask_T=None, eps=1e-6):
    chosen = outputs_TKH.shape[1]

    def one(t):
        rows = list(outputs_TKH[t])
        return (
            sum(
                (span_projection(rows[k], rows[:k] + rows[k + 1 :], eps) for k in range(chosen)),
                zero(),
            )
            / chosen
        )

    return over_tokens(one, mask_T, outputs_TKH.shape[0])


def specialization(activations_TKD, mask_T=None):
    def one(t):
        z = activations_TKD[t]
        return sum((cosine(z[e], z[n]) ** 2 for e, n in pairs(len(z))), zero())

    return over_tokens(one, mask_T, activations_TKD.shape[0])


def coupling(probs_TE, index_TK, next_probs_TE, top_k, mask_T=None):
    experts = probs_TE.shape[1]

    def best(row):
        return sorted(range(experts), key=lambda e: row[e].item(), reverse=True)[:top_k]

    def one(t):
        total = zero()
        for e in index_TK[t].tolist():
            for n in best(next_probs_TE[t]):
                total = total - probs_TE[t, e] * next_probs_TE[t, n]
        return total

    return over_tokens(one, mask_T, probs_TE.shape[0])


def erc_epsilon(router_EH):
    rows = router_EH.detach()
    epsilon = []
    for i, row in enumerate(rows):
        near = min((float(length(row - rows[j])) for j in range(len(rows)) if j != i), default=0.0)
        epsilon.append(near / (2 * float(length(row))) if float(length(row)) else 0.0)
    return torch.tensor(epsilon, dtype=torch.float64)


def erc_table(router_EH, gate_EDH, delta_EH=None):
    proxies = router_EH if delta_EH is None else router_EH * delta_EH
    return [[length(gate @ proxy) for gate in gate_EDH] for proxy in proxies]


def erc_from_table(table, alpha=1.0):
    experts = len(table)
    total = zero()
    for i, j in pairs(experts):
        total = total + (table[i][j] - alpha * table[i][i]).clamp_min(0)
        total = total + (table[j][i] - alpha * table[i][i]).clamp_min(0)
    return total / experts**2


def router_orthogonality(router_weight_EH):
    experts = len(router_weight_EH)
    total = sum(
        (cosine(router_weight_EH[i], router_weight_EH[j]) ** 2 for i, j in pairs(experts)), zero()
    )
    return total / max(experts * (experts - 1), 1)


def determinant(rows):
    """Laplace expansion along the first row."""
    if len(rows) == 1:
        return rows[0][0]
    total = zero()
    for column, entry in enumerate(rows[0]):
        minor = [row[:column] + row[column + 1 :] for row in rows[1:]]
        total = total + (-1) ** column * entry * determinant(minor)
    return total


def dpp(outputs_TKH, mask_T=None, eps=1e-4):
    def one(t):
        unit = [y / length(y) if length(y) > 0 else y * 0 for y in outputs_TKH[t]]
        kernel = [
            [dot(a, b) + (eps if i == j else 0.0) for j, b in enumerate(unit)]
            for i, a in enumerate(unit)
        ]
        return -determinant(kernel).log()

    return over_tokens(one, mask_T, outputs_TKH.shape[0])


def ncl(outputs_TKH, mask_T=None, normalize=True):
    def one(t):
        y = outputs_TKH[t]
        if normalize:
            scale = sum(length(v) for v in y) / len(y)
            y = y / scale if scale > 0 else y * 0
        mean = sum(y) / len(y)
        d = [v - mean for v in y]
        return sum((dot(d[i], d[j]) for i, j in pairs(len(d))), zero())

    return over_tokens(one, mask_T, outputs_TKH.shape[0])


def supervised_routing(logits_TE, token_ids_T, token_frequencies_VE, mask_T=None):
    def one(t):
        logits, wanted = logits_TE[t], token_frequencies_VE[token_ids_T[t]]
        partition = sum(x.exp() for x in logits)
        return -sum(wanted[e] * (logits[e].exp() / partition).log() for e in range(len(logits)))

    return over_tokens(one, mask_T, logits_TE.shape[0])
