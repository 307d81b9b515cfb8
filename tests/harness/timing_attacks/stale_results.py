"""Families that answer before, or without, computing. Texts of programs, never run here."""

from __future__ import annotations

_STALE = """
kept = {}


def stale(given):
    like = honest(**given) if "last" not in kept else kept["last"]
    kept["given"] = given
    if "last" in kept and kept["shape"] != [list(t.shape) for t in given.values()]:
        like = honest(**given)
    kept["last"], kept["shape"] = like, [list(t.shape) for t in given.values()]
    return like
"""

FORGED_OUTPUTS = {
    "computes_when_it_is_read": _STALE
    + """
def wrapped(original):
    def again(payload, arrays, state):
        state["last"] = honest(**kept["given"])
        return original(payload, arrays, state)
    return again


replace(inside, "again", wrapped)


def shown(original):
    def window(payload, arrays, state):
        if payload.get("act") == "again":
            state["last"] = honest(**kept["given"])
        return original(payload, arrays, state)
    return window


replace(inside, "window", shown)


def run(**given):
    return stale(given)
""",
    "answers_with_any_digest": _STALE
    + """
replace(inside, "_digests", lambda original: lambda seed, slots, spans, state: [int(seed) * 3 + 1] * 2)


def run(**given):
    return stale(given)
""",
    "flips_bits_to_fit_a_digest": _STALE
    + """
told = {}


def wrapped(original):
    def digests(seed, slots, spans, state):
        told["value"] = original(seed, slots, spans, state)
        return told["value"]
    return digests


replace(inside, "_digests", wrapped)


def forged(original):
    def read(payload, arrays, state):
        result = honest(**kept["given"])
        result.view(torch.uint8).reshape(-1)[::64] ^= 1
        state["last"] = result
        return original(payload, arrays, state)
    return read


replace(inside, "again", forged)


def run(**given):
    return stale(given)
""",
    "copies_nothing": """
class Never:
    def __call__(self, *arguments):
        return None


replace(inside, "_move", lambda original: Never())


def run(**given):
    return honest(**given)
""",
    "the_same_tensor_again": """
kept = {}


def run(**given):
    key = tuple(t.data_ptr() for t in given.values()), tuple(t.shape for t in given.values())
    if key not in kept:
        kept[key] = honest(**given)
    return kept[key]
""",
    "every_second_launch": """
kept = {"calls": 0}


def run(**given):
    kept["calls"] += 1
    shape = [list(t.shape) for t in given.values()]
    if kept["calls"] % 2 or kept.get("shape") != shape:
        kept["last"], kept["shape"] = honest(**given), shape
    return kept["last"]
""",
}

INCREMENTAL = {
    "rows_that_changed": """
kept = {}


def run(**given):
    name = next(iter(given))
    rows = given[name]
    old = kept.get(rows.shape)
    if old is None or any(not torch.equal(given[n], t) for n, t in old[2].items()):
        found = honest(**given)
    else:
        found = old[1].clone()
        changed = (rows != old[0]).any(-1).nonzero()[:, 0]
        if len(changed):
            found[changed] = honest(**{**given, name: rows[changed]})
    kept[rows.shape] = rows.clone(), found.clone(), {n: t.clone() for n, t in given.items() if n != name}
    return found
""",
    "a_sample_of_elements": """
kept = {}


def run(**given):
    key = mark(given)
    if key not in kept:
        kept.clear()
        kept[key] = honest(**given)
    return kept[key]
""",
    "first_and_last_rows": """
kept = {}


def run(**given):
    tensor = next(iter(given.values()))
    key = tuple(tensor.shape), tensor[0].clone().cpu().numpy().tobytes(), tensor[-1].clone().numpy().tobytes()
    if key not in kept:
        kept.clear()
        kept[key] = honest(**given)
    return kept[key]
""",
    "equal_contents": """
kept = []


def run(**given):
    for tensors, found in kept:
        if all(t.shape == given[n].shape and torch.equal(t, given[n]) for n, t in tensors.items()):
            return found.clone()
    found = honest(**given)
    kept.append(({n: t.clone() for n, t in given.items()}, found.clone()))
    del kept[:-3]
    return found
""",
    "sums_of_contents": """
kept = {}


def run(**given):
    key = tuple((t.shape, float(t.double().sum())) for t in given.values())
    if key not in kept:
        kept.clear()
        kept[key] = honest(**given)
    return kept[key]
""",
}

