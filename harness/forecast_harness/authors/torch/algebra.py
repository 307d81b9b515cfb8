"""Rules of arithmetic: the same value by other, cheaper or fused, operations."""

from __future__ import annotations

from forecast_harness.authors.torch.matching import RewriteRule

MULTIPLY_ADD_NOTE = "a product and a sum in one pass over memory"
SQUARES_NOTE = "a sum of squares without storing the squares"

RULES = (
    # One pass instead of two: operands of one type, so no plain numbers among them.
    RewriteRule(
        "multiply-add", "_c + _a * _b", "torch.addcmul(_c, _a, _b)", MULTIPLY_ADD_NOTE, (), ("_a", "_b", "_c")
    ),
    RewriteRule(
        "multiply-add",
        "_c - _a * _b",
        "torch.addcmul(_c, _a, _b, value=-1)",
        MULTIPLY_ADD_NOTE,
        (),
        ("_a", "_b", "_c"),
    ),
    RewriteRule(
        "multiply-add", "_c + _a / _b", "torch.addcdiv(_c, _a, _b)", MULTIPLY_ADD_NOTE, (), ("_a", "_b", "_c")
    ),
    RewriteRule(
        "multiply-add",
        "_c + _a * _s",
        "torch.add(_c, _a, alpha=_s)",
        MULTIPLY_ADD_NOTE,
        ("_s",),
        ("_a", "_c"),
    ),
    RewriteRule(
        "multiply-add",
        "_c - _a * _s",
        "torch.sub(_c, _a, alpha=_s)",
        MULTIPLY_ADD_NOTE,
        ("_s",),
        ("_a", "_c"),
    ),
    RewriteRule(
        "multiply-add", "_a + _t * (_b - _a)", "torch.lerp(_a, _b, _t)", MULTIPLY_ADD_NOTE, (), ("_a", "_b")
    ),
    # Exponentials and roots.
    RewriteRule(
        "exponents", "torch.exp(_a) * torch.exp(_b)", "torch.exp(_a + _b)", "one exponential for two"
    ),
    RewriteRule(
        "exponents", "torch.exp(_a) / torch.exp(_b)", "torch.exp(_a - _b)", "one exponential for two"
    ),
    RewriteRule("exponents", "torch.log(_a) + torch.log(_b)", "torch.log(_a * _b)", "one logarithm for two"),
    RewriteRule("exponents", "torch.log(_a) - torch.log(_b)", "torch.log(_a / _b)", "one logarithm for two"),
    RewriteRule("exponents", "torch.exp(_x) - 1", "torch.expm1(_x)", "exp(x) - 1 in one pass"),
    RewriteRule("exponents", "torch.log(1 + _x)", "torch.log1p(_x)", "log(1 + x) in one pass"),
    RewriteRule("exp2", "torch.exp(_x)", "torch.exp2(_x * 1.4426950408889634)", "exp as a power of two"),
    RewriteRule("rsqrt", "_a / torch.sqrt(_b)", "_a * torch.rsqrt(_b)", "a product with the reciprocal root"),
    RewriteRule("rsqrt", "1 / torch.sqrt(_b)", "torch.rsqrt(_b)", "the reciprocal root in one pass"),
    RewriteRule("rsqrt", "_b ** -0.5", "torch.rsqrt(_b)", "the reciprocal root in one pass", (), ("_b",)),
    RewriteRule("rsqrt", "_b ** 0.5", "torch.sqrt(_b)", "a root, not a power", (), ("_b",)),
    RewriteRule("reciprocal", "_a / _s", "_a * (1.0 / _s)", "a product for a quotient", ("_s",), ("_a",)),
    RewriteRule(
        "reciprocal",
        "_a / _b",
        "_a * torch.reciprocal(_b)",
        "one quotient per divisor, then products",
        (),
        ("_a", "_b"),
    ),
    RewriteRule("square", "_x * _x", "_x.square()", "a square reads its operand once", (), ("_x",)),
    # Reductions that need not store what they reduce.
    RewriteRule(
        "sum-squares",
        "_x.square().mean(-1, keepdim=True)",
        "torch.linalg.vecdot(_x, _x)[..., None] / _x.shape[-1]",
        SQUARES_NOTE,
    ),
    RewriteRule(
        "sum-squares",
        "_x.square().mean(_d, keepdim=True)",
        "torch.linalg.vector_norm(_x, dim=_d, keepdim=True).square() / _x.shape[_d]",
        SQUARES_NOTE,
    ),
    RewriteRule(
        "sum-squares",
        "_x.square().mean(-1, keepdim=True)",
        "torch.einsum('...i,...i->...', _x, _x)[..., None] / _x.shape[-1]",
        SQUARES_NOTE,
    ),
    RewriteRule("sum-squares", "_x.square().sum(-1)", "torch.linalg.vecdot(_x, _x)", SQUARES_NOTE),
    RewriteRule(
        "sum-squares",
        "_x.square().sum(-1, keepdim=True)",
        "torch.linalg.vecdot(_x, _x)[..., None]",
        SQUARES_NOTE,
    ),
    RewriteRule(
        "sum-products", "(_a * _b).sum(-1)", "torch.linalg.vecdot(_a, _b)", "a dot product without storing"
    ),
    RewriteRule(
        "sum-products",
        "(_a * _b).sum(-1, keepdim=True)",
        "torch.linalg.vecdot(_a, _b)[..., None]",
        "a dot product without storing",
    ),
    RewriteRule(
        "largest",
        "_x.abs().amax(_d)",
        "torch.maximum(_x.amax(_d), -_x.amin(_d))",
        "the largest magnitude without storing magnitudes",
    ),
    RewriteRule(
        "largest",
        "_x.abs().amax(_d)",
        "torch.linalg.vector_norm(_x, float('inf'), _d)",
        "the largest magnitude as a norm",
    ),
    # Where to scale: the smaller operand.
    RewriteRule(
        "scale-early", "(_a @ _b) * _s", "(_a * _s) @ _b", "the factor on the left operand", ("_s",), ("_a",)
    ),
    RewriteRule(
        "scale-early", "(_a @ _b) * _s", "_a @ (_b * _s)", "the factor on the right operand", ("_s",), ("_a",)
    ),
    RewriteRule(
        "scale-early", "(_a @ _b) / _s", "(_a / _s) @ _b", "the factor on the left operand", ("_s",), ("_a",)
    ),
    # Precision and layout.
    RewriteRule("narrow", "_x.float()", "_x", "no conversion to single precision", all_places_only=True),
    RewriteRule(
        "narrow", "_x.to(torch.float32)", "_x", "no conversion to single precision", all_places_only=True
    ),
    RewriteRule("no-copy", "_x.contiguous()", "_x", "no copy into another layout"),
    RewriteRule("no-copy", "_x.reshape(_s)", "_x.view(_s)", "a view, not perhaps a copy"),
    RewriteRule(
        "copy-layout", "_x.transpose(_a, _b)", "_x.transpose(_a, _b).contiguous()", "laid out as it is read"
    ),
    RewriteRule("copy-layout", "_x.T", "_x.T.contiguous()", "laid out as it is read"),
    RewriteRule(
        "wide-sums",
        "_x.cumsum(_d)",
        "_x.cumsum(_d, dtype=torch.float32).to(_x.dtype)",
        "running sums in single precision",
    ),
    RewriteRule(
        "wide-sums",
        "_x.cumsum(_d)",
        "_x.cumsum(_d, dtype=torch.float64).to(_x.dtype)",
        "running sums in double precision",
    ),
    RewriteRule(
        "wide-sums",
        "_x.cumsum(-1)",
        "_x.transpose(-2, -1).contiguous().cumsum(-2).transpose(-2, -1)",
        "running sums side by side",
    ),
)
