"""Rewrites without a model: what each makes of a text, that they verify for real, and that draws repeat."""

from __future__ import annotations

import contextlib
import random
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

import pytest

from forecast_autotune.variants.contract import read_contract
from forecast_harness.authors import open_author, triton_rewrites
from forecast_harness.authors.torch import rewrites_of
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.sandbox.api import ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.sandbox.lane_pools import CpuLanes
from forecast_harness.search.rewriting_lanes import RewritingLanes
from forecast_harness.targets.packs.load import load_pack
from forecast_harness.targets.search_target import solution_of
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify
from tests.harness.authors.proposal_examples import node, pack_target, plain_target, request
from tests.harness.small import checked_only
from tests.harness.variant_kernels import SOFTMAX, rows, search_target, softmax_call, subject

SMALL = VerificationPlan(cases=3, timed=4)
KERNEL = subject(SOFTMAX, softmax_call(9, 70), grid=rows)


SAMPLED = ("softmax", "rms_norm", "swiglu", "embedding_sum", "row_argmax", "fp8_quant", "gdn_recompute_w_u")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_rewrites_of_a_pack_pass_verification(name: str, judging: SandboxLane) -> None:
    """Drawn from what is made of the pack's torch solution without lowering its precision."""
    target, seed = pack_target(name)
    problem = checked_only(load_pack(name))
    every = rewrites_of(seed.source, "run")
    precise = [m for m in every if "narrow" not in m.names]
    sample = random.Random(name).sample(precise, min(5, len(precise)))
    refused = {}
    for one in sample:
        verdict = verify(
            problem,
            solution_of(target, node(target, one.text)),
            judging,
            plan=SMALL,
            limits=ResourceLimits(wall_s=30, trusted_s=60),
        )
        if not verdict.accepted:
            refused[one.names] = str(verdict.reasons[0].detail)
    assert refused == {}


def test_draws_repeat() -> None:
    target, seed = pack_target("rms_norm")
    asked = request(target, seed, n=6)
    one, two = (open_author("mechanical", target).propose(asked) for _ in range(2))
    assert one == two
    assert all(n.parents == (seed.id,) and n.arm == asked.arm for n in one.nodes)
    other = open_author("mechanical", target).propose(request(target, seed, n=6, seed=2))
    assert {n.id for n in other.nodes} != {n.id for n in one.nodes}


def test_a_text_that_is_not_python_is_told() -> None:
    target = plain_target()
    answer = open_author("mechanical", target).propose(request(target, node(target, "def run(x:\n")))
    assert answer.exhausted
    assert "not Python" in answer.problem


def test_triton_solutions_keep_their_launch() -> None:
    problem = load_pack("softmax")
    source = problem.solution("triton_rows").source
    target = plain_target("triton")
    answer = open_author("mechanical", target).propose(request(target, node(target, source), n=999))
    kinds = {n.provenance.author for n in answer.nodes}
    assert "constants" in kinds
    assert len(kinds) > 1, "some rewrite of the kernel itself applies, too"
    assert any("num_warps=8" in n.source for n in answer.nodes)


@pytest.mark.slow
def test_a_triton_solution_passes_after_a_rewrite(judging: SandboxLane) -> None:
    problem = checked_only(load_pack("softmax"))
    target = SearchTarget(
        TargetKind.PACK, "softmax", problem.id, "triton", "run", "", {"pack": problem.to_json()}
    )
    parent = node(target, problem.solution("triton_rows").source)
    answer = open_author("mechanical", target).propose(request(target, parent, n=3))
    for one in answer.nodes:
        verdict = verify(problem, solution_of(target, one), judging, plan=SMALL)
        assert verdict.accepted, (one.provenance.author, verdict.reasons)


def test_a_kernels_variants_keep_its_contract() -> None:
    target = search_target(KERNEL)
    answer = open_author("mechanical", target).propose(request(target, node(target, SOFTMAX), n=99))
    assert answer.nodes
    wanted = read_contract(SOFTMAX, "kernel").parameters
    assert all(read_contract(n.source, "kernel").parameters == wanted for n in answer.nodes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_kernels_rewritten_in_another_process_are_those_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    target = search_target(KERNEL)
    seed, broken = node(target, SOFTMAX), node(target, "def kernel(:\n")
    here = open_author("mechanical", target)
    asked = request(target, seed, n=6)
    wanted, refused = here.propose(asked), here.propose(request(target, broken, n=6))
    assert wanted.nodes
    monkeypatch.setattr(triton_rewrites, "kernel_rewrites", None)
    with contextlib.closing(RewritingLanes(target)) as lanes:
        author = open_author("mechanical", target, rewriter=lanes.rewrites)
        assert author.propose(asked) == wanted
        assert author.propose(request(target, broken, n=6)) == refused
        assert refused.exhausted
        monkeypatch.undo()
        monkeypatch.setattr(CpuLanes, "run", _no_lane)
        author = open_author("mechanical", target, rewriter=lanes.rewrites)
        assert author.propose(asked) == wanted, "where no sandbox can be opened"


def _no_lane(lanes: CpuLanes, jobs: Sequence[SandboxJob]) -> NoReturn:
    raise SandboxError("no lane can be opened here")


# --- rewrites of torch sources ---


def made(body: str, rewrite: str, parameters: str = "x, y, z") -> list[str]:
    """What one rewrite makes of a function's body: the bodies after it."""
    inner = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    source = f"import torch\n\n\ndef run({parameters}):\n{inner}\n"
    return [m.text.partition("):\n")[2].strip() for m in rewrites_of(source, "run") if m.names == (rewrite,)]


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
# exp2
return torch.exp(x)
->
return torch.exp2(x * 1.4426950408889634)
# sum-squares
return x.square().sum(-1)
->
return torch.linalg.vecdot(x, x)
# narrow
return (x.float() @ y.float()).to(x.dtype)
->
return (x @ y).to(x.dtype)
# einsum-to-matmul
return torch.einsum('bthk,bhkv->bthv', x, y)
->
return (x.permute(0, 2, 1, 3) @ y).permute(0, 2, 1, 3)
# contiguous-operands
return x.permute(1, 0) @ y
->
return x.permute(1, 0).contiguous() @ y
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
        ("fused-softmax", "e = torch.exp(x)\nreturn e / e.sum(-1)"),
        ("fused-softmax", "e = torch.exp(x)\ne = e * y\nreturn e / e.sum(-1, keepdim=True)"),
        ("fused-activation", "return x * torch.sigmoid(y)"),
        ("einsum-to-matmul", "return torch.einsum('ij,ij->i', x, y)"),
    ],
)
def test_a_rewrite_leaves_this_alone(rewrite: str, body: str) -> None:
    assert made(body, rewrite) == []


def test_gradients_keep_values_as_they_are() -> None:
    body = "w = x.float().requires_grad_()\nl = torch.exp(w - 1)\nreturn torch.autograd.grad(l.sum(), w)"
    assert made(body, "inference-mode") == []


def test_unread_assignments_go_and_torch_is_imported() -> None:
    source = "def run(x):\n    s = x.sigmoid()\n    return x * s\n"
    (found,) = (m.text for m in rewrites_of(source, "run") if m.names == ("fused-activation",))
    assert found == "import torch\n\ndef run(x):\n    return torch.nn.functional.silu(x)\n"
