"""Every loss in every form, with random inputs, for the tests that all losses share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_finetune.losses import functional
from moe_finetune.losses.record import RoutingRecord
from tests.losses import reference

# T, E, K, H, D, V: no two equal but where E = K is the point.
SIZES = {
    "odd": (17, 7, 3, 5, 6, 13),
    "one_choice": (9, 6, 1, 5, 4, 11),
    "all_experts": (8, 4, 4, 5, 3, 9),
    "one_token": (1, 5, 2, 3, 4, 7),
}


@dataclass(frozen=True)
class Case:
    """A loss: its function, its slow loop, the inputs it takes and those it sends gradients to."""

    name: str
    call: Callable
    slow: Callable
    inputs: tuple[str, ...]
    grads: tuple[str, ...]
    masked: bool = True
    sequences: bool = False
    pairs: bool = False
    options: dict = field(default_factory=dict)

    def run(self, values, **extra):
        return self.call(**{k: values[k] for k in self.inputs}, **self.options, **extra)

    def reference(self, values, **extra):
        return self.slow(**{k: values[k] for k in self.inputs}, **self.options, **extra)


def make(size="odd", seed=0, dtype=torch.float64):
    """One tensor of every kind. Probabilities have distinct entries, so that no ties arise."""
    tokens, experts, chosen, hidden, width, vocabulary = (
        SIZES[size] if isinstance(size, str) else size
    )
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logits, upper = 1.5 * normal(tokens, experts), 1.5 * normal(tokens, experts)
    probs = logits.softmax(-1)
    index = probs.topk(chosen).indices
    # The order of a selection means nothing, so it is not the order of probability here.
    index = index.gather(-1, torch.rand(tokens, chosen, generator=g).argsort(-1))
    picked = probs.gather(-1, index)
    scores = picked / picked.sum(-1, keepdim=True)
    cut = sorted(torch.randint(0, tokens + 1, (3,), generator=g).tolist())
    lengths = torch.tensor([cut[0], cut[1] - cut[0], 0, cut[2] - cut[1], tokens - cut[2]])
    shared = normal(tokens, 1, hidden)
    values = {
        "probs_TE": probs,
        "logits_TE": logits,
        "index_TK": index,
        "scores_TK": scores,
        "scores_TE": torch.zeros_like(probs).scatter(-1, index, scores),
        "next_probs_TE": upper.softmax(-1),
        "outputs_TKH": shared + normal(tokens, chosen, hidden),
        "activations_TKD": normal(tokens, chosen, width),
        "router_weight_EH": normal(experts, hidden),
        "gate_weight_EDH": normal(experts, width, hidden),
        "token_ids_T": torch.randint(0, vocabulary, (tokens,), generator=g),
        "token_frequencies_VE": normal(vocabulary, experts).softmax(-1),
        "sequence_lengths": lengths,
        "top_k": chosen,
    }
    return {
        k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in values.items()
    }


def mask(tokens, seed=3):
    """About a third of the tokens do not count; never all or none of several."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, generator=g) > 0.35
    chosen[0] = True
    if tokens > 1:
        chosen[-1] = False
    return chosen


def _balance(variant, probabilities, sequences):
    inputs = ("probs_TE", "index_TK") + (("sequence_lengths",) if sequences else ())
    options = {"variant": variant, "probabilities": probabilities}
    scope = "sequence" if sequences else "micro_batch"
    return Case(
        f"load_balance-{variant}-{probabilities}-{scope}",
        functional.load_balancing_loss,
        reference.load_balance,
        inputs,
        ("probs_TE",),
        sequences=sequences,
        options=options,
    )


def _orthogonality(form, scores=True, **options):
    inputs = ("outputs_TKH", "scores_TK") if scores else ("outputs_TKH",)
    return Case(
        f"orthogonality-{form}-{options or scores}",
        functional.orthogonality_loss,
        reference.orthogonality,
        inputs,
        ("outputs_TKH",),
        pairs=True,
        options={"form": form, **options},
    )


def _slow_erc(router_weight_EH, gate_weight_EDH, alpha, noise):
    return reference.erc_from_table(reference.erc_table(router_weight_EH, gate_weight_EDH), alpha)


