"""Cost functions that tests evaluate, and a kernel's sizes to do it at."""

from __future__ import annotations

from collections.abc import Sequence

from forecast_autotune.llm.advice.question import AdviceSample
from forecast_autotune.llm.advice.subject import AdviceSubject
from forecast_autotune.records import Argument, Candidate, Config, Device, Kernel, Problem

SOURCE = "5" * 64
ARGUMENTS = (
    Argument("x", "tensor", "float16", (4096, 1024), (1024, 1), True),
    Argument("n", "scalar", "i32", value=1024),
    Argument("ACTIVATION", "constexpr", value="relu"),
    Argument("bias", "none"),
)
CONFIGS = tuple(Config.of({"BLOCK": b}, num_warps=w) for b in (64, 128, 256, 1024) for w in (2, 4, 8))

BLOCKS = """SUMMARY = "memory bound; wave quantisation"
CONFIDENCE = 0.7
SPREAD = 0.2

def bytes_of(block, itemsize):
    return block * itemsize

def cost(config, args, device, launch):
    extra = constant(24, spread=1.5, label="registers beside the tile")
    threads = 32 * config.num_warps
    registers = extra + config.BLOCK / threads
    resident = resident_programs(threads, registers, 0)
    rounds = term(waves(launch.programs, resident), "wave quantisation")
    moved = 2 * bytes_of(config.BLOCK, args.x.itemsize) * resident * device.sms
    each = moved / (device.memory_gb_s * 1000) + constant(0.5, spread=2.0)
    spills = term(spilled_registers(registers) * 0.01, "spills")
    return 3 + rounds * each * (1 + spills)
"""
BRANCHES = """SUMMARY = "branches"

def cost(config, args, device, launch):
    time = args.x.numel / launch.programs
    if config.num_warps > 4:
        time = time * 1.5
        if config.BLOCK <= 64:
            return time * 4
    elif config.BLOCK == 1024 and args.ACTIVATION == "relu":
        time += constant(100, spread=4)
    else:
        time = max(time, 1)
    return time + 1
"""
LOOPS = """def cost(config, args, device, launch):
    total = 1.0
    for step in range(min(args.n // 64, 16)):
        total += config.BLOCK * (step + 1) / 2 ** config.num_warps
        if step > 8:
            total = total + 1 if config.BLOCK > 100 else total
    same_binary(config.BLOCK, where(config.num_warps > 4, 8, config.num_warps))
    return total if total > 0 else 1
"""
LOGS = """SUMMARY = "logs"
def cost(config, args, device, launch):
    a = log2(args.x.shape[0] * args.x.stride[0]) + sqrt(config.BLOCK) + exp2(-config.num_stages)
    b = smooth_max(a, cdiv(args.n, config.BLOCK), launch.grid[0] / device.sms)
    c = where(args.x.dtype in ("float16", "bfloat16"), 1, 2) * (b if not args.x.aligned else b + 1)
    return c ** 1.5 % 1000 + next_power_of_2(config.BLOCK) // 7 + abs(-1) + round(2.5)
"""
TUPLES = """def half(value):
    \"\"\"A docstring is fine.\"\"\"
    return value / 2

def cost(config, args, device, launch):
    warps, block = config.num_warps, config.BLOCK
    per: float = block / (32 * warps)
    pass
    if 0 < per <= 2:
        return half(constant(8.0, 2.0, "few") * launch.programs)
    if per < 1 or warps not in (2, 4):
        return half(per * launch.programs) + 1
    return launch.programs * max(per, 1, half(per)) + int(per)
"""
GOOD = {"blocks": BLOCKS, "branches": BRANCHES, "loops": LOOPS, "logs": LOGS, "tuples": TUPLES}


def sample(rows: int = 4096) -> AdviceSample:
    """Sizes of a kernel that goes over the rows of a matrix."""
    first = Argument("x", "tensor", "float16", (rows, 1024), (1024, 1), True)
    kernel = Kernel("rows", source="def rows(): ...", source_sha256=SOURCE)
    problem = Problem.of(kernel, (first, *ARGUMENTS[1:]), Device("NVIDIA H200", arch="90"))
    candidates = [Candidate(c) for c in CONFIGS]
    grids = {c: (rows * 1024 // int(str(dict(c.config.kwargs)["BLOCK"])), 1, 1) for c in candidates}
    return AdviceSample(problem, candidates, grids)


def subject(configs: Sequence[Config] = CONFIGS, rows: int = 4096) -> AdviceSubject:
    """The same as a cost function sees it."""
    given = sample(rows)
    return AdviceSubject.of(given.problem, [Candidate(c) for c in configs], given.grids)
