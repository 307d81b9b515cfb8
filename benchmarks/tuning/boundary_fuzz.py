"""Claim: what runs under `triton.autotune` runs with us, whatever its functions need of their process and thread.

    python -m benchmarks.tuning.boundary_fuzz --out RESULT.json [--programs 240] [--device null|cuda] [--only 17]

Programs are drawn by seed: heuristics, hooks, prunings, closures, subclasses, wrapped tuners and kernels with their own
`run`, which ask the device, the state of a thread, a context variable, a lock or an open file, or raise. Each runs
under plain Triton and with us, in processes of its own. With `--device null` kernels are compiled and launches do
nothing: the calls of the program's functions, the exceptions and the configs are compared. With `--device cuda` (60
programs by default, under three minutes) outputs are, too, with those of plain Triton under the config that we chose.

One difference is meant: where one config raises what Triton does not forgive, its sweep ends and ours goes on. These
programs are counted as `went_on`. A call that raises under both is compared by its exception alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from forecast_integrations.triton.null_device import null_device

SEED = 65
NEEDS = ("nothing", "device", "thread-local", "context", "autocast", "grad mode", "lock", "file")
"""State that a function of a program reads, besides its arguments."""
FAILURES = ("",) * 10 + ("one", "all")
"""For which configs a function raises."""
ERRORS = (ValueError, RuntimeError, AssertionError, LookupError)
PLACES = (
    "heuristic",
    "outer heuristic",
    "config hook",
    "pre hook",
    "post hook",
    "prune",
    "model",
    "run",
    "launch hook",
    "grid",
)
"""Functions of a program's that may be there."""
TUNERS = ("plain", "plain", "plain", "own run", "own prune", "own bench", "do_bench")
WRAPPERS = ("", "", "", "pin", "lock", "record", "bench")
KERNELS = (
    *("scale", "add", "constant", "assert one", "shared one") * 3,
    *("assert all", "shared all", "name", "power"),
)
_MILLISECONDS = {1: 1.6, 2: 1.3, 4: 1.0, 8: 1.15}
"""Times of the null device by warps: no two configs of a program have the same."""
_TIMEOUT_S = 120.0
_STATE = threading.local()
_SHOWN: contextvars.ContextVar[int] = contextvars.ContextVar("_SHOWN", default=0)
_LOCK = threading.RLock()


@triton.constexpr_function
def _asked() -> int:
    from benchmarks.tuning.boundary_fuzz import HOME as home

    return home.ask("device")


