"""What each rewrite of a torch source makes of a text, and what it leaves alone."""

from __future__ import annotations

import textwrap

import pytest

from forecast_harness.authors.torch import REWRITES, rewrites_of
from forecast_harness.authors.torch.source_code import InputFacts


def made(body: str, rewrite: str, facts: InputFacts | None = None, parameters: str = "x, y, z") -> list[str]:
    """What one rewrite makes of a function's body: the bodies after it."""
    inner = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    source = f"import torch\n\n\ndef run({parameters}):\n{inner}\n"
    every = rewrites_of(source, "run", facts, combine=False)
    return [m.text.partition("):\n")[2].strip() for m in every if m.names == (rewrite,)]


MADE = """
# fused-softmax
e = torch.exp(x - x.amax(-1, keepdim=True))
return e / e.sum(-1, keepdim=True)
->
return torch.softmax(x, -1)
# fused-softmax
return x - torch.logsumexp(x, dim=1, keepdim=True)
->
return torch.log_softmax(x, 1)
# fused-norm
r = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)
return y * (x * r)
->
return torch.nn.functional.rms_norm(x, (x.shape[-1],), y, 1e-06)
# fused-norm
c = x - x.mean(-1, keepdim=True)
return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5) * y + z
->
return torch.nn.functional.layer_norm(x, (x.shape[-1],), y, z, 1e-05)
# fused-activation
return x.sigmoid() * x
->
return torch.nn.functional.silu(x)
# fused-activation
return x / (1 + torch.exp(-x))
->
return torch.nn.functional.silu(x)
# fused-product
return x @ y.T + z
->
return torch.nn.functional.linear(x, y, z)
# fused-search
return x.max(-1)[1]
->
return x.argmax(-1)
# fused-lookup
return x[y].sum(1)
->
return torch.nn.functional.embedding_bag(y, x, mode='sum')
# multiply-add
return x + y * z
->
return torch.addcmul(x, y, z)
# multiply-add
return x - 3 * y
->
return torch.sub(x, y, alpha=3)
# multiply-add
return x + y / z
->
return torch.addcdiv(x, y, z)
# exp2
return torch.exp(x)
->
return torch.exp2(x * 1.4426950408889634)
# rsqrt
return x / torch.sqrt(y)
->
return x * torch.rsqrt(y)
# reciprocal
return x / 448.0
->
return x * (1.0 / 448.0)
# sum-squares
return x.square().sum(-1)
->
return torch.linalg.vecdot(x, x)
# sum-products
return torch.sum(x * y, dim=-1)
->
return torch.linalg.vecdot(x, y)
# largest
return x.abs().amax(-1)
->
return torch.maximum(x.amax(-1), -x.amin(-1))
# narrow
return (x.float() @ y.float()).to(x.dtype)
->
return (x @ y).to(x.dtype)
# no-copy
return x.contiguous() + 1
->
return x + 1
# copy-layout
return x @ y.transpose(0, 1)
->
return x @ y.transpose(0, 1).contiguous()
# wide-sums
return x.cumsum(-1)
->
return x.cumsum(-1, dtype=torch.float64).to(x.dtype)
# einsum-to-matmul
return torch.einsum('bthk,bhkv->bthv', x, y)
->
return (x.permute(0, 2, 1, 3) @ y).permute(0, 2, 1, 3)
# contiguous-operands
return x.permute(1, 0) @ y
->
return x.permute(1, 0).contiguous() @ y
# overwrite
return torch.exp(x - y)
->
return (x - y).exp_()
# overwrite
e = torch.exp(x)
return e / e.sum()
->
e = torch.exp(x)
return e.div_(e.sum())
# overwrite
s = torch.zeros_like(x)
for i in range(3):
    s = s * y
return s
->
s = torch.zeros_like(x)
for i in range(3):
    s = s.mul_(y)
return s
# destinations
z.copy_(x * y)
->
torch.mul(x, y, out=z)
# destinations
z[0] = x @ y
->
torch.matmul(x, y, out=z[0])
"""
"""A rewrite, a function's body, and what the rewrite makes of it."""


def cases() -> list[tuple[str, str, str]]:
    """(rewrite, before, after)"""
    found = []
    for part in MADE.strip().split("# ")[1:]:
        name, _, text = part.partition("\n")
        before, _, after = text.partition("\n->\n")
        found.append((name, before, after.strip().replace("\n", "\n    ")))
    return found


@pytest.mark.parametrize(("rewrite", "before", "after"), cases())
def test_a_rewrite_makes_this(rewrite: str, before: str, after: str) -> None:
    assert after in made(before, rewrite)


@pytest.mark.parametrize(
    ("rewrite", "body"),
    [
        ("overwrite", "return x * 2"),  # a parameter is the caller's
        ("overwrite", "e = x.float()\nreturn e * 2"),  # may be the parameter itself
        ("overwrite", "e = torch.exp(x)\nreturn e * 2, e"),  # read again
        ("overwrite", "e = torch.exp(x)\nv = e.view(-1)\nf = e * 2\nreturn f, v"),  # a view holds it
        ("overwrite", "x = x * y\nreturn x"),  # the first value is the caller's
        ("overwrite", "return torch.rsqrt(x.mean(-1, keepdim=True)) * y"),  # the result is larger
        ("multiply-add", "return x.shape[0] + x.shape[1] * 2"),
        ("fused-softmax", "e = torch.exp(x)\nreturn e / e.sum(-1)"),
        ("fused-softmax", "e = torch.exp(x)\ne = e * y\nreturn e / e.sum(-1, keepdim=True)"),
        ("fused-activation", "return x * torch.sigmoid(y)"),
        ("einsum-to-matmul", "return torch.einsum('ij,ij->i', x, y)"),
        ("chunk-rows", "return x + 1"),  # nothing is known of rows
    ],
)
def test_a_rewrite_leaves_this_alone(rewrite: str, body: str) -> None:
    assert made(body, rewrite) == []


def test_gradients_keep_values_as_they_are() -> None:
    body = "w = x.float().requires_grad_()\nl = torch.exp(w - 1)\nreturn torch.autograd.grad(l.sum(), w)"
    assert made(body, "overwrite") == made(body, "inference-mode") == []


def test_unread_assignments_go_and_torch_is_imported() -> None:
    source = "def run(x):\n    s = x.sigmoid()\n    return x * s\n"
    (found,) = (m.text for m in rewrites_of(source, "run", combine=False) if m.names == ("fused-activation",))
    assert found == "import torch\n\ndef run(x):\n    return torch.nn.functional.silu(x)\n"


def test_every_rewrite_is_named_once_and_there_are_many() -> None:
    names = [r.name for r in REWRITES]
    assert len(names) == len(set(names)) >= 12
