"""Claim: whatever a remote store does, no decision is wrong and no launch waits for it.

    python -m benchmarks.fleet.remote_faults --out benchmarks/results/remote_faults.json

CPU only, on a null device; needs redis-server. In each of the rounds several stores of this process use remote
stores that misbehave, each in another way: never answering, hanging up, sending nonsense or bytes without end,
redirecting, being full, not being there; a real Redis behind a proxy that turns a bit or cuts an answer short; rows
that are no records; a worker process that is killed. Meanwhile this process goes on launching a kernel whose config is
decided, adds measurements, and asks for decisions. Reported are the wall seconds that the remote store's code takes
in the launching thread, and the seconds of every launch, beside those of rounds without any remote store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment
from benchmarks.lib.fleet.servers import (
    MISBEHAVIOUR,
    cut_short,
    free_port,
    misbehaving_server,
    proxy,
    redis_server,
    spoil_bytes,
)
from benchmarks.lib.result_files import write_result
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Decision,
    Device,
    Evidence,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.store import Store
from forecast_autotune.store.files import kernel_of
from forecast_autotune.store.layers import StoreLayers
from forecast_autotune.store.remote.backends import entry_of, open_backend
from forecast_autotune.store.remote.client import RemoteClient
from forecast_autotune.store.rows import Row

DEVICE = Device("Example GPU", "cuda", "90")


def problem(number: int) -> Problem:
    """One of endlessly many; eight of them are of one kernel."""
    kernel = Kernel(
        f"kernel_{number // 8}", source="def kernel(): ...\n" * 20, source_sha256=f"{number // 8:064x}"
    )
    argument = Argument("a", "tensor", "float16", (128 << (number % 8), 64), (64, 1), aligned=True)
    return Problem.of(kernel, [argument], DEVICE, key=[str(number % 8)], toolchain={"triton": "3.6.0"})


def measurement(of: Problem, number: int, at: str = "") -> Measurement:
    """A time of the candidate of this number."""
    candidate = Candidate(Config.of({"BLOCK": number}))
    ms = 0.1 + (number * 7919 % 1000) / 1000
    return Measurement(of.id, candidate, Outcome.OK, ms, repeats=20, protocol="example", at=at)


def decision(of: Problem, chosen: Measurement) -> Decision:
    """The decision for that candidate."""
    return Decision(
        *(of.id, chosen.candidate, Evidence.MEASURED, "example", 0.05, 0.02, 100, 10),
        median_ms=chosen.median_ms,
        at=chosen.at,
    )


def row(record: Problem | Measurement | Decision) -> Row:
    """The row of a record."""
    result = Row.of(record.to_json())
    assert result is not None
    return result


def waited_for_core_s() -> float:
    """Seconds that this thread was ready to run while the kernel had given its core to another."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


FAULTS = (*MISBEHAVIOUR, "bit turned", "answer cut", "not there", "no records", "worker killed")
STALL_S = 0.005
TOLD, OWN, ASKED = 0, 1, 2
"""Numbers of problems: decided by the remote store, decided here, and known to nobody."""


def serve_faults(ports: Any, target: int, stop: Any) -> None:
    """The child in which all misbehaving servers run, so that they do not take this process's time."""
    with contextlib.ExitStack() as stack:
        behaviours: dict[str, Callable[..., None]] = dict(MISBEHAVIOUR)
        behaviours["bit turned"] = proxy(target, spoil_bytes, 1)
        behaviours["answer cut"] = proxy(target, cut_short, 2)
        ports.send({name: stack.enter_context(misbehaving_server(do)) for name, do in behaviours.items()})
        stop.wait()


@contextlib.contextmanager
def fault_addresses(folder: Path) -> Iterator[dict[str, str]]:
    """Addresses of remote stores by what is wrong with them; the real Redis behind them holds one decision."""
    with redis_server(folder) as sound:
        backend = open_backend(sound)
        result = problem(TOLD)
        rows = [row(result), row(measurement(result, 1)), row(decision(result, measurement(result, 1)))]
        backend.add(entry_of(kernel_of(result), result.id), {r.digest: r.line for r in rows})
        bad = problem(ASKED)
        backend.add(entry_of(kernel_of(bad), bad.id), {r.digest: r.line for r in rows})
        here, there = multiprocessing.Pipe()
        stop = multiprocessing.Event()
        port = int(sound.rsplit(":", 1)[1].split("/")[0])
        child = multiprocessing.Process(target=serve_faults, args=(there, port, stop), daemon=True)
        child.start()
        try:
            fields = {name: f"redis://127.0.0.1:{p}/0" for name, p in here.recv().items()}
            fields["not there"] = f"redis://127.0.0.1:{free_port()}/0"
            yield {**fields, "no records": sound, "worker killed": sound}
        finally:
            stop.set()
            child.join(10.0)
            child.kill()


