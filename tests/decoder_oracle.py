"""The whole decoder in FP64 NumPy, one token and one expert at a time. Shares no code with the model."""

import numpy as np


def hidden_states(params, config, token, segment, position, select_bias=None):
    """Final hidden states (B, L, D), from a nested dict of arrays named as in the model, layers stacked in front."""
    p = _as_fp64(params)
    model = config.model
    x = p["embedding"]["table"][token]
    for layer in range(model.dense_layers):
        block = _layer(p["dense_layers"], layer)
        x = x + _attention(block["attention"], model, _norm(x, block["attention_norm"], model), segment, position)
        x = x + _mlp(_norm(x, block["mlp_norm"], model), block["mlp"])
    for layer in range(model.num_layers - model.dense_layers):
        block = _layer(p["moe_layers"], layer)
        x = x + _attention(block["attention"], model, _norm(x, block["attention_norm"], model), segment, position)
        bias = 0.0 if select_bias is None else np.asarray(select_bias, np.float64)[layer]
        x = x + _moe(_norm(x, block["mlp_norm"], model), block["moe"], config.moe.router, bias, segment)
    return _norm(x, p["norm"], model)


def mean_nll(params, config, token, segment, position, target, select_bias=None):
    """Mean negative log-likelihood in nats over targets that are not -1."""
    hidden = hidden_states(params, config, token, segment, position, select_bias)
    logits = hidden @ np.asarray(params["head"]["w_OxI"], np.float64).T
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, np.maximum(target, 0)[..., None], -1)[..., 0]
    return nll[target >= 0].mean()


def _as_fp64(tree):
    return {k: _as_fp64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def _layer(tree, index):
    return {k: _layer(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}


def _norm(x, p, model):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * p["scale"]


def _silu(x):
    return x / (1 + np.exp(-x))


def _mlp(x, p):
    gate, up = p["w_gate_up"]
    return (_silu(x @ gate.T) * (x @ up.T)) @ p["w_down"].T


def _attention(p, model, x, segment, position):
    batch, length, _ = x.shape
    width, group = model.head_dim, model.num_heads // model.num_kv_heads
    half = int(width * model.rope_fraction) // 2
    out = np.zeros((batch, length, model.num_heads * width))
    for b in range(batch):
        q, k, v = (x[b] @ p[f"w_{name}"].T for name in "qkv")
        for head in range(model.num_heads):
            qh = q[:, head * width : (head + 1) * width]
            kv = slice(head // group * width, (head // group + 1) * width)
            kh, vh = k[:, kv], v[:, kv]
            if model.qk_norm == "head":
                qh, kh = _norm(qh, p["q_norm"], model), _norm(kh, p["k_norm"], model)
            qh, kh = (_rotate(z, position[b], half, model.rope_theta) for z in (qh, kh))
            for i in range(length):
                seen = [j for j in range(i + 1) if segment[b, j] == segment[b, i]]
                score = np.exp(kh[seen] @ qh[i] / np.sqrt(width))
                out[b, i, head * width : (head + 1) * width] = score @ vh[seen] / score.sum()
    return out @ p["w_o"].T


def _rotate(x, position, half, theta):
    out = x.copy()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[:, i] = x[:, i] * np.cos(angle) - x[:, half + i] * np.sin(angle)
        out[:, half + i] = x[:, half + i] * np.cos(angle) + x[:, i] * np.sin(angle)
    return out


def _moe(x, p, router, bias, segment):
    """Softmax or sigmoid scores, bias for the choice only, normalised weights; a gated shared expert. Padding is not routed."""
    y = np.zeros_like(x)
    for b, i in np.ndindex(x.shape[:2]):
        token = x[b, i]
        shared_gate = 1 / (1 + np.exp(-(p["w_shared_gate"][0] @ token)))
        y[b, i] = shared_gate * _mlp(token, p["shared"])
        if segment[b, i] == 0:
            continue
        logits = p["w_router"] @ token
        score = 1 / (1 + np.exp(-logits)) if router.score_fn == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-(score + bias), kind="stable")[: router.top_k]
        weight = router.route_scale * score[chosen] / score[chosen].sum()
        for w, e in zip(weight, chosen, strict=True):
            expert = {"w_gate_up": p["experts"]["w_gate_up"][e], "w_down": p["experts"]["w_down"][e]}
            y[b, i] += w * _mlp(token, expert)
    return y
