"""Compositions of primitives that torch has as one operation."""

from __future__ import annotations

from forecast_harness.authors.torch.matching import RewriteRule

_F = "torch.nn.functional"
_RMS_PATTERN = "torch.rsqrt(_x.square().mean(-1, keepdim=True) + _k)"
_CENTRED_PATTERN = "(_x - _x.mean(-1, keepdim=True))"
_NOTES = {
    "softmax": "one operation for a softmax",
    "norm": "one operation for a normalisation",
    "activation": "one operation for an activation",
    "product": "one operation for a product and what surrounds it",
    "search": "one operation for a search",
    "lookup": "one operation for a lookup",
}


def _fusion_rules(name: str, instead: str, *patterns: str) -> list[RewriteRule]:
    return [RewriteRule(f"fused-{name}", pattern, instead, _NOTES[name]) for pattern in patterns]


def _softmax_pattern(e: str) -> str:
    return f"{e} / {e}.sum(_d, keepdim=True)"


def _layer_norm_patterns(scaled: str) -> list[str]:
    """Ways to write a layer norm; `scaled` says what is done with {}."""
    variances = [
        "_x.var(-1, unbiased=False, keepdim=True)",
        "_x.var(-1, keepdim=True, correction=0)",
        f"{_CENTRED_PATTERN}.square().mean(-1, keepdim=True)",
    ]
    found = []
    for variance in variances:
        found.append(scaled.format(f"({_CENTRED_PATTERN} * torch.rsqrt({variance} + _k))"))
        found.append(scaled.format(f"({_CENTRED_PATTERN} / torch.sqrt({variance} + _k))"))
    return found


_SCORE_PATTERNS = ("_q @ _m.transpose(-2, -1)", "_q @ _m.transpose(-1, -2)", "_q @ _m.mT")

RULES = (
    *_fusion_rules(
        "softmax",
        "torch.softmax(_x, _d)",
        _softmax_pattern("torch.exp(_x - _x.amax(_d, keepdim=True))"),
        _softmax_pattern("torch.exp(_x - _x.max(_d, keepdim=True).values)"),
        _softmax_pattern("torch.exp(_x - _x.max(_d, keepdim=True)[0])"),
        _softmax_pattern("torch.exp(_x)"),
    ),
    *_fusion_rules(
        "softmax",
        "torch.log_softmax(_x, _d)",
        "_x - _x.logsumexp(_d, keepdim=True)",
        "torch.log(torch.softmax(_x, _d))",
        "_x - torch.log(torch.exp(_x).sum(_d, keepdim=True))",
    ),
    *_fusion_rules("softmax", "torch.logsumexp(_x, _d)", "torch.log(torch.exp(_x).sum(_d))"),
    *_fusion_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), _w, _k)",
        f"_x * {_RMS_PATTERN} * _w",
        f"_w * (_x * {_RMS_PATTERN})",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k) * _w",
    ),
    *_fusion_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), None, _k)",
        f"_x * {_RMS_PATTERN}",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k)",
    ),
    *_fusion_rules(
        "norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), _w, _b, _k)", *_layer_norm_patterns("{} * _w + _b")
    ),
    *_fusion_rules(
        "norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), None, None, _k)", *_layer_norm_patterns("{}")
    ),
    *_fusion_rules("activation", f"{_F}.silu(_x)", "_x * torch.sigmoid(_x)", "_x / (1 + torch.exp(-_x))"),
    *_fusion_rules(
        "activation", "torch.sigmoid(_x)", "1 / (1 + torch.exp(-_x))", "torch.reciprocal(1 + torch.exp(-_x))"
    ),
    *_fusion_rules(
        "activation", "torch.relu(_x)", "_x.clamp(min=0)", "torch.maximum(_x, torch.zeros_like(_x))"
    ),
    *_fusion_rules("activation", f"{_F}.gelu(_x)", "_x * 0.5 * (1 + torch.erf(_x / 1.4142135623730951))"),
    *_fusion_rules(
        "activation", f"{_F}.softplus(_x)", "torch.log(1 + torch.exp(_x))", "torch.log1p(torch.exp(_x))"
    ),
    *_fusion_rules("product", f"{_F}.linear(_x, _w, _b)", "_x @ _w.T + _b", "_x @ _w.t() + _b"),
    *_fusion_rules("product", f"{_F}.linear(_x, _w)", "_x @ _w.T", "_x @ _w.t()"),
    *_fusion_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=_s)",
        *(f"torch.softmax(({s}) * _s, -1) @ _v" for s in _SCORE_PATTERNS),
    ),
    *_fusion_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=1.0 / _s)",
        *(f"torch.softmax(({s}) / _s, -1) @ _v" for s in _SCORE_PATTERNS),
    ),
    *_fusion_rules("product", "torch.addmm(_c, _a, _b)", "_c + _a @ _b"),
    *_fusion_rules("product", "torch.baddbmm(_c, _a, _b)", "_c + _a @ _b"),
    *_fusion_rules("product", "torch.addmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_fusion_rules("product", "torch.baddbmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_fusion_rules(
        "search",
        "_x.argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
        "torch.where(_x == _x.max(-1, keepdim=True).values, _p, _n).amin(-1)",
        "_x.max(-1).indices",
        "_x.max(-1)[1]",
    ),
    *_fusion_rules("search", "_x.max(-1).indices", "_x.argmax(-1)"),
    *_fusion_rules(
        "search",
        "_x.max(-1).indices",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_fusion_rules(
        "search",
        "(_x == _x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_fusion_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='sum')", "_t[_i].sum(1)", "_t[_i].sum(-2)"),
    *_fusion_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='mean')", "_t[_i].mean(1)"),
    *_fusion_rules("lookup", f"{_F}.embedding(_i, _t).sum(1)", "_t[_i].sum(1)"),
    *_fusion_rules(
        "lookup", "_t.index_select(0, _i.reshape(-1)).reshape(*_i.shape, -1).sum(1)", "_t[_i].sum(1)"
    ),
)
