"""Do domains use different experts?"""

from __future__ import annotations

import numpy as np

from moe_finetune.metrics.arrays import Array, entropy, floats, integers


def domain_specialization(
    index_TK: Array, domain_T: Array, num_experts: int, num_domains: int | None = None
) -> dict:
    """Expert by domain selection shares, and the mutual information of expert and domain.

    ``index_TK`` ``(T, K)`` selected experts, ``domain_T`` ``(T,)`` the domain of each token,
    0-based. Returns :func:`domain_information` of the counts. An empty domain raises ValueError.
    Source: P4 Fig. 3d-e.
    """
    index = integers("index_TK", index_TK, ("T", "K"), limit=num_experts)
    domain = integers("domain_T", domain_T, (len(index),), limit=num_domains).astype(np.int64)
    domains = num_domains or int(domain.max()) + 1
    flat = domain[:, None] * num_experts + index
    counts = np.bincount(flat.ravel(), minlength=domains * num_experts)
    return domain_information(counts.reshape(domains, num_experts))


def domain_information(counts_GE: Array) -> dict:
    """Shares and mutual information of dispatch counts ``(domains, experts)``.

    Returns ``shares_GE`` (rows sum to 1) and ``mutual_information`` I(expert; domain) in nats,
    domains weighted by their dispatches: 0 when all domains use the experts alike, the entropy of
    the domains (``ln`` of their number when equally large) when no expert serves two.
    """
    counts = floats("counts_GE", counts_GE, ("G", "E"))
    totals_G = counts.sum(-1)
    if not totals_G.all():
        raise ValueError(
            f"domain_T: domain {int(totals_G.argmin())} of {len(counts)} has no token, "
            "wanted at least one in each"
        )
    shares = counts / totals_G[:, None]
    weights = totals_G / totals_G.sum()
    information = entropy(weights @ shares) - weights @ entropy(shares)
    return {"shares_GE": shares, "mutual_information": float(max(information, 0.0))}
