"""Generated programs run in the sandbox, all items at once; pass@1 is the share that passes."""

from moe_finetune.evaluation.programs import pass_rate, verdicts


def run(resps, docs):
    """Return the verdicts on the replies of every item."""
    return verdicts("mbpp", resps, docs)


def passed(doc, results):
    """Return the share of an item's replies that pass."""
    return pass_rate(results[0])


def examples(dataset):
    """Keep the three examples of Austin et al. 2021 (task ids 2, 3 and 4 of the prompt split)."""
    return dataset.filter(lambda row: row["task_id"] in (2, 3, 4))
