"""Routing and balance in NumPy FP64, one token at a time, written from the definitions and not from moejax's code.

Also central finite differences and the relative norm that tests compare with.
"""

import numpy as np


def score(logits_E, score_fn):
    x = np.asarray(logits_E, np.float64)
    if score_fn == "softmax":
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if score_fn == "sigmoid":
        return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))
    if score_fn == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0.0, x))
    assert score_fn == "identity"
    return x


def choose(logits_E, bias_E, router):
    """The K experts of one token, best first, by comparing (score, lower index) pairs; no masks, no infinities."""
    select = score(logits_E, router.score_fn) if router.score_before_topk else np.asarray(logits_E, np.float64)
    select = select + (0 if bias_E is None else np.asarray(bias_E, np.float64))
    allowed = list(range(len(select)))
    if router.n_group > 1:
        size = len(select) // router.n_group
        groups = [allowed[g * size : (g + 1) * size] for g in range(router.n_group)]
        rank = [sum(sorted((select[e] for e in group), reverse=True)[: router.group_top]) for group in groups]
        kept = sorted(range(router.n_group), key=lambda g: (-rank[g], g))[: router.topk_group]
        allowed = [e for g in kept for e in groups[g]]
    return sorted(allowed, key=lambda e: (-select[e], e))[: router.top_k]


def combine_weights(logits_E, experts, router):
    if router.score_before_topk:
        weights = score(logits_E, router.score_fn)[experts]
    else:
        weights = score(np.asarray(logits_E)[experts], "softmax")
    return router.route_scale * (weights / weights.sum() if router.norm_topk else weights)


def probability(logits_E, router):
    if router.score_fn == "identity" or not router.score_before_topk:
        return score(logits_E, "softmax")
    scores = score(logits_E, router.score_fn)
    return scores / scores.sum()


def route(logits_BxLxE, bias_E, router, mask_BxL=None):
    batch, length, _ = logits_BxLxE.shape
    expert = np.full((batch, length, router.top_k), -1)
    weight = np.zeros((batch, length, router.top_k))
    for b, t in np.ndindex(batch, length):
        if mask_BxL is None or mask_BxL[b, t]:
            expert[b, t] = choose(logits_BxLxE[b, t], bias_E, router)
            weight[b, t] = combine_weights(logits_BxLxE[b, t], expert[b, t], router)
    return weight, expert


def balance(logits_TxE, expert_TxK, router, frequency_E=None):
    """sum_e f_e P_e over these tokens."""
    tokens, experts = logits_TxE.shape
    if frequency_E is None:
        frequency_E = [experts * np.sum(expert_TxK == e) / (router.top_k * tokens) for e in range(experts)]
    mean = np.mean([probability(row, router) for row in logits_TxE], axis=0)
    return float(np.dot(frequency_E, mean))


def z_loss(logits_TxE):
    return float(np.mean([np.logaddexp.reduce(np.asarray(row, np.float64)) ** 2 for row in logits_TxE]))


def gradient(function, x, step=1e-4):
    """Central differences of a scalar function in FP64, fourth order: the error is far below 1e-8 of the value."""
    x = np.asarray(x, np.float64)
    result = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        values = []
        for k in (-2, -1, 1, 2):
            moved = x.copy()
            moved[index] += k * step
            values.append(function(moved))
        result[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    return result


def relative_norm(actual, expected):
    """|actual - expected| / |expected| in the Euclidean norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300)