class Timings:
    """Seconds of calls without those that they waited for a core, which on a busy machine are of other processes.

    Waiting for a lock, the interpreter's included, counts.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.wall: list[float] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        waited, begin = waited_for_core_s(), time.perf_counter()
        try:
            yield
        finally:
            wall = time.perf_counter() - begin
            self.wall.append(wall)
            self.seconds.append(max(0.0, wall - (waited_for_core_s() - waited)))

    def to_json(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        picked = {
            f"p{q:g}_ms": 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))]
            for q in (50, 99.9)
        }
        return {
            "calls": len(ordered),
            **{name: round(ms, 4) for name, ms in picked.items()},
            "p100_ms": round(1e3 * ordered[-1], 3),
            "over_5_ms": sum(s > STALL_S for s in ordered),
            "wall_p100_ms": round(1e3 * max(self.wall), 3),
            "wall_over_5_ms": sum(s > STALL_S for s in self.wall),
        }


def decided_kernel() -> Callable[[], object]:
    """A launch of a tuned kernel whose key is decided."""
    import torch
    import triton

    from benchmarks.lib.fleet.small_kernel import double
    from forecast_autotune import autotune

    listed = [triton.Config({"BLOCK": 128}, num_warps=w) for w in (2, 4)]
    tuner = autotune(configs=listed, key=["n"], store=False)(double)
    x = torch.zeros(4096)

    def launch() -> object:
        return tuner[(32,)](x, x, 4096)

    launch()
    return launch


class Program:
    """A store over one remote store that misbehaves, as a tuner uses it; the time of the remote code is measured."""

    def __init__(
        self, folder: Path, fault: str, address: str, wait_s: float, times: dict[str, Timings]
    ) -> None:
        self.fault, self.times = fault, times
        self.store = Store(folder)
        self.client = RemoteClient(address, self.store._notes, wait_s)
        self.store.layers = StoreLayers((), self.store._notes, self.client)
        self.client.start()
        self.wrong = self.answered = 0
        self.step = 0

    def use(self) -> None:
        """One step of a program: a measurement is kept, a decision asked for; every answer is checked."""
        self.step += 1
        own = problem(OWN)
        m = measurement(own, self.step)
        with self.times["offer"].timed():
            self.store.layers.offer(own, m)
        if self.step == 3:
            self.store.add(own, m)
            self.store.put_decision(own, decision(own, m))
        for number in (TOLD, ASKED, OWN):
            self.ask(problem(number), number)
        if self.fault == "worker killed" and self.client._worker is not None and self.step % 20 == 5:
            with contextlib.suppress(OSError):
                os.kill(self.client._worker.pid, signal.SIGKILL)

    def ask(self, p: Problem, number: int) -> None:
        with self.times["ask"].timed():
            result = self.store.decision(p)
        right = decision(p, measurement(p, 1)) if number == TOLD else None
        if number == OWN and self.step >= 3:
            right = decision(p, measurement(p, 3))
        self.answered += result is not None and number == TOLD
        self.wrong += result is not None and result != right
        self.wrong += number == OWN and self.step >= 3 and result is None

    def close(self) -> None:
        self.client.close(0.0)
        self.client._end_worker(kill=True)


def launch_for(launch: Callable[[], object], seconds: float, times: Timings, use: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            with times.timed():
                launch()
            time.sleep(0.001)  # a program does other things, too; and the other threads run
        use()


def run(faults: int, at_once: int, seconds: float, wait_s: float, seed: int) -> dict[str, Any]:
    """All rounds; see the module."""
    from forecast_integrations.triton.null_device import null_device

    chance = random.Random(seed)
    names = [FAULTS[i % len(FAULTS)] for i in range(faults)]
    chance.shuffle(names)
    times = {name: Timings() for name in ("launch", "launch_without_remote", "offer", "ask")}
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="remote-faults-") as name,
        fault_addresses(Path(name)) as addresses,
    ):
        os.environ["TRITON_CACHE_DIR"] = f"{name}/triton"
        with null_device():
            launch = decided_kernel()
            while names:
                batch, names = names[:at_once], names[at_once:]
                programs = [
                    Program(Path(name) / f"{len(names)}-{i}", fault, addresses[fault], wait_s, times)
                    for i, fault in enumerate(batch)
                ]
                # Started when a kernel is decorated, before the first launch.
                while any(p.client._worker is None and not p.client.counts.failures for p in programs):
                    time.sleep(0.01)

                def use(programs: list[Program] = programs) -> None:
                    for program in programs:
                        program.use()

                launch_for(launch, seconds, times["launch"], use)
                for program in programs:
                    counts["wrong"] += program.wrong
                    counts["answered"] += program.answered > 0
                    counts["failed_over"] += program.client.counts.failures > 0
                    counts["warnings_beyond_one"] += max(0, len(program.store.issued_warnings) - 1)
                    counts["queue_over_bound"] += program.client._queue.size > 4 * 1024 * 1024
                    program.close()
                launch_for(launch, seconds / 4, times["launch_without_remote"], lambda: None)
                print(f"{faults - len(names)} faults, {dict(counts)}", flush=True)
    shown = ("wrong", "answered", "failed_over", "warnings_beyond_one", "queue_over_bound")
    return {
        "faults": faults,
        "wait_s": wait_s,
        **{n: counts[n] for n in shown},
        **{n: t.to_json() for n, t in times.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=11, help="remote stores in use at a time")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a round")
    parser.add_argument("--wait", type=float, default=0.0, help="as FORECAST_AUTOTUNE_REMOTE_WAIT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = run(arguments.faults, arguments.at_once, arguments.seconds, arguments.wait, arguments.seed)
    result = {"claim": "remote_faults", "environment": environment(arguments.seed), "summary": answer}
    print(json.dumps(result, indent=1))
    write_result(arguments.out, result)
    return int(bool(answer["wrong"] or answer["warnings_beyond_one"] or answer["queue_over_bound"]))


if __name__ == "__main__":
    sys.exit(main())
