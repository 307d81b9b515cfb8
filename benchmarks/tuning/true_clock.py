"""What the clock sees and a program does not: each belief beside what is so, on a GPU.

    python -m benchmarks.tuning.true_clock --out FILE.json [--null] [--stages addresses,flush] [--seconds 60]

Each stage decides as this build does and as the one before did, and times both choices, and all others, in the state
that the stage names, in turns. A stage ends with the case in which its seconds are over.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from benchmarks.lib.devices import device, synchronize
from benchmarks.lib.kernel_timing import time_in_turns
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune import autotune, settle
from forecast_autotune.records import Candidate, Config
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store import Store
from forecast_autotune.tuning.results import FINALIST_MARGIN, MAX_FINALISTS
from forecast_integrations.triton.timer import timers

COLD_BYTES, ROUNDS = 320 << 20, 120
Json = dict[str, Any]


@triton.jit
def matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WRONG: tl.constexpr = False
):
    pid, tiles = tl.program_id(0), tl.cdiv(M, BM)
    m, n, k = (pid % tiles) * BM + tl.arange(0, BM), (pid // tiles) * BN + tl.arange(0, BN), tl.arange(0, BK)
    left, right = a + (m % M)[:, None] * K + k[None, :], b + k[:, None] * N + (n % N)[None, :]
    whole: tl.constexpr = a.dtype.element_ty == tl.int8
    total = tl.zeros((BM, BN), tl.int32 if whole else tl.float32)
    for _ in range(0, K // 2 if WRONG else K, BK):
        total += tl.dot(tl.load(left), tl.load(right))
        left += BK
        right += BK * N
    place = c + m[:, None] * N + n[None, :]
    tl.store(place, total.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def row_sum(x, out, n, BLOCK: tl.constexpr, WRONG: tl.constexpr = False):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n // 2 if WRONG else n, BLOCK):
        total += tl.load(x + row * n + start + i, mask=start + i < n, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total))


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr, WRONG: tl.constexpr = False):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(value - (0.0 if WRONG else tl.max(value)))
    tl.store(out + row * n + i, e if WRONG else e / tl.sum(e), mask=i < n)


@triton.jit
def norm(x, out, n, BLOCK: tl.constexpr, WRONG: tl.constexpr = False):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    mean = 0.0 if WRONG else tl.sum(value * value) / n
    tl.store(out + row * n + i, value * tl.rsqrt(mean + 1e-6) * 0.5, mask=i < n)


@triton.jit
def attention(
    q, k, v, out, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WRONG: tl.constexpr = False
):
    m, d, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    query = tl.load(q + m[:, None] * D + d[None, :])
    top, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, D), tl.float32)
    for start in range(0, n // 2 if WRONG else n, BN):
        scores = tl.dot(query, tl.load(k + d[:, None] + (start + j)[None, :] * D)) * 0.125
        new = tl.maximum(top, tl.max(scores, 1))
        p, old = tl.exp(scores - new[:, None]), tl.exp(top - new)
        total, top = total * old + tl.sum(p, 1), new
        result = result * old[:, None] + tl.dot(
            p.to(query.dtype), tl.load(v + (start + j)[:, None] * D + d[None, :])
        )
    tl.store(out + m[:, None] * D + d[None, :], (result / total[:, None]).to(out.dtype.element_ty))


def tensor(dtype: torch.dtype, *shape: int, at: int = 0, zeros: bool = False) -> Any:
    """Random values, or zeros, `at` bytes into a line."""
    where, count = WHERE[0], torch.Size(shape).numel()
    size = torch.empty((), dtype=dtype).element_size()
    flat = torch.zeros(count + 256, dtype=dtype, device=where)
    shift = (-flat.data_ptr() % 256 + at) // size
    result = flat[shift : shift + count].view(shape)
    if not zeros:
        value = (
            torch.randint(-127, 128, shape, dtype=torch.int8, device=where) if dtype is torch.int8 else None
        )
        result.copy_(torch.randn(shape, device=where, dtype=torch.float16) if value is None else value)
    return result


WHERE = ["cuda"]
SIZE = [1.0]


class Case:
    """A kernel, its configs, and copies of its arguments."""

    def __init__(
        self, name: str, kernel: Any, configs: list[Any], grid: Any, make: Callable[[], tuple[Any, ...]]
    ):
        self.name, self.kernel, self.configs, self.grid, self.make = name, kernel, configs, grid, make

    def launcher(self, config: Any, args: tuple[Any, ...]) -> Callable[[], object]:
        keywords = config.all_kwargs()
        return functools.partial(self.kernel[self.grid(keywords)], *args, **keywords)

    def decide(self, args: tuple[Any, ...], **options: Any) -> tuple[Any, Json]:
        """The config that is chosen with a fresh store, and what that took."""
        tuner = autotune(self.configs, key=[], store=False, **options)(self.kernel)
        begin = time.perf_counter()
        tuner[self.grid](*args)
        synchronize()
        took = {"seconds": round(time.perf_counter() - begin, 3), "measured": tuner.decision.measured}
        return tuner.best_config, took

    def working(self, args: tuple[Any, ...]) -> list[Any]:
        """Those that run here."""

        def compiled(config: Any) -> None:
            with suppress(Exception):  # it fails again below
                self.kernel.warmup(*args, grid=(1,), **config.all_kwargs())

        def runs(config: Any) -> bool:
            try:
                self.launcher(config, args)()
            except Exception as error:
                say(f"  {self.name}: {config}: {type(error).__name__}")
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(compiled, self.configs))
        result = list(filter(runs, self.configs))
        synchronize()
        return result


WIDE = (
    *((64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 32, 128, 4, 3)),
    *((128, 128, 64, 4, 3), (128, 128, 32, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4)),
    *((128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (64, 256, 64, 4, 3)),
)
NARROW = (
    *((16, 32, 128, 4, 4), (16, 32, 256, 4, 3), (16, 64, 128, 4, 4), (16, 64, 256, 4, 3)),
    *((16, 128, 128, 4, 3), (32, 64, 128, 4, 4), (32, 32, 256, 4, 3)),
)
"""Tiles, warps and stages."""


def products(name: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, **given: Any) -> Case:
    """A matmul by pointers; `given` is as in `tensor`, for `b`, or for `a` where its name begins so."""
    for_a = {key[2:]: given.pop(key) for key in list(given) if key.startswith("a_")}
    out = torch.int32 if dtype is torch.int8 else torch.float16
    listed = WIDE if m > 64 else (*NARROW, *WIDE[:6])
    configs = [
        triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=w, num_stages=st)
        for bm, bn, bk, w, st in listed
    ]
    m, n, k = (max(64, int(size * SIZE[0])) for size in (m, n, k))
    return Case(
        name,
        matmul,
        configs[:: 1 if SIZE[0] == 1 else 6],
        lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),),
        lambda: (
            tensor(dtype, m, k, **for_a),
            tensor(dtype, k, n, **given),
            tensor(out, m, n, zeros=True),
            m,
            n,
            k,
        ),
    )


def streams(name: str, kernel: Any, megabytes: float) -> Case:
    """An add of two tensors or a sum of rows that reads so many megabytes of fp16."""
    count = max(8192, int(megabytes * 2**19 * SIZE[0]) // 8192 * 8192)
    rows = kernel is row_sum
    configs = [
        triton.Config({"BLOCK": b}, num_warps=w) for b in (512, 1024, 2048, 4096, 8192) for w in (2, 4, 8, 16)
    ][:: 1 if SIZE[0] == 1 else 6]
    if rows:
        return Case(
            name,
            kernel,
            configs,
            lambda meta: (count // 8192,),
            lambda: (tensor(torch.float16, count), tensor(torch.float32, count // 8192), 8192),
        )
    half = count // 2
    return Case(
        name,
        kernel,
        configs,
        lambda meta: (triton.cdiv(half, meta["BLOCK"]),),
        lambda: (*(tensor(torch.float16, half) for _ in range(2)), tensor(torch.float16, half), half),
    )


def regrets(ms: Sequence[Sequence[float]], configs: list[Any], **chosen: Any) -> Json:
    """By how much each choice is slower than the best of all, in the median of turns."""
    medians = [statistics.median(times) for times in ms]
    best = min(medians)
    texts = [str(c) for c in configs]
    return {
        "best": str(configs[medians.index(best)]),
        "best_us": round(1e3 * best, 2),
        **{f"{name}_regret": round(medians[texts.index(str(c))] / best - 1, 4) for name, c in chosen.items()},
    }


def in_graphs(
    case: Case, configs: list[Any], copies: list[tuple[Any, ...]], *, warm: bool
) -> list[list[float]]:
    """Milliseconds of a launch in graphs over cold copies, or over one call's data again and again."""
    if WHERE[0] == "cpu":
        return time_in_turns([case.launcher(c, copies[0]) for c in configs], 3)
    graphs = []
    for config in configs:
        graph = torch.cuda.CUDAGraph()
        again = copies[:1] * (8 if case.kernel is matmul else 20)
        launches = [case.launcher(config, args) for args in (again if warm else copies)]
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        graphs.append((graph, len(launches)))
    order, times = list(range(len(graphs))), [[] for _ in graphs]  # type: ignore[var-annotated]
    for _ in range(max(8, ROUNDS // len(copies))):
        random.shuffle(order)
        events = []
        for i in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if warm:
                graphs[i][0].replay()
            start.record()
            graphs[i][0].replay()
            end.record()
            events.append((i, start, end))
        synchronize()
        for i, start, end in events:
            times[i].append(start.elapsed_time(end) / graphs[i][1])
    return times


def writing_flush(active: Any) -> Callable[[], object]:
    """The flush of the build before."""
    cache = active.get_empty_cache_for_benchmark()
    return functools.partial(active.clear_cache, cache)


# --- stages: each yields a row per case ---

SHAPES = (
    (4096, 4096, 4096),
    (1024, 4096, 4096),
    (2048, 2048, 2048),
    (512, 8192, 4096),
    (4096, 1024, 8192),
    (256, 8192, 4096),
)


def addresses() -> Iterator[Json]:
    """Operands that begin within a line: the choice for that address, and the one for aligned operands."""
    for at, name, (m, n, k) in itertools.product((16, 32, 64), ("at", "a_at"), SHAPES):
        old, _ = _aligned_choice(m, n, k)
        case = products(f"{m}x{n}x{k} {'A' if name == 'a_at' else 'B'} + {at}", m, n, k, **{name: at})
        args = case.make()
        configs = case.working(args)
        new, took = case.decide(args)
        times = time_in_turns([case.launcher(c, args) for c in configs], ROUNDS // 3)
        yield {"case": case.name, **regrets(times, configs, old=old, new=new), **took}


@functools.cache
def _aligned_choice(m: int, n: int, k: int) -> tuple[Any, Json]:
    case = products("", m, n, k)
    return case.decide(case.make())


def _cold_cases(*, warm: bool = False) -> Iterator[Case]:
    """Skinny matmuls, sums and adds; those for a `warm` L2 read little."""
    products_ = [(64, 8192, 8192), (256, 8192, 4096), (32, 4096, 8192), (64, 4096, 4096), (16, 8192, 8192)]
    if warm:
        products_ = [
            (64, 4096, 4096),
            (256, 2048, 2048),
            (2048, 2048, 2048),
            (64, 8192, 2048),
            (16, 4096, 4096),
        ]
    sizes = (
        [(4, 2), (8, 6), (12, 12), (16, 24), (24, 33)]
        if warm
        else [(8, 24), (16, 16), (24, 40), (40, 80), (80, 10)]
    )
    for (m, n, k), (sums, adds) in zip(products_, sizes, strict=True):
        yield streams(f"sum {sums} MB", row_sum, sums)
        if m >= 32:
            yield products(f"int8 {m}x{n}x{k}", m, n, k, torch.int8)
        yield streams(f"add {adds} MB", add, adds)
        yield products(f"fp16 {m}x{n}x{k}", m, n, k)


def _copies(case: Case) -> list[tuple[Any, ...]]:
    first = case.make()
    size = sum(a.numel() * a.element_size() for a in first if isinstance(a, torch.Tensor))
    return [first, *(case.make() for _ in range(min(40, int(COLD_BYTES * SIZE[0] // size))))]


def flush() -> Iterator[Json]:
    """Compare choices behind a flush that reads and one that writes, on copies that are cold by themselves."""
    for case in _cold_cases():
        copies = _copies(case)
        configs = case.working(copies[0])
        new, took = case.decide(copies[0])
        with mock.patch.object(timers, "l2_flushes", lambda active: (writing_flush(active),) * 2):
            old, _ = case.decide(copies[0])
        times = in_graphs(case, configs, copies, warm=False)
        yield {"case": case.name, **regrets(times, configs, old=old, new=new), **took}


def replays() -> Iterator[Json]:
    """Compare choices where twice the L2 or all of the buffer is read before a replay, each made three times."""
    for case in _cold_cases():
        copies = _copies(case)
        configs = case.working(copies[0])
        chosen, seconds = dict[str, Any](), dict[str, float]()
        for turn, (name, factor) in itertools.product(range(3), (("twice", timers._L2_FACTOR), ("all", 0))):
            with mock.patch.object(timers, "_L2_FACTOR", factor):
                chosen[f"{name} {turn}"], took = case.decide(copies[0])
            seconds[f"{name} s"] = round(seconds.get(f"{name} s", 0.0) + took["seconds"], 3)
        times = in_graphs(case, configs, copies, warm=False)
        yield {"case": case.name, **regrets(times, configs, **chosen), **seconds}


def warm() -> Iterator[Json]:
    """Compare choices for a warm L2 and for a cold one, in graphs of the same launch."""
    for case in _cold_cases(warm=True):
        args = case.make()
        configs = case.working(args)
        old, _ = case.decide(args)
        new, took = case.decide(args, l2="warm")
        times = in_graphs(case, configs, [args], warm=True)
        yield {"case": case.name, **regrets(times, configs, old=old, new=new), **took}


def contents() -> Iterator[Json]:
    """Compare choices on zeros and on random values, where the values are random."""
    kinds = [*([torch.float8_e4m3fn] if WHERE[0] == "cuda" else []), torch.int8, torch.float16]
    for size, dtype in itertools.product((8192, 4096, 2048), kinds):
        case = products(f"{dtype} {size}^3", size, size, size, dtype)
        args = case.make()
        configs = case.working(args)
        old, _ = case.decide(products("", size, size, size, dtype, zeros=True, a_zeros=True).make())
        new, took = case.decide(args)
        times = time_in_turns([case.launcher(c, args) for c in configs], ROUNDS // 4)
        yield {"case": case.name, **regrets(times, configs, old=old, new=new), **took}


def power() -> Iterator[Json]:
    """Finalists of 50 decisions by recorded looks: right after a hungry kernel, as before this build, and rested.

    Kept is a config within 1 % of the best of all in turns.
    """
    kinds = [
        torch.float16,
        torch.int8,
        *([torch.float8_e4m3fn] if WHERE[0] == "cuda" else []),
        torch.bfloat16,
    ]
    for size, dtype in itertools.product((4096, 8192), kinds):
        case = products(f"{dtype} {size}^3", size, size, size, dtype)
        args = case.make()
        configs = case.working(args)
        launches = [case.launcher(c, args) for c in configs]
        truth = [statistics.median(times) for times in time_in_turns(launches, ROUNDS)]
        row: Json = {"case": case.name, "second": sorted(truth)[1] / min(truth) - 1}
        for state in ("hot", "hot before", "rested"):
            passes = [looks_of(launches, state) for _ in range(6)]
            kept = 0
            for _ in range(50):
                looks = [random.choice(passes)[0][i] for i in range(len(configs))]
                fast = sorted(range(len(configs)), key=looks.__getitem__)[:MAX_FINALISTS]
                near = [i for i in fast if looks[i] <= min(looks) * (1 + FINALIST_MARGIN)]
                kept += any(truth[i] <= 1.01 * min(truth) for i in near)
            scatter = [max(one) / min(one) - 1 for one in zip(*(looks for looks, _ in passes), strict=True)]
            row[f"{state} kept"], row[f"{state} scatter"] = kept / 50, round(statistics.median(scatter), 4)
            row[f"{state} s"] = round(statistics.mean(seconds for _, seconds in passes), 3)
        yield row


def looks_of(launches: Sequence[Callable[[], object]], state: str) -> tuple[list[float], float]:
    """Milliseconds of each launch by a first look in an order by lot, and the seconds of all looks."""
    by_candidate = {Candidate(Config.of({"launch": i})): one for i, one in enumerate(launches)}
    hot, first = state.startswith("hot"), time.perf_counter()
    while hot and WHERE[0] == "cuda" and time.perf_counter() < first + 0.1:
        synchronize()
        for _ in range(10):  # the last ones still run when the timer is made
            launches[0]()
    time.sleep(0.0 if hot else 0.1)
    timer = timers.LaunchTimer(timers.PlainCalls(by_candidate))
    if state == "hot before":
        timer._hot_until = 0.0  # without a rest
    begin, looks = time.perf_counter(), dict[Candidate, float]()
    for candidate in random.sample(list(by_candidate), len(by_candidate)):
        timer.first(candidate, 60.0)
        times = timer.time_adaptively(candidate, min(looks.values(), default=1e9))
        looks[candidate] = statistics.median(times)
    timer.close()
    return [looks[c] for c in by_candidate], time.perf_counter() - begin


def outputs() -> Iterator[Json]:
    """Twelve configs of which one computes something else, and is fast."""
    f16, rows, n = torch.float16, 2048, 4096
    if SIZE[0] < 1:
        rows, n = 64, 256
    one = [triton.Config({"BLOCK": n}, num_warps=w, num_stages=s) for w in (2, 4, 8, 16) for s in (1, 2, 3)][
        :11
    ]
    many = [triton.Config({"BLOCK": b}, num_warps=w) for b in (256, 512, 1024) for w in (2, 4, 8, 16)][:11]
    tiles = [
        triton.Config({"BM": m, "BN": k}, num_warps=w, num_stages=2)
        for m in (64, 128)
        for k in (32, 64, 128)
        for w in (4, 8)
    ]
    cases = [
        products("matmul", 2048, 2048, 4096),
        Case(
            "softmax",
            softmax,
            one,
            lambda _: (rows,),
            lambda: (tensor(f16, rows, n), tensor(f16, rows, n), n),
        ),
        Case("norm", norm, one, lambda _: (rows,), lambda: (tensor(f16, rows, n), tensor(f16, rows, n), n)),
        Case(
            "attention",
            attention,
            tiles[:11],
            lambda meta: (n // meta["BM"],),
            lambda: (*(tensor(f16, n, 64) for _ in range(4)), n, 64),
        ),
        Case(
            "sum",
            row_sum,
            many,
            lambda _: (rows,),
            lambda: (tensor(f16, rows, n), tensor(torch.float32, rows), n),
        ),
    ]
    for case, at, mode in itertools.product(cases, (0, 7), ("tune", "exhaustive")):
        kept, case.configs = case.configs, list(case.configs[:11])
        seed = case.configs[at % len(case.configs)]
        wrong = triton.Config(
            {**seed.kwargs, "WRONG": True}, num_warps=seed.num_warps, num_stages=seed.num_stages
        )
        case.configs.insert(at, wrong)
        store = Store(None)
        tuner = autotune(case.configs, key=[], store=store, mode=mode)(case.kernel)
        tuner[case.grid](*case.make())
        rows_ = [m for t in store.tables() for m in latest_labels(t.measurements).values()]
        refused = [m for m in rows_ if str(m.outcome) == "incorrect"]
        yield {
            "case": f"{case.name} {mode} {at}",
            "measured": len(rows_),
            "timed_wrong": any("WRONG" in dict(m.candidate.config.kwargs) for m in rows_),
            "refused": [str(m.candidate) for m in refused],
            "message": refused[0].extra["message"] if refused else "",
            "chosen_wrong": "WRONG" in tuner.best_config.kwargs,
        }
        case.configs = kept


def background() -> Iterator[Json]:
    """The longest launch of a program's other thread beside tuning until it is decided, and for as long without."""
    if WHERE[0] == "cpu":
        return
    other, decided_s = torch.cuda.Stream(), 12.0
    cycles = int(50e-3 * 1.9e9)
    for mode in ("background", "skip") * 2:
        case, store = streams("sum", row_sum, 24), Store(None)
        tuner = autotune(case.configs, key=[], store=store, mode=mode)(case.kernel)
        args, x, waits, stop = case.make(), torch.zeros(64, device="cuda"), list[Any](), threading.Event()
        x.add_(1)

        def launches(x: Any = x, waits: list[Any] = waits, stop: threading.Event = stop) -> None:
            with torch.cuda.stream(other):
                while not stop.is_set():
                    begin = time.perf_counter()
                    x.add_(1)
                    waits.append((1e3 * (time.perf_counter() - begin), begin))
                    time.sleep(2e-4)

        thread = threading.Thread(target=launches)
        thread.start()
        begin = time.perf_counter()
        decided_s = 12.0 if mode == "background" else decided_s
        while time.perf_counter() < begin + decided_s and not (mode == "background" and tuner.cache):
            tuner[case.grid](*args)
            torch.cuda._sleep(cycles)
            time.sleep(0.03)
            if random.random() < 0.3:
                synchronize()
                time.sleep(0.003)
        decided_s = time.perf_counter() - begin
        stop.set()
        thread.join()
        waits = [wait for wait in waits if wait[1] >= begin]  # a thread's first launch takes longer
        measured = {m.candidate for t in store.tables() for m in t.measurements}
        left = settle(0.0) if mode != "skip" else ()
        yield {
            "case": mode,
            "seconds": round(decided_s, 2),
            "launches": len(waits),
            "longest_ms": round(max(waits)[0], 2),
            "longest": [[round(ms, 2), round(at - begin, 3)] for ms, at in sorted(waits)[-8:]],
            "p999_ms": round(sorted(waits)[int(0.999 * len(waits))][0], 2),
            "pending": len(left),
            "measured": len(measured),
        }


STAGES: dict[str, Callable[[], Iterator[Json]]] = {
    one.__name__: one for one in (outputs, addresses, flush, replays, power, warm, background, contents)
}


@contextmanager
def _where(null: bool) -> Iterator[None]:
    with device(null) if null else nullcontext():
        if null:
            WHERE[0], SIZE[0] = "cpu", 1 / 64
        yield


_SUMMARISED = ("_regret", " kept", " s", "longest_ms")


def summary(raw: dict[str, list[Json]]) -> Json:
    """Median and extremes of regrets, of kept shares, and of longest launches, by stage."""
    figures: Json = {}
    for stage, rows in raw.items():
        for name in sorted({key for row in rows for key in row if key.endswith(_SUMMARISED)}):
            values = [row[name] for row in rows if name in row]
            figures[f"{stage} {name}"] = {
                "cases": len(values),
                "median": statistics.median(values),
                "least": min(values),
                "worst": max(values),
                "beyond 2 %": sum(v > 0.02 for v in values),
            }
    return figures


def main() -> None:
    """Run the stages."""
    options = parser(__doc__)
    options.add_argument("--stages", default=",".join(STAGES))
    options.add_argument("--seconds", type=float, default=60.0, help="of a stage")
    arguments = parse_arguments(options)
    result = ResultFile(arguments, "true_clock")
    with _where(arguments.null):
        seconds: dict[str, float] = {}
        for name in arguments.stages.split(","):
            begin = time.perf_counter()
            try:
                for row in STAGES[name]():
                    result.add(name, row)
                    say(f"{name}: {row}")
                    if time.perf_counter() - begin > arguments.seconds:
                        break
            except Exception as error:
                result.add(name, {"case": "", "error": f"{type(error).__name__}: {error}"[:500]})
                say(f"{name}: {error!r}")
            seconds[name] = round(time.perf_counter() - begin, 1)
    result.finish({"seconds": seconds, **summary(result.data["raw"])})


if __name__ == "__main__":
    main()
