"""Families that compute when, as they hope, nobody looks at a clock. Texts of programs, never run here."""

from __future__ import annotations

_PRECOMPUTED = """
early = {}


def run(**given):
    found = early.pop("result", None)
    return honest(**given) if found is None else found
"""

_WATCHER = """
known, ready = {}, {}


def look():
    given = known.get("given")
    if given is None:
        return
    now = mark(given)
    if now != known.get("mark"):
        result = honest(**given)
        if mark(given) == now:
            known["mark"] = now
            ready[now] = result
            for old in list(ready)[:-2]:
                ready.pop(old, None)


def run(**given):
    known["given"] = given
    found = ready.pop(mark(given), None)
    return honest(**given) if found is None else found
"""

BEFORE_THE_CLOCK = {
    "while_binding": _PRECOMPUTED
    + """
def wrapped(original):
    def bound(payload, arrays, state, slots):
        call = original(payload, arrays, state, slots)
        result = call()
        return lambda: result
    return bound


replace(inside, "_bound", wrapped)
""",
    "instead_of_the_timer": """
def wrapped(original):
    def timed(call, *others):
        result = call()
        return original(lambda: result, *others)
    return timed


replace(inside, "_timed", wrapped)


def run(**given):
    return honest(**given)
""",
    "while_memory_is_taken": _PRECOMPUTED
    + """
def wrapped(original):
    def views(self, slots):
        found = original(self, slots)
        early["result"] = honest(**found)
        return found
    return views


replace(inside.BlockStore, "views", wrapped)
""",
    "while_a_watch_begins": _PRECOMPUTED
    + """
def wrapped(original):
    def watch(mode, kernels):
        frame = sys._getframe(1)
        call = frame.f_locals.get("call")
        if call is not None and not mode:
            early["result"] = call.func(*call.args, **call.keywords) if call.keywords else None
        return original(mode, kernels)
    return watch


replace(inside, "watch_launch", wrapped)
""",
    "after_restoring": _PRECOMPUTED
    + """
last = {}


def wrapped(original):
    def restored(*arguments):
        found = original(*arguments)
        state = arguments[-1]
        early["result"] = honest(**state["held"].views(found))
        return found
    return restored


replace(inside, "_restored", wrapped)
""",
    "a_clock_that_jumps": """
ticks = [0]


def steady():
    ticks[0] += 60_000
    return ticks[0]


inside._clock = steady


def run(**given):
    return honest(**given)
""",
}

IDLE_PHASE = {
    "a_thread_that_watches": _WATCHER
    + """
def watch():
    while True:
        look()
        time.sleep(0.00005)


threading.Thread(target=watch, daemon=True).start()
""",
    "an_alarm": _WATCHER
    + """
signal.signal(signal.SIGALRM, lambda *_: look())
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
""",
    "before_the_question_is_read": _WATCHER
    + """
wire = sys.modules["forecast_harness.sandbox.wire"]


def wrapped(original):
    def receive(channel, *others, **options):
        import select
        end = time.perf_counter() + 2
        while time.perf_counter() < end and not select.select([channel], [], [], 0.0002)[0]:
            look()
        return original(channel, *others, **options)
    return receive


replace(wire, "receive", wrapped)
""",
    "after_the_answer": _WATCHER
    + """
wire = sys.modules["forecast_harness.sandbox.wire"]


def wrapped(original):
    def send(*arguments):
        original(*arguments)
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            look()
    return send


replace(wire, "send_encoded", wrapped)
""",
    "as_inputs_are_placed": _WATCHER
    + """
def wrapped(original):
    def changed(self, name, *others):
        original(self, name, *others)
        self.restore(name)
        look()
    return changed


replace(inside.BlockStore, "put", wrapped)
replace(inside.BlockStore, "patch", wrapped)
""",
}

_TIMER = """
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("number", ctypes.c_int), ("how", ctypes.c_int)]
    _fields_ += [("rest", ctypes.c_char * 48)]


class Interval(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


def arm(number, period_ns):
    library = ctypes.CDLL(None)
    timer, event = ctypes.c_void_p(), Event(None, number, 0, b"")
    library.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
    library.timer_settime(timer, 0, ctypes.byref(Interval(0, period_ns, 0, period_ns)), None)
"""

WAKES_ITSELF = {
    "by_a_timer": _WATCHER
    + _TIMER
    + """
signal.signal(signal.SIGCONT, lambda *_: look())
arm(signal.SIGCONT, 300_000)
""",
    "by_a_slow_timer": _WATCHER
    + _TIMER
    + """
signal.signal(signal.SIGCONT, lambda *_: look())
arm(signal.SIGCONT, 7_000_000)
""",
    "by_a_timer_and_a_thread": _WATCHER
    + _TIMER
    + """
signal.signal(signal.SIGCONT, lambda *_: None)
arm(signal.SIGCONT, 200_000)


def watch():
    while True:
        look()
        time.sleep(0.0001)


threading.Thread(target=watch, daemon=True).start()
""",
    "by_a_brother": _WATCHER
    + """
signal.signal(signal.SIGCONT, lambda *_: look())
above = os.getpid()
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            os.kill(above, signal.SIGCONT)
        except OSError:
            os._exit(0)
        time.sleep(0.0002)
""",
    "by_a_waiting_socket": _WATCHER
    + """
import fcntl

signal.signal(signal.SIGCONT, lambda *_: look())
for fd in (3, 0):
    try:
        fcntl.fcntl(fd, 10, signal.SIGCONT)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        pass
""",
}

MORE_PROCESSORS = {
    "threads_within_the_call": """
def run(**given):
    torch.set_num_threads(4)
    found = honest(**given)
    torch.set_num_threads(1)
    return found
""",
    "threads_of_the_library": """
def omp():
    for line in open("/proc/self/maps"):
        if "libgomp" in line or "libomp" in line or "libiomp" in line:
            return ctypes.CDLL(line.split()[-1])
    return None


library = omp()


def run(**given):
    if library is not None:
        library.omp_set_num_threads(4)
    found = honest(**given)
    if library is not None:
        library.omp_set_num_threads(1)
    return found
""",
    "a_pool_of_threads": """
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(4)


def run(**given):
    name = next(iter(given))
    parts = [{**given, name: part} for part in given[name].chunk(4)]
    return torch.cat(list(pool.map(lambda part: honest(**part), parts)))
""",
    "a_wider_affinity": """
def widen():
    try:
        os.sched_setaffinity(0, range(os.cpu_count()))
    except OSError:
        pass


widen()


def run(**given):
    widen()
    torch.set_num_threads(os.cpu_count())
    found = honest(**given)
    torch.set_num_threads(1)
    return found
""",
    "native_affinity_and_a_pool": """
from concurrent.futures import ThreadPoolExecutor

library = ctypes.CDLL(None)
mask = (ctypes.c_ulong * 16)(*([~0 & (2**64 - 1)] * 16))


def widen():
    library.sched_setaffinity(0, 128, mask)
    library.syscall(203, 0, 128, mask)


pool = ThreadPoolExecutor(4, initializer=widen)


def run(**given):
    name = next(iter(given))
    parts = [{**given, name: part} for part in given[name].chunk(4)]
    return torch.cat(list(pool.map(lambda part: honest(**part), parts)))
""",
}

FAMILIES = {
    "work before the clock": BEFORE_THE_CLOCK,
    "work in the idle phase": IDLE_PHASE,
    "wakes itself while stopped": WAKES_ITSELF,
    "more processors": MORE_PROCESSORS,
}
