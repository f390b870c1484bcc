"""Names and meanings of logged values and metrics."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Word:
    """A metric's display name, meaning, and good direction for specialized, balanced experts.

    ``good`` is +1 (higher is better), -1 (lower is better) or 0 (neither by itself).
    """

    name: str
    meaning: str = ""
    good: int = 0


WORDS: dict[str, Word] = {
    "loss": Word("Training loss", "nats per token", -1),
    "eval_loss": Word("Validation loss", "nats per token", -1),
    "reward": Word("Reward", "mean over completions", 1),
    "rewards/accuracies": Word(
        "Preferred pairs in the last training batch",
        "share of the batch's pairs whose chosen answer is preferred",
        1,
    ),
    "rewards/margins": Word("Reward margin", "chosen minus rejected answer", 1),
    "eval_reward": Word("Validation reward", "mean over completions", 1),
    "eval_rewards/accuracies": Word(
        "Validation preference accuracy", "share of pairs whose chosen answer is preferred", 1
    ),
    "eval_rewards/margins": Word("Validation reward margin", "chosen minus rejected answer", 1),
    "rewards/chosen": Word("Reward of chosen answers", "DPO's implicit one, mean"),
    "rewards/rejected": Word("Reward of rejected answers", "DPO's implicit one, mean"),
    "logps/chosen": Word("Log-probability of chosen answers", "nats, sum over an answer's tokens"),
    "logps/rejected": Word("Log-probability of rejected answers", "nats, sum over tokens"),
    "logits/chosen": Word("Logits of chosen answers", "mean"),
    "logits/rejected": Word("Logits of rejected answers", "mean"),
    "reward_std": Word("Spread of the rewards", "standard deviation in a prompt's completions"),
    "frac_reward_zero_std": Word(
        "Prompts without a difference",
        "share of prompts whose completions have equal rewards; they train nothing",
        -1,
    ),
    "kl": Word("KL divergence from the reference", "nats, estimated on the completions' tokens"),
    **{
        f"completions/{key}": Word(f"Completions, {key.replace('_', ' ')}", meaning)
        for key, meaning in (
            ("mean_length", "tokens"),
            ("min_length", "tokens"),
            ("max_length", "tokens"),
            ("clipped_ratio", "share that reached max_completion_length"),
            ("mean_terminated_length", "tokens of those that ended by themselves"),
            ("min_terminated_length", "tokens of those that ended by themselves"),
            ("max_terminated_length", "tokens of those that ended by themselves"),
        )
    },
    **{
        f"clip_ratio/{key}": Word(f"Clipped ratios, {key.replace('_', ' ')}", "share of tokens")
        for key in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    },
    **{
        f"sampling/sampling_logp_difference/{key}": Word(
            f"Sampler's log-probabilities off by, {key}", "nats a token, vLLM against the trainer"
        )
        for key in ("mean", "max")
    },
    **{
        f"sampling/importance_sampling_ratio/{key}": Word(
            f"Importance ratio, {key}", "of the trainer's probabilities to those of vLLM"
        )
        for key in ("min", "mean", "max")
    },
    "kind": Word("Kind", "what a row of the log is: train, eval, or end"),
    "step": Word("Step", "optimizer steps so far"),
    "epoch": Word("Epoch", "passes over the training rows so far"),
    "step_time": Word("Step time", "seconds a step"),
    "learning_rate": Word("Learning rate", "of the step"),
    "grad_norm": Word("Gradient norm", "of all trained parameters, before it is clipped"),
    "tokens_per_second": Word("Tokens per second", "of this process, since the last log", 1),
    "train_loss": Word("Mean training loss", "over all steps, in nats per token", -1),
    "train_runtime": Word("Time of training", "seconds"),
    "eval_runtime": Word("Time of an evaluation", "seconds"),
    **{
        f"{phase}_{what}_per_second": Word(f"{what.title()} per second, {title}", "a speed")
        for phase, title in (("train", "training"), ("eval", "evaluation"))
        for what in ("samples", "steps")
    },
    "total_flos": Word("Floating-point operations", "of training, estimated by transformers"),
    **{
        f"strength/{key}": Word(name, meaning)
        for key, name, meaning in (
            ("weight", "Weight", "that multiplies the loss"),
            ("share_router", "Share on routers", "of the trainer's loss's gradient norm"),
            ("share_experts", "Share on experts", "of the trainer's loss's gradient norm"),
            ("cosine_router", "Cosine on routers", "with the trainer's loss's gradient; 1: alike"),
            ("cosine_experts", "Cosine on experts", "with the trainer's loss's gradient"),
            ("weight_for_10_percent", "Weight for 10 %", "with which the share would be a tenth"),
        )
    },
    "max_violation": Word(
        "MaxVio",
        "how far the busiest of the experts that ran is above an even share; 0 is even",
        -1,
    ),
    "load_entropy": Word("Load entropy", "nats; log(experts) when all are used evenly", 1),
    "routing/entropy": Word("Routing entropy", "in nats; low when the router is confident", 0),
    "routing/entropy_share": Word(
        "Routing entropy, share", "of log(experts); 1 when every expert is equally likely", 0
    ),
    "routing/max_violation_worst_layer": Word(
        "MaxVio of the worst layer", "of the experts that ran; 0 is even", -1
    ),
    **{
        f"routing/changed_from_{key}": Word(
            f"Experts changed since the {whose}",
            "share of tokens and layers whose router would select others than those replayed",
        )
        for key, whose in (("old_policy", "old policy"), ("rollout", "rollout"))
    },
    "rollout/missing_experts": Word(
        "Tokens without the rollout's experts", "share of the rows' tokens"
    ),
    **{
        f"{head}/{name}": Word(f"{title} {whose}", meaning)
        for head, whose in (
            ("old_policy", "from the old policy"),
            ("rollout", "from vLLM's sampler"),
        )
        for name, title, meaning in (
            ("log_prob_difference", "Log-probabilities' distance", "nats, mean over tokens"),
            ("kl", "KL divergence", "nats, estimated on the completions' tokens"),
            ("ratio_beyond_2", "Ratios outside 1/2 to 2", "share of tokens"),
        )
    },
    "routing/changed_in_recomputation": Word(
        "Choices pinned in recomputation",
        "share of tokens for which a recomputed layer would have selected other experts",
    ),
    "routing/dead_experts": Word(
        "Dead experts a layer", "number of experts that no token chose, mean over layers", -1
    ),
    "entropy": Word("Token entropy", "nats, of the model's next-token predictions"),
    "eval_entropy": Word(
        "Token entropy, validation", "nats, of the model's next-token predictions"
    ),
    "mean_token_accuracy": Word("Token accuracy", "share of next tokens predicted correctly", 1),
    "num_tokens": Word("Tokens seen", "since the start", 1),
    "score_entropy": Word(
        "Score entropy",
        "how uncertain the router is about a single token: the mean entropy of its top-k scores in "
        "nats, 0 if one expert gets the whole weight",
        -1,
    ),
    "expert_entropy": Word(
        "Expert entropy",
        "how evenly the experts are used over all tokens: the entropy of their mean scores in "
        "nats, log(experts) when all get the same",
        1,
    ),
    "collision_entropy": Word(
        "Collision entropy",
        "how rarely two random tokens use the same expert: −log of the chance that they do, in "
        "nats, at most the expert entropy",
        1,
    ),
    "score_variance": Word(
        "Score variance", "how much scores vary between tokens; 0 if all are routed alike", 1
    ),
    "routing_variance": Word(
        "Routing variance", "variance of the mean probabilities; 0 is even", -1
    ),
    "expert_overlap": Word(
        "Expert overlap", "share of near neighbors that go to another expert", -1
    ),
    "silhouette": Word("Silhouette", "how well the experts separate the tokens, −1 to 1", 1),
    "activation_cosine": Word(
        "Activation cosine", "mean squared cosine of a token's experts; 0 is orthogonal", -1
    ),
    "output_cosine": Word(
        "Output cosine", "mean squared cosine of a token's expert outputs; 0 is orthogonal", -1
    ),
    "coupling_mass": Word(
        "Coupling mass", "how surely two adjacent layers select their experts", 1
    ),
    "router_cosine": Word("Router cosine", "mean |cos| of the router's rows; 0 is orthogonal", -1),
    "effective_rank": Word("Effective rank", "independent directions among the experts", 1),
    "mutual_coherence": Word("Mutual coherence", "largest |cos| among a token's experts", -1),
    "mutual_information": Word(
        "Mutual information", "nats that the expert reveals about the token", 1
    ),
    "domain_information": Word(
        "Domain information", "nats that the expert reveals about the text's domain", 1
    ),
    "erc_loss": Word("ERC loss at alpha 1", "0 when experts answer to their own router row", -1),
    **{
        f"erc_loss_alpha_{alpha}": Word(
            f"ERC loss at alpha {alpha}", f"at alpha 1, own row x {alpha}", -1
        )
        for alpha in (2, 3, 4, 5)
    },
    "erc_least_alpha": Word(
        "ERC least alpha", "the smallest alpha without an ERC loss; the goal is 1 or less", -1
    ),
    "router_norm_mean": Word("Router row norm", "mean over experts", 0),
    "router_norm_std": Word("Router row norm, spread", "standard deviation over experts", 0),
    "gate_norm_mean": Word("Gate norm", "Frobenius, mean over experts", 0),
    "gate_norm_std": Word("Gate norm, spread", "standard deviation over experts", 0),
    "peak_memory_gib": Word("Peak memory", "GiB of the first rank's device", -1),
    "noise_level": Word("ERC noise level", "how far the router's rows lie apart", 1),
    "below_barrier": Word(
        "Below the coherence barrier",
        "share of tokens whose experts are certainly distinguishable",
        1,
    ),
    "cmr_1": Word("CMR_1", "frequency rank of the router's first expert; 1 is the best", -1),
    "cmr_2": Word("CMR_2", "frequency rank of the router's second expert; 2 is the best", -1),
    "s_rl": Word("S_RL", "entropy of the router over all experts, nats; low when it is sure", -1),
    "conditional_mean_rank": Word("Conditional mean rank", "1 is the best", -1),
}


def word(key: str) -> Word:
    """Return the words for a key such as ``losses/load_balance`` or ``routing/max_violation``."""
    head, _, tail = key.rpartition("/")
    name = tail or key
    # One name, entropy, can belong to the router or to the model's predictions.
    router_key = f"routing/{name}" if head.endswith("routing") else key
    if key.startswith("strength/"):
        router_key = f"strength/{name}"
    listed = WORDS.get(router_key) or WORDS.get(key.removeprefix("eval_")) or WORDS.get(name)
    plain = name.replace("_", " ").strip()
    plain = plain[:1].upper() + plain[1:]
    if head.endswith("losses") or head == "losses":
        return Word(f"{plain} term", "unweighted, summed over layers", 0)
    if head == "scores":
        return Word(name, "score of the model as it was after the step", 1)
    if not listed and head.removeprefix("eval_").startswith("rewards/"):
        shown = {"mean": "mean", "std": "standard deviation"}.get(name, name)
        return Word(f"Reward {head.partition('/')[2]}, {name}", f"{shown} over completions")
    chosen = listed or Word(plain)
    return replace(chosen, name=f"{chosen.name}, validation") if head == "eval_routing" else chosen
