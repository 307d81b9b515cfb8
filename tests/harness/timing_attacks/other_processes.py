"""Families whose other processes disturb, or work for, the one that is timed. Texts of programs, never run here."""

from __future__ import annotations

_RUN = """
def run(**given):
    return honest(**given)
"""

NOISE = {
    "spinning_children": _RUN
    + """
for _ in range(4):
    if os.fork() == 0:
        while True:
            pass
""",
    "spinning_daemons": _RUN
    + """
if os.fork() == 0:
    os.setsid()
    for _ in range(4):
        if os.fork() == 0:
            for fd in range(3, 64):
                try:
                    os.close(fd)
                except OSError:
                    pass
            while True:
                pass
    os._exit(0)
""",
    "threads_that_fill_caches": _RUN
    + """
def burn():
    block = torch.ones(1 << 22)
    while True:
        block.add_(1.0)


for _ in range(3):
    threading.Thread(target=burn, daemon=True).start()
""",
    "children_that_copy_memory": _RUN
    + """
for _ in range(3):
    if os.fork() == 0:
        block = bytearray(32 << 20)
        while True:
            block[: 16 << 20] = block[16 << 20 :]
""",
    "noise_that_pauses_for_itself": """
turn = mapped(8)
for _ in range(3):
    if os.fork() == 0:
        while True:
            if not turn[0]:
                for _ in range(20000):
                    pass
            else:
                time.sleep(0.00005)


def run(**given):
    turn[0] = 1
    found = honest(**given)
    turn[0] = 0
    return found
""",
    "children_that_write_files": _RUN
    + """
for n in range(3):
    if os.fork() == 0:
        while True:
            with open(f"tmp/noise{n}", "wb") as file:
                file.write(b"x" * (4 << 20))
                file.flush()
                os.fsync(file.fileno())
""",
}

PRESSURE = {
    "holds_much_memory": _RUN
    + """
kept = [bytearray(os.urandom(1 << 16)) * 4096 for _ in range(6)]
""",
    "maps_and_unmaps": _RUN
    + """
def churn():
    while True:
        with mmap.mmap(-1, 64 << 20) as block:
            for at in range(0, 64 << 20, 4096):
                block[at] = 1


threading.Thread(target=churn, daemon=True).start()
""",
    "touches_all_that_is_shared": """
def run(**given):
    found = honest(**given)
    if not kept:
        for state in gc.get_objects():
            if type(state) is dict and "shared" in state and "held" in state:
                kept.append(state["shared"][-(8 << 20) :].sum())
    return found


kept = []
""",
    "leaves_the_caches_to_others": """
dirt = torch.ones(1 << 20)
last = []


def run(**given):
    found = honest(**given)
    dirt.add_(1.0)
    return found
""",
    "files_in_memory": _RUN
    + """
for n in range(6):
    with open(f"tmp/held{n}", "wb") as file:
        file.write(b"y" * (16 << 20))
""",
}

WORKING_CHILDREN = {
    "a_child_that_watches_the_memory": """
known = {}


def run(**given):
    key = tuple(t.shape for t in given.values())
    if key not in known:
        found = honest(**given)
        result = mapped(found.nbytes).view(found.dtype).reshape(found.shape)
        marks = mapped(8 + len(mark(given)))
        if os.fork() == 0:
            while True:
                now = torch.frombuffer(bytearray(mark(given)), dtype=torch.uint8)
                if not torch.equal(marks[8:], now):
                    result.copy_(honest(**given))
                    marks[8:] = now
                time.sleep(0.00005)
        known[key] = result, marks
        return found
    result, marks = known[key]
    if torch.equal(marks[8:], torch.frombuffer(bytearray(mark(given)), dtype=torch.uint8)):
        return result.clone()
    return honest(**given)
""",
    "children_that_share_the_work": """
known = {}


def run(**given):
    name = next(iter(given))
    key = tuple(t.shape for t in given.values())
    rows = given[name].shape[0]
    if rows < 64:
        return honest(**given)
    if key not in known:
        found = honest(**given)
        result = mapped(found.nbytes).view(found.dtype).reshape(found.shape)
        orders = mapped(8)
        half = rows // 2
        if os.fork() == 0:
            while True:
                if orders[0] == 1:
                    result[half:] = honest(**{**given, name: given[name][half:]})
                    orders[0] = 2
        known[key] = result, orders, half
        return found
    result, orders, half = known[key]
    orders[0] = 1
    result[:half] = honest(**{**given, name: given[name][:half]})
    while orders[0] != 2:
        pass
    return result.clone()
""",
    "a_child_per_launch": """
def run(**given):
    name = next(iter(given))
    rows = given[name].shape[0]
    half = rows // 2
    like = honest(**{**given, name: given[name][:1]})
    result = mapped(rows * like.nbytes).view(like.dtype)[: rows * like.shape[1]].reshape(rows, like.shape[1])
    child = os.fork()
    if child == 0:
        result[half:] = honest(**{**given, name: given[name][half:]})
        os._exit(0)
    result[:half] = honest(**{**given, name: given[name][:half]})
    os.waitpid(child, 0)
    return result.clone()
""",
    "a_child_that_goes_on": """
known = {}


def run(**given):
    key = tuple(t.shape for t in given.values())
    if key not in known:
        found = honest(**given)
        known[key] = mapped(found.nbytes).view(found.dtype).reshape(found.shape)
        known[key].copy_(found)
        if os.fork() == 0:
            os.setsid()
            while True:
                known[key].copy_(honest(**given))
    return known[key].clone()
""",
}

FAMILIES = {
    "noise in the other's turns": NOISE,
    "memory and cache pressure": PRESSURE,
    "children that compute": WORKING_CHILDREN,
}
