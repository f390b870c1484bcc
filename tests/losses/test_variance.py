import pytest
import torch

from moe_finetune.losses import TERMS
from moe_finetune.losses.base import LayerContext
from moe_finetune.losses.functional import variance_loss
from tests.losses import reference
from tests.losses.cases import make, mask, record


def test_worked_by_hand():
    # Means (1/2, 1/4, 1/4). Token 0: (1/4 + 1/16 + 1/16)/3; token 1 the same.
    scores = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert variance_loss(scores).item() == pytest.approx(-0.125)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_term_reads_scores_after_topk(score):
    values, keep = make(), mask(17)
    probs = values["logits_TE"].softmax(-1) if score == "softmax" else values["logits_TE"].sigmoid()
    scores = torch.zeros_like(probs)
    for t, selected in enumerate(values["index_TK"].tolist()):
        for e in selected:
            scores[t, e] = probs[t, e] / probs[t, selected].sum()
    kind = TERMS["variance"]
    got = kind(kind.Options(weight=1.0)).loss(record(values, score, keep), LayerContext())
    torch.testing.assert_close(got, reference.variance(scores, keep))
