"""Generated programs run in the sandbox, all items at once; pass@1 is the share that passes."""

from moe_finetune.evaluation.programs import pass_rate, verdicts


def run(resps, docs):
    """Return the verdicts on the replies of every item."""
    return verdicts("humaneval", resps, docs)


def passed(doc, results):
    """Return the share of an item's replies that pass."""
    return pass_rate(results[0])
