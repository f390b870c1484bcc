"""Whether domains use different experts."""

from moe_finetune.metrics.arrays import Array, entropy, floats


def domain_information(counts_GE: Array) -> dict:
    """Shares and mutual information of dispatch counts ``(domains, experts)``.

    Returns ``shares_GE`` (rows sum to 1) and ``mutual_information`` I(expert; domain) in nats, with
    domains weighted by their dispatches: 0 if all domains use the experts equally, the entropy of
    the domains (``ln`` of their number if equally large) if no expert serves two. Raises ValueError
    for an empty domain. Source: P4 Fig. 3d-e.
    """
    counts = floats("counts_GE", counts_GE, ("G", "E"))
    totals_G = counts.sum(-1)
    if not totals_G.all():
        raise ValueError(
            f"counts_GE: domain {int(totals_G.argmin())} of {len(counts)} has no token, "
            "expected at least one in each"
        )
    shares = counts / totals_G[:, None]
    weights = totals_G / totals_G.sum()
    information = entropy(weights @ shares) - weights @ entropy(shares)
    return {"shares_GE": shares, "mutual_information": float(max(information, 0.0))}
