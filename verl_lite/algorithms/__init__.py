"""The algorithms as pure functions on tensors, and the only registries: name -> "package.module:function".

This module imports no torch, so that the plan and the config know every name too. One's own function is named by
"package.module:function" or "path/file.py:function" in the same key; `verl_lite.plugins.resolve` finds both.
"""

from typing import Any

_ADVANTAGES = "verl_lite.algorithms.advantages"
_POLICY = "verl_lite.algorithms.policy_losses"
_KL = "verl_lite.algorithms.kl"
_AGGREGATE = "verl_lite.algorithms.aggregate"

#: `algorithm.adv_estimator`: fn(AdvantageInputs, *, options) -> Advantages
ADVANTAGE_ESTIMATORS: dict[str, str] = {
    "gae": f"{_ADVANTAGES}:gae",
    "grpo": f"{_ADVANTAGES}:grpo",
    "grpo_vectorized": f"{_ADVANTAGES}:grpo",
    "grpo_passk": f"{_ADVANTAGES}:grpo_passk",
    "rloo": f"{_ADVANTAGES}:rloo",
    "rloo_vectorized": f"{_ADVANTAGES}:rloo",
    "reinforce_plus_plus": f"{_ADVANTAGES}:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
    "remax": f"{_ADVANTAGES}:remax",
    "opo": f"{_ADVANTAGES}:opo",
    "gpg": f"{_ADVANTAGES}:gpg",
}

#: The keys of `algorithm` that they take; a test compares them with the functions' arguments.
ESTIMATOR_OPTIONS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",),
    **dict.fromkeys(("grpo", "grpo_vectorized", "grpo_passk"), ("norm_adv_by_std_in_grpo",)),
}  # fmt: skip

#: `actor.policy_loss.loss_mode`: fn(PolicyLossInputs, *, options) -> PolicyLossOutputs
POLICY_LOSSES: dict[str, str] = {
    name: f"{_POLICY}:{name}" for name in ("vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "sapo")
}

#: Their options, `actor.policy_loss.<option>`, with bounds as the config's keys have them (and the default where one
#: bounds another); a test compares them with the functions' arguments.
POLICY_LOSS_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "clip_cov": {"clip_cov_ratio": {"gt": 0, "le": 1}, "clip_cov_lb": {"default": 1}, "clip_cov_ub": {"default": 5}},
    "kl_cov": {"ppo_kl_coef": {"ge": 0}, "kl_cov_ratio": {"gt": 0, "le": 1}},
    "sapo": {"tau_pos": {"gt": 0}, "tau_neg": {"gt": 0}},
}

#: Those that take `actor.clip_ratio_low` and `clip_ratio_high`; vanilla takes `clip_ratio_c` too.
LOSSES_WITH_CLIP = frozenset({"vanilla", "gspo", "clip_cov", "geo_mean", "cispo"})

#: the critic's loss: fn(ValueLossInputs, *, options) -> ValueLossOutputs
VALUE_LOSSES: dict[str, str] = {"clipped": "verl_lite.algorithms.value_losses:clipped"}

#: `actor.kl_loss_type` and `algorithm.kl_penalty`: fn(log_probs, ref_log_probs) -> [B, T].
#: A trailing "+" keeps the value and takes k2's gradient.
KL_ESTIMATORS: dict[str, str] = {
    name + plus: f"{_KL}:{function}{'_plus' if plus else ''}"
    for name, function in {
        "kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    }.items()
    for plus in ("", "+")
}  # fmt: skip

#: `actor.loss_agg_mode`, `critic.loss_agg_mode`: fn(losses, mask, totals, scale_factor) -> scalar
LOSS_AGGREGATIONS: dict[str, str] = {
    "token-mean": f"{_AGGREGATE}:token_mean",
    "seq-mean-token-sum": f"{_AGGREGATE}:seq_mean_token_sum",
    "seq-mean-token-mean": f"{_AGGREGATE}:seq_mean_token_mean",
    "seq-mean-token-sum-norm": f"{_AGGREGATE}:seq_mean_token_sum_norm",
}

#: Estimators that read values: a critic is trained exactly for these (one's own estimator: set critic.enable=True).
ESTIMATORS_WITH_CRITIC = frozenset({"gae"})
#: Estimators that need one greedy response per prompt, scored, as their baseline.
ESTIMATORS_WITH_GREEDY_BASELINE = frozenset({"remax"})
#: Estimators that compare the responses to one prompt: with rollout.n=1 there is nothing to compare, and every response
#: keeps its bare score (no baseline). The plan says so.
ESTIMATORS_WITH_GROUPS = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg"}
)
#: Losses whose paper averages over sequences: with another loss_agg_mode long responses weigh more (the plan says so).
LOSSES_PER_SEQUENCE: dict[str, str] = {
    "gspo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean", "sapo": "seq-mean-token-mean",
}  # fmt: skip