@triton.jit
def scale(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def add(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(out + i, mask=i < n) + FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def assert_one(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 128, "128 is refused")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def assert_all(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "all are refused")


@triton.jit
def name(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out, undefined)  # type: ignore[name-defined]  # noqa: F821


@triton.jit
def power(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK - (BLOCK == 128))
    tl.store(out + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def constant(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    factor: tl.constexpr = _asked()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, (FACTOR + factor) * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def total(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    # In one place for every grid: what configs that were tried leave elsewhere is not the chosen one's.
    tl.store(out, FACTOR * tl.sum(tl.load(x + i, mask=i < n), axis=0), mask=tl.program_id(0) == 0)


_SOURCES = {
    **{
        "scale": scale,
        "add": add,
        "assert one": assert_one,
        "assert all": assert_all,
        "name": name,
        "power": power,
    },
    **{"constant": constant, "shared one": total, "shared all": total},
}
_SHARED_BYTES = {"shared one": 12, "shared all": 4}
"""Limits of the null device under which a sum over 4 warps, or over 2, does not fit."""


class Home:
    """The process, thread and state that a program's functions may ask for, and a record of their calls."""

    def __init__(self) -> None:
        self.place, self.on_cuda, self.file = (0, 0), False, tempfile.TemporaryFile("w+")  # noqa: SIM115 as long as the process
        self.events: set[str] = set()

    def settle(self, on_cuda: bool) -> None:
        """This process and thread is the program's from now on."""
        self.place, self.on_cuda = (os.getpid(), threading.get_ident()), on_cuda
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115 as long as the process
        self.file.write("6")
        _STATE.number = 5
        _SHOWN.set(4)

    def ask(self, need: str) -> int:
        """A number that only the program's own process and thread has. Raises what a real program would meet."""
        if need == "device":
            if self.on_cuda:
                return 3 if torch.cuda.get_device_capability()[0] > 2 else 0
            if (os.getpid(), threading.get_ident()) != self.place:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return 3
        if need == "lock":
            with _LOCK:
                return 2
        if need == "file":
            self.file.seek(0)
            return int(self.file.read())
        read: dict[str, Callable[[], int]] = {
            "nothing": lambda: 1,
            "thread-local": lambda: _STATE.number,
            "context": _SHOWN.get,
            "autocast": lambda: 2 + torch.is_autocast_enabled("cpu"),
            "grad mode": lambda: 2 + torch.is_grad_enabled(),
        }
        return read[need]()


HOME = Home()


def draw(number: int) -> dict[str, Any]:
    """The description of one program."""
    rng = random.Random(f"{SEED}/{number}")
    places = rng.sample(PLACES, rng.randint(1, 4))
    functions = {}
    for place in places:
        fails = rng.choice(FAILURES)
        error = rng.choice(ERRORS).__name__
        functions[place] = {"needs": rng.choice(NEEDS), "fails": fails, "error": error if fails else ""}
    warps, kernel = rng.sample(list(_MILLISECONDS), 3), rng.choice(KERNELS)
    if kernel == "add":  # its output depends on how often it was launched, unless Triton restores it
        functions = {place: f for place, f in functions.items() if place not in ("pre hook", "post hook")}
    return {
        "number": number,
        "functions": functions,
        "kernel": kernel,
        "tuner": rng.choice(TUNERS),
        "wrapper": rng.choice(WRAPPERS),
        "wrapped_first": rng.random() < 0.5,
        "configs": list(zip((64, 128, 256), warps, strict=True)),
        "restore": "restore_value" if kernel == "add" else rng.choice(("", "reset_to_zero", "restore_value")),
        "by_name": rng.random() < 0.3,
        "autocast": rng.random() < 0.3,
        "thread": rng.random() < 0.1,
        "signals": rng.random() < 0.15,
        "allocator": rng.random() < 0.2,
        "mode": rng.choice(("exhaustive",) * 4 + ("tune", "tune", "background")),
        "compiler": rng.choice(("auto", "auto", "auto", "threads")),
        "decorated": rng.random() < 0.4,
    }


# --- a program ---


def function(spec: dict[str, Any], place: str) -> Callable[[dict[str, Any], str], int]:
    """One of a program's functions: it notes its call, asks for what it needs, and may raise."""
    given = spec["functions"][place]

    def call(named: dict[str, Any], note: str = "") -> int:
        if os.getpid() == HOME.place[0]:
            HOME.events.add(f"{place} {named.get('BLOCK')} {note}".strip())
        if given["fails"] == "all" or (given["fails"] == "one" and named.get("BLOCK") == 256):
            raise next(e for e in ERRORS if e.__name__ == given["error"])(f"no {place} here")
        return HOME.ask(given["needs"])

    return call


def kernel_of(spec: dict[str, Any]) -> Any:
    """The kernel under its heuristics. FACTOR comes from the innermost that there is."""
    functions, source = spec["functions"], _SOURCES[spec["kernel"]]
    supplied = "heuristic" in functions or "outer heuristic" in functions
    kernel: Any = triton.jit(source.fn)
    if "run" in functions:
        ask = function(spec, "run")

        class OwnRun(JITFunction):  # type: ignore[misc]
            def run(self, *args: Any, **kwargs: Any) -> Any:
                return super().run(*args, **{"FACTOR": ask(kwargs), **kwargs})

        kernel = OwnRun(source.fn)
        supplied = True
    if "launch hook" in functions:
        hook = function(spec, "launch hook")
        kernel.add_pre_run_hook(lambda *args, **kwargs: hook(kwargs))
    for place in ("heuristic", "outer heuristic"):
        if place in functions:
            kernel = triton.heuristics({"FACTOR": function(spec, place)})(kernel)
    return kernel if supplied else triton.heuristics({"FACTOR": lambda named: 2})(kernel)


def tuner_of(spec: dict[str, Any], decorate: Callable[..., Any]) -> Any:
    """The tuner, by `triton.autotune` or ours; a subclass is Triton's own."""
    functions = spec["functions"]
    hook = function(spec, "config hook") if "config hook" in functions else None
    listed = [
        triton.Config({"BLOCK": b}, num_warps=w, num_stages=2, pre_hook=hook) for b, w in spec["configs"]
    ]
    options: dict[str, Any] = {spec["restore"]: ["out"]} if spec["restore"] else {}
    if "pre hook" in functions:
        before = function(spec, "pre hook")
        options["pre_hook"] = lambda named, reset_only=False: None if reset_only else before(named)
    if "post hook" in functions:
        after = function(spec, "post hook")
        options["post_hook"] = lambda named, exception=None: after(named, type(exception).__name__)
    rules: dict[str, Any] = {}
    if "prune" in functions:
        prune = function(spec, "prune")
        rules["early_config_prune"] = lambda configs, named, **more: configs[: min(2, prune({}))]
    if "model" in functions:
        model = function(spec, "model")
        rules |= {"perf_model": lambda **named: model(named) + named["BLOCK"], "top_k": 2}
    if rules:
        options["prune_configs_by"] = rules
    if spec["tuner"] == "do_bench":
        options["do_bench"] = lambda call, quantiles: (call(), [1.0 + len(HOME.events) * 0.0] * 3)[1]
    kernel = kernel_of(spec)
    if spec["tuner"] not in ("own run", "own prune", "own bench"):
        return decorate(configs=listed, key=["n"], **options)(kernel)

    class Own(Autotuner):  # type: ignore[misc]
        def run(self, *args: Any, **kwargs: Any) -> Any:
            HOME.ask("device")
            return super().run(*args, **kwargs)

        def prune_configs(self, kwargs: Any) -> Any:
            kept = super().prune_configs(kwargs)
            return kept[::-1] if spec["tuner"] == "own prune" else kept

    if spec["tuner"] == "own bench":
        Own._bench = lambda self, *args, config, **meta: Autotuner._bench(self, *args, config=config, **meta)
    names = ("reset_to_zero", "restore_value")
    positional = [options.pop(one, None) for one in names]
    return Own(kernel, kernel.arg_names, listed, ["n"], *positional, **options)


def wrap(kind: str) -> None:
    """Put a framework's function in place of one of `Autotuner`'s."""
    run, bench = Autotuner.run, Autotuner._bench

    @functools.wraps(run)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        listed = self.configs
        if kind == "pin":
            self.configs = listed[-1:]
        try:
            with _LOCK if kind == "lock" else contextlib.nullcontext():
                return run(self, *args, **kwargs)
        finally:
            self.configs = listed
            HOME.events.add(f"wrapper {kind}")

    def benched(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        HOME.events.add(f"bench {config.kwargs['BLOCK']}")
        return bench(self, *args, config=config, **meta)

    if kind == "bench":
        Autotuner._bench = benched
    elif kind:
        Autotuner.run = wrapped


def run(
    spec: dict[str, Any], arm: str, on_cuda: bool, pinned: dict[int, int] | None = None
) -> list[dict[str, Any]]:
    """A program's calls under one arm: the exception, the config, what its functions noted, a digest of the output.

    `pinned` are the BLOCKs of the configs that each call, by its size, is to be launched with.
    """
    from forecast_autotune import autotune, patch_triton

    HOME.settle(on_cuda)
    decorate: Callable[..., Any] = triton.autotune
    if spec["wrapped_first"]:
        wrap(spec["wrapper"])
    if arm == "ours":
        patch_triton()
        if spec["decorated"]:
            decorate = autotune
    if not spec["wrapped_first"]:
        wrap(spec["wrapper"])
    if spec["allocator"]:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    if spec["signals"]:
        signal.signal(signal.SIGALRM, lambda *_: HOME.events.add("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    tuner, calls = tuner_of(spec, decorate), []
    for n in (1000, 1000, 3000):
        if pinned is not None and n not in pinned:
            calls.append({})
            continue
        every = tuner.configs
        if pinned is not None:
            tuner.configs = [c for c in every if c.kwargs["BLOCK"] == pinned[n]]
        HOME.events.clear()
        calls.append(one_call(spec, tuner, n))
        tuner.configs = every
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return calls


def one_call(spec: dict[str, Any], tuner: Any, n: int) -> dict[str, Any]:
    """One call of a program's tuner."""
    device = "cuda" if HOME.on_cuda else "cpu"
    x = torch.arange(n, dtype=torch.float32, device=device)
    out = torch.ones(n, dtype=torch.float32, device=device)
    grid: Any = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
    if "grid" in spec["functions"]:
        ask = function(spec, "grid")
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]) + 0 * ask(dict(meta)),)  # noqa: E731
    named = {"out": out, "n": n} if spec["by_name"] else {}
    given = (x,) if spec["by_name"] else (x, out, n)
    result: dict[str, Any] = {}
    try:
        with torch.autocast("cpu") if spec["autocast"] else contextlib.nullcontext():
            tuner[grid](*given, **named)
            result["config"] = tuner.best_config.kwargs["BLOCK"]
    except Exception as error:
        result["raised"] = f"{type(error).__name__}: {error}"[:300]
        result["where"] = traceback.format_exc()[-2000:]
    if HOME.on_cuda:
        result["output"] = hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()[:16]
    # A grid is asked for every config, also for those that do not compile.
    result["events"] = sorted(e for e in tuple(HOME.events) if e != "alarm" and not e.startswith("grid"))
    return result


# --- both arms, compared ---


def in_process(work: Callable[[], Any]) -> Any:
    """The result of `work` in a forked process, as JSON has it; a text where it died or hung."""
    pipe, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(pipe)
            text = json.dumps(work())
        except BaseException:
            text = json.dumps(traceback.format_exc()[-3000:])
        with os.fdopen(end, "w") as stream:
            stream.write(text)
        os._exit(0)
    os.close(end)
    with os.fdopen(pipe) as stream:
        if not select.select([stream], [], [], _TIMEOUT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        text = stream.read()
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else f"died with status {status}"


@contextlib.contextmanager
def surroundings(spec: dict[str, Any], arm: str, on_cuda: bool) -> Iterator[None]:
    """Settings, empty caches, and the device."""
    # A background thread may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ |= {
            "FORECAST_AUTOTUNE_CACHE_DIR": f"{folder}/store",
            "FORECAST_AUTOTUNE_MODE": spec["mode"],
            "FORECAST_AUTOTUNE_COMPILER": spec["compiler"],
            "FORECAST_AUTOTUNE_WORKERS": "2",
            "TRITON_CACHE_DIR": f"{folder}/binaries",
        }
        if on_cuda:
            yield
            return
        limit = _SHARED_BYTES.get(spec["kernel"], 232448)
        with null_device(lambda m: _MILLISECONDS[m.num_warps], shared_memory_bytes=limit):
            yield


def arm_of(spec: dict[str, Any], arm: str, on_cuda: bool, pinned: dict[int, int] | None = None) -> Any:
    """The calls of a program under one arm, in a thread of its own where it has one."""

    def work() -> Any:
        with surroundings(spec, arm, on_cuda):
            if not spec["thread"]:
                return run(spec, arm, on_cuda, pinned)
            spec["signals"] = False  # which only the main thread may ask for
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(run, spec, arm, on_cuda, pinned).result()

    return in_process(work)


def compared(spec: dict[str, Any], on_cuda: bool) -> dict[str, Any]:
    """Both arms of one program, and how they differ: `same`, `went_on` or `differs`."""
    plain, ours = arm_of(spec, "plain", on_cuda), arm_of(spec, "ours", on_cuda)
    if isinstance(plain, str) or isinstance(ours, str):
        verdict = "same" if plain == ours and "died" not in str(plain) else "differs"
        return {**spec, "verdict": verdict, "plain": plain, "ours": ours}
    pinned: list[dict[str, Any]] = [{}] * len(ours)
    if on_cuda:
        chosen = {n: c["config"] for n, c in zip((1000, 1000, 3000), ours, strict=True) if "config" in c}
        pinned = arm_of(spec, "plain", on_cuda, chosen)
    verdicts = [call_verdict(spec, *three) for three in zip(plain, ours, pinned, strict=True)]
    verdict = "differs" if "differs" in verdicts else "went_on" if "went_on" in verdicts else "same"
    kept = {} if verdict != "differs" else {"plain": plain, "ours": ours, "pinned": pinned}
    outcomes = sorted({"raised" if "raised" in call else "ran" for call in plain})
    return {**spec, "verdict": verdict, "under_plain": outcomes, **kept}


def call_verdict(
    spec: dict[str, Any], plain: dict[str, Any], ours: dict[str, Any], pinned: dict[str, Any]
) -> str:
    """How one call differs."""
    if "raised" in plain:
        said = [call.get("raised", "").split("\n")[0] for call in (plain, ours)]
        if said[0] == said[1].replace("'ForecastAutotuner' object", "'Autotuner' object"):
            return "same"
        return "went_on" if is_lenient(spec, plain["raised"]) else "differs"
    if "raised" in ours:
        return "differs"
    # On a device another config may win: then functions are asked for another one, too.
    events = [
        {e if plain["config"] == ours["config"] else e.rstrip("0123456789 ") for e in call["events"]}
        for call in (plain, ours)
    ]
    if events[0] != events[1] and spec["mode"] == "exhaustive":
        return "differs"
    if "output" in ours:
        return "same" if ours["output"] == pinned.get("output") else "differs"
    exact = spec["mode"] == "exhaustive"
    return "same" if plain["config"] == ours["config"] or not exact else "differs"


def is_lenient(spec: dict[str, Any], raised: str) -> bool:
    """Whether a config's own launch failed with an error that ends Triton's sweep, and not ours."""
    by_kernel = raised.startswith("CompilationError") and spec["kernel"] == "power"
    places = [place for place in ("run", "launch hook", "grid") if place in spec["functions"]]
    return by_kernel or any(f"no {place} here" in raised for place in places)


def load() -> None:
    """Have every process that is forked from now on find loaded what all of them need; no device is asked."""
    import triton.testing  # noqa: F401

    import forecast_integrations.triton.patch  # noqa: F401
    from forecast_autotune.features.trace import load_front_end
    from forecast_autotune.surrogates.protocol import FileBackedSurrogate
    from forecast_integrations.triton.engine import default_surrogate

    load_front_end()
    surrogate = default_surrogate()
    if isinstance(surrogate, FileBackedSurrogate):
        surrogate.load()


def main() -> None:
    command_line = result_files.parser(__doc__)
    command_line.add_argument("--programs", type=int, help="how many; 240 on the null device, 60 on CUDA")
    command_line.add_argument("--device", choices=("null", "cuda"), default="null")
    command_line.add_argument("--only", type=int, help="the number of one program, which is shown whole")
    arguments = result_files.parse_arguments(command_line, on_host=True)
    on_cuda = arguments.device == "cuda"
    count = arguments.programs or (60 if on_cuda else 240)
    numbers = range(count) if arguments.only is None else [arguments.only]
    if on_cuda:  # a process that has asked the device cannot fork others that do
        known = in_process(result_files.environment)
        setattr(result_files, "environment", lambda seed=None: known)  # noqa: B010
    result = result_files.ResultFile(arguments, "boundary_fuzz")
    load()
    at_once = 8
    with ThreadPoolExecutor(at_once) as pool:  # each waits for processes of its own
        for row in pool.map(lambda number: compared(draw(number), on_cuda), numbers):
            result.add("programs", row)
            say(f"program {row['number']}: {row['verdict']}")
            if arguments.only is not None or row["verdict"] == "differs":
                print(json.dumps(row, indent=1)[:6000], flush=True)
    rows = result.data["raw"]["programs"]
    counted = Counter(row["verdict"] for row in rows)
    raised = sum("raised" in row.get("under_plain", ()) for row in rows)
    result.finish(
        {"programs": len(rows), **{k: counted[k] for k in ("same", "went_on", "differs")}, "raise": raised}
    )
    sys.exit(counted["differs"] > 0)


if __name__ == "__main__":
    from benchmarks.tuning import boundary_fuzz

    boundary_fuzz.main()  # kernels ask the state of the module by its name