CASES = [
    *(
        _balance(variant, probabilities, sequences)
        for variant in ("switch", "deepseek", "gshard")
        for probabilities in ("all", "topk")
        for sequences in (False, True)
    ),
    Case("z_loss", functional.router_z_loss, reference.z_loss, ("logits_TE",), ("logits_TE",)),
    _orthogonality("projection"),
    _orthogonality("projection", scores=False),
    _orthogonality("projection", eps=0.3),
    _orthogonality("projection", tau_gate=0.3),
    _orthogonality("cosine"),
    _orthogonality("cosine", tau_gate=0.25),
    Case("variance", functional.variance_loss, reference.variance, ("scores_TE",), ("scores_TE",)),
    Case(
        "softmax_variance",
        functional.softmax_variance_loss,
        reference.softmax_variance,
        ("logits_TE",),
        ("logits_TE",),
    ),
    Case(
        "span_orthogonality",
        functional.span_orthogonality_loss,
        reference.span_orthogonality,
        ("outputs_TKH",),
        ("outputs_TKH",),
        pairs=True,
        options={"eps": 1e-12},  # at 1e-6 the order of a selection shows in the seventh digit
    ),
    Case(
        "specialization",
        functional.specialization_loss,
        reference.specialization,
        ("activations_TKD",),
        ("activations_TKD",),
        pairs=True,
    ),
    Case(
        "coupling",
        functional.coupling_loss,
        reference.coupling,
        ("probs_TE", "index_TK", "next_probs_TE", "top_k"),
        ("probs_TE", "next_probs_TE"),
    ),
    *(
        Case(
            f"erc-{alpha}",
            functional.erc_loss,
            _slow_erc,
            ("router_weight_EH", "gate_weight_EDH"),
            ("router_weight_EH", "gate_weight_EDH"),
            masked=False,
            options={"alpha": alpha, "noise": False},
        )
        for alpha in (1.0, 0.6)
    ),
    Case(
        "router_orthogonality",
        functional.router_orthogonality_loss,
        reference.router_orthogonality,
        ("router_weight_EH",),
        ("router_weight_EH",),
        masked=False,
    ),
    Case("dpp", functional.dpp_loss, reference.dpp, ("outputs_TKH",), ("outputs_TKH",)),
    Case("ncl", functional.ncl_loss, reference.ncl, ("outputs_TKH",), ("outputs_TKH",), pairs=True),
    Case(
        "ncl-raw",
        functional.ncl_loss,
        reference.ncl,
        ("outputs_TKH",),
        ("outputs_TKH",),
        pairs=True,
        options={"normalize": False},
    ),
    Case(
        "supervised_routing",
        functional.supervised_routing_loss,
        reference.supervised_routing,
        ("logits_TE", "token_ids_T", "token_frequencies_VE"),
        ("logits_TE",),
    ),
]


def letters(name):
    """Axes that a name's suffix declares; none for the rest."""
    return "" if name in ("sequence_lengths", "top_k") else name.rsplit("_", 1)[1]


def map_axis(values, letter, change: Callable):
    """Apply ``change(tensor, axis)`` along every axis called ``letter``."""
    changed = dict(values)
    for name in values:
        for axis, got in enumerate(letters(name)):
            if got == letter:
                changed[name] = change(changed[name], axis)
    return changed


def relabel(values, order_E):
    """Give the experts new numbers: new expert i is old expert ``order_E[i]``."""
    changed = map_axis(values, "E", lambda x, axis: x.index_select(axis, order_E))
    changed["index_TK"] = order_E.argsort()[values["index_TK"]]
    return changed


def record(values, score="softmax", mask_T=None, layer=2, **extra) -> RoutingRecord:
    """A record as a layer would hand over, with inner products and vectors."""
    outputs, activations = values["outputs_TKH"], values["activations_TKD"]
    tokens = len(values["logits_TE"])
    return RoutingRecord(
        layer=layer,
        inputs_TH=torch.zeros(tokens, outputs.shape[-1]),
        logits_TE=values["logits_TE"],
        index_TK=values["index_TK"],
        weights_TK=values["scores_TK"],
        mask_T=torch.ones(tokens, dtype=torch.bool) if mask_T is None else mask_T,
        score=score,
        router_weight_EH=values["router_weight_EH"],
        token_ids_T=values["token_ids_T"],
        sequence_lengths=values["sequence_lengths"],
        activations_TKD=activations,
        outputs_TKH=outputs,
        activations_gram_TKK=activations @ activations.mT,
        outputs_gram_TKK=outputs @ outputs.mT,
        **extra,
    )
