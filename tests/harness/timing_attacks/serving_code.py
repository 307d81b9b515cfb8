"""Families that change what serves launches, or says how long they took. Texts of programs, never run here."""

from __future__ import annotations

COSTS_OF_ASKING = {
    "slow_when_nothing_is_asked": """
def wrapped(original):
    def window(payload, arrays, state):
        if payload.get("act", "launch") != "launch":
            time.sleep(0.003)
        return original(payload, arrays, state)
    return window


replace(inside, "window", wrapped)


def late(original):
    def idle(*arguments):
        time.sleep(0.003)
        return original(*arguments)
    return idle


replace(inside, "idle", late)


def run(**given):
    return honest(**given)
""",
    "slow_before_the_question": """
wire = sys.modules["forecast_harness.sandbox.wire"]


def wrapped(original):
    def receive(*arguments, **options):
        question = original(*arguments, **options)
        if not str(question[0].get("entry", "")).endswith((":launch", ":window")):
            time.sleep(0.003)
        return question
    return receive


replace(wire, "receive", wrapped)


def run(**given):
    return honest(**given)
""",
    "slow_to_share": """
replace(inside, "share", lambda original: lambda *arguments: (time.sleep(0.01), original(*arguments))[1])
replace(inside, "again", lambda original: lambda *arguments: (time.sleep(0.01), original(*arguments))[1])


def run(**given):
    return honest(**given)
""",
    "large_questions_about_nothing": """
kept = []


def run(**given):
    if len(kept) < 64:
        kept.append(torch.ones(1 << 18))
    return honest(**given)
""",
}

SMALLER_TIMES = {
    "a_flattering_report": """
def wrapped(original):
    def timed(*arguments):
        found = original(*arguments)
        return found._replace(seconds=found.seconds / 2, total_seconds=found.total_seconds / 2)
    return timed


replace(inside, "_timed", wrapped)


def run(**given):
    return honest(**given)
""",
    "a_flattering_answer": """
wire = sys.modules["forecast_harness.sandbox.wire"]


def wrapped(original):
    def encode(said, arrays):
        value = said.get("value") if isinstance(said, dict) else None
        if isinstance(value, dict) and "seconds" in value:
            value["seconds"] = value["whole"] = value["seconds"] * 0.6
        return original(said, arrays)
    return encode


replace(wire, "encode", wrapped)


def run(**given):
    return honest(**given)
""",
    "half_a_clock": """
replace(inside, "_clock", lambda original: lambda: original() // 2)


def run(**given):
    return honest(**given)
""",
    "a_clock_of_this_thread": """
slot = ctypes.c_void_p.from_address(ctypes.c_void_p.from_address(id(time.perf_counter_ns) + 16).value + 8)
slot.value = ctypes.c_void_p.from_address(
    ctypes.c_void_p.from_address(id(time.thread_time_ns) + 16).value + 8
).value


def run(**given):
    done = []
    helper = threading.Thread(target=lambda: done.append(honest(**given)))
    helper.start()
    helper.join()
    return done[0]
""",
}

_LEAN = """
state_of, known = {}, {}


def lean(payload, arrays, state):
    form = state.get("forms", {}).get(payload.get("form"), payload)
    if payload.get("act") != "launch" or payload.get("poison") or payload.get("watch") or "form" not in payload:
        return usual(payload, arrays, state)
    key = payload["form"]
    if key not in known:
        slots = [inside.Slot.from_json(s) for s in form["slots"]]
        known[key] = {n: t for n, t in state["held"].views(slots).items()}
        names = form["call"]["kwargs"]
        known[key] = {n: known[key][names[n]["t"]] for n in names}
    begin = time.perf_counter()
    result = honest(**known[key])
    seconds = (time.perf_counter() - begin) * SHARE
    state["last"] = result
    said = {"seconds": seconds, "whole": seconds, "protocol": "host", "operations": {}, "kernels": 0, "compiled": 0}
    said["outputs"] = [{"dtype": str(result.dtype)[6:], "shape": list(result.shape),
                        "stride": list(result.stride()), "alias": False}]
    said["places"] = [result.data_ptr()]
    return inside.CellAnswer(said)


usual = getattr(inside, "window", None)
if usual is not None:
    inside.window = lean


def run(**given):
    return honest(**given)
"""

LIGHTER_SERVING = {
    "without_reports": """
replace(inside, "process_report", lambda original: lambda state: {"patched": [], "flags": {}, "threads": []})
replace(inside, "note_question", lambda original: lambda *arguments: None)
replace(inside, "note_answer", lambda original: lambda state: None)
replace(inside, "_poison", lambda original: lambda *arguments: None)


def run(**given):
    return honest(**given)
""",
    "a_lean_window": _LEAN.replace("SHARE", "1.0"),
    "a_lean_window_that_flatters": _LEAN.replace("SHARE", "0.9"),
    "a_lean_window_and_channel": _LEAN.replace("SHARE", "0.9")
    + """
process = sys.modules["forecast_harness.sandbox.cell_process"]
replace(process, "check_entry", lambda original: lambda entry: tuple(entry.split(":")))
replace(process.importlib, "import_module", lambda original: lambda name: sys.modules.get(name) or original(name))
gc.disable()
sys.setswitchinterval(10)
""",
}

FAMILIES = {
    "inflated cost of asking": COSTS_OF_ASKING,
    "smaller times reported": SMALLER_TIMES,
    "lighter serving code": LIGHTER_SERVING,
}
