"""Compositions of primitives that torch has as one operation."""

from __future__ import annotations

from forecast_harness.rewrites.torch.matching import Rule

_F = "torch.nn.functional"
_RMS = "torch.rsqrt(_x.square().mean(-1, keepdim=True) + _k)"
_CENTRED = "(_x - _x.mean(-1, keepdim=True))"
_SAID = {
    "softmax": "one operation for a softmax",
    "norm": "one operation for a normalisation",
    "activation": "one operation for an activation",
    "product": "one operation for a product and what surrounds it",
    "search": "one operation for a search",
    "lookup": "one operation for a lookup",
}


def _rules(name: str, instead: str, *patterns: str) -> list[Rule]:
    return [Rule(f"fused-{name}", pattern, instead, _SAID[name]) for pattern in patterns]


def _exponentials(e: str) -> str:
    return f"{e} / {e}.sum(_d, keepdim=True)"


def _layer_norms(scaled: str) -> list[str]:
    """Ways to write a layer norm; `scaled` says what is done with {}."""
    variances = [
        "_x.var(-1, unbiased=False, keepdim=True)",
        "_x.var(-1, keepdim=True, correction=0)",
        f"{_CENTRED}.square().mean(-1, keepdim=True)",
    ]
    found = []
    for variance in variances:
        found.append(scaled.format(f"({_CENTRED} * torch.rsqrt({variance} + _k))"))
        found.append(scaled.format(f"({_CENTRED} / torch.sqrt({variance} + _k))"))
    return found


_SCORES = ("_q @ _m.transpose(-2, -1)", "_q @ _m.transpose(-1, -2)", "_q @ _m.mT")

RULES = (
    *_rules(
        "softmax",
        "torch.softmax(_x, _d)",
        _exponentials("torch.exp(_x - _x.amax(_d, keepdim=True))"),
        _exponentials("torch.exp(_x - _x.max(_d, keepdim=True).values)"),
        _exponentials("torch.exp(_x - _x.max(_d, keepdim=True)[0])"),
        _exponentials("torch.exp(_x)"),
    ),
    *_rules(
        "softmax",
        "torch.log_softmax(_x, _d)",
        "_x - _x.logsumexp(_d, keepdim=True)",
        "torch.log(torch.softmax(_x, _d))",
        "_x - torch.log(torch.exp(_x).sum(_d, keepdim=True))",
    ),
    *_rules("softmax", "torch.logsumexp(_x, _d)", "torch.log(torch.exp(_x).sum(_d))"),
    *_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), _w, _k)",
        f"_x * {_RMS} * _w",
        f"_w * (_x * {_RMS})",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k) * _w",
    ),
    *_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), None, _k)",
        f"_x * {_RMS}",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k)",
    ),
    *_rules("norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), _w, _b, _k)", *_layer_norms("{} * _w + _b")),
    *_rules("norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), None, None, _k)", *_layer_norms("{}")),
    *_rules("activation", f"{_F}.silu(_x)", "_x * torch.sigmoid(_x)", "_x / (1 + torch.exp(-_x))"),
    *_rules(
        "activation", "torch.sigmoid(_x)", "1 / (1 + torch.exp(-_x))", "torch.reciprocal(1 + torch.exp(-_x))"
    ),
    *_rules("activation", "torch.relu(_x)", "_x.clamp(min=0)", "torch.maximum(_x, torch.zeros_like(_x))"),
    *_rules("activation", f"{_F}.gelu(_x)", "_x * 0.5 * (1 + torch.erf(_x / 1.4142135623730951))"),
    *_rules("activation", f"{_F}.softplus(_x)", "torch.log(1 + torch.exp(_x))", "torch.log1p(torch.exp(_x))"),
    *_rules("product", f"{_F}.linear(_x, _w, _b)", "_x @ _w.T + _b", "_x @ _w.t() + _b"),
    *_rules("product", f"{_F}.linear(_x, _w)", "_x @ _w.T", "_x @ _w.t()"),
    *_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=_s)",
        *(f"torch.softmax(({s}) * _s, -1) @ _v" for s in _SCORES),
    ),
    *_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=1.0 / _s)",
        *(f"torch.softmax(({s}) / _s, -1) @ _v" for s in _SCORES),
    ),
    *_rules("product", "torch.addmm(_c, _a, _b)", "_c + _a @ _b"),
    *_rules("product", "torch.baddbmm(_c, _a, _b)", "_c + _a @ _b"),
    *_rules("product", "torch.addmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_rules("product", "torch.baddbmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_rules(
        "search",
        "_x.argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
        "torch.where(_x == _x.max(-1, keepdim=True).values, _p, _n).amin(-1)",
        "_x.max(-1).indices",
        "_x.max(-1)[1]",
    ),
    *_rules("search", "_x.max(-1).indices", "_x.argmax(-1)"),
    *_rules(
        "search",
        "_x.max(-1).indices",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_rules(
        "search",
        "(_x == _x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='sum')", "_t[_i].sum(1)", "_t[_i].sum(-2)"),
    *_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='mean')", "_t[_i].mean(1)"),
    *_rules("lookup", f"{_F}.embedding(_i, _t).sum(1)", "_t[_i].sum(1)"),
    *_rules("lookup", "_t.index_select(0, _i.reshape(-1)).reshape(*_i.shape, -1).sum(1)", "_t[_i].sum(1)"),
)