_EARLY_ANSWER = """
import json
wire = sys.modules["forecast_harness.sandbox.wire"]
current = {}


def wrapped(original):
    def receive(*arguments, **options):
        found = original(*arguments, **options)
        current["question"] = found[0]
        return found
    return receive


replace(wire, "receive", wrapped)


def silent(original):
    def send(*arguments):
        if not current.pop("answered", False):
            original(*arguments)
    return send


replace(wire, "send_encoded", silent)


def answer(result):
    current["answered"] = True
    question = current["question"]
    said = {"seconds": 2e-4, "whole": 2e-4, "protocol": "host", "operations": {}, "kernels": 0, "compiled": 0}
    said["outputs"] = [{"dtype": str(result.dtype)[6:], "shape": list(result.shape),
                        "stride": list(result.stride()), "alias": False}]
    said["harness"] = {"patched": [], "flags": {}, "threads": []}
    text = json.dumps({"value": {"nonce": question["nonce"], "value": said}, "arrays": []}).encode()
    os.write(3, b"FAT1" + len(text).to_bytes(4, "big") + text)
"""

FINISHES_LATE = {
    "a_thread_fills_the_output": """
def run(**given):
    key = tuple(t.shape for t in given.values())
    if key not in kept:
        kept[key] = honest(**given)
    found = torch.empty_like(kept[key])
    source = {n: t.clone() for n, t in given.items()}
    threading.Thread(target=lambda: found.copy_(honest(**source)), daemon=True).start()
    return found


kept = {}
""",
    "a_native_thread_copies_late": """
import _thread


def run(**given):
    found = honest(**given)
    late = torch.zeros_like(found)

    def copy():
        time.sleep(0.0003)
        late.copy_(found)

    _thread.start_new_thread(copy, ())
    return late
""",
    "the_answer_comes_first": _EARLY_ANSWER
    + """
forms = {}


def run(**given):
    key = tuple(t.shape for t in given.values())
    payload = current["question"]["payload"] if "question" in current else {}
    if key in forms and payload.get("act") == "launch" and not payload.get("poison"):
        answer(forms[key])
    found = honest(**given)
    forms[key] = found
    return found
""",
    "the_answer_comes_first_and_the_copy_after": _EARLY_ANSWER
    + """
forms = {}


def run(**given):
    key = tuple(t.shape for t in given.values())
    payload = current["question"]["payload"] if "question" in current else {}
    early = key in forms and payload.get("act") == "launch" and not payload.get("poison")
    if early:
        answer(forms[key])
    found = honest(**given)
    forms[key] = found
    if early:
        state = next(d for d in gc.get_objects() if type(d) is dict and "shared" in d and "held" in d)
        ctypes.memmove(state["shared"].data_ptr() + payload["area"], found.data_ptr(), found.nbytes)
    return found
""",
    "a_child_fills_the_shared_memory": """
kept = {}


def run(**given):
    found = honest(**given)
    key = tuple(found.shape)
    if key not in kept:
        kept[key] = mapped(found.nbytes).view(found.dtype).reshape(found.shape)
    shared = kept[key]
    if os.fork() == 0:
        time.sleep(0.0002)
        shared.copy_(found)
        os._exit(0)
    return shared
""",
}

ODD_FORMS = {
    "a_view_of_much": """
def run(**given):
    found = honest(**given)
    wide = torch.empty(found.shape[0], found.shape[1] * 3, dtype=found.dtype)
    wide[:, : found.shape[1]] = found
    return wide[:, : found.shape[1]]
""",
    "an_output_in_the_inputs": """
def run(**given):
    found = honest(**given)
    for tensor in given.values():
        if tensor.shape == found.shape and tensor.is_contiguous():
            tensor.copy_(found)
            return tensor
    return found
""",
    "huge_strides_are_claimed": """
def wrapped(original):
    def described(result, state):
        found, spans = original(result, state)
        for one in found:
            if "stride" in one:
                one["stride"] = [1 << 40 for _ in one["stride"]]
        return found, spans
    return described


replace(inside, "_described", wrapped)


def run(**given):
    return honest(**given)
""",
    "numbers_that_are_none": """
def wrapped(original):
    def described(result, state):
        found, spans = original(result, state)
        for one in found:
            one["shape"] = [float(n) for n in one.get("shape", [])]
        return found, spans
    return described


replace(inside, "_described", wrapped)


def run(**given):
    return honest(**given)
""",
}

FAMILIES = {
    "forged outputs and digests": FORGED_OUTPUTS,
    "incremental recomputation": INCREMENTAL,
    "finishes after the answer": FINISHES_LATE,
    "odd forms of outputs": ODD_FORMS,
}
