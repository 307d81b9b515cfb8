"""The target of a search, from a text of the command line: a problem pack, or a kernel in a user's file.

A `SearchTarget` is plain data. Its payload holds all that a judge needs in another process, and is read back by
`pack_of` and `subjects_of`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records import Config, Device, Kernel, digest
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, SearchTarget, TargetKind
from forecast_harness.targets import statement
from forecast_harness.targets.cuda.declaration import CUDA_PLACE, read_cuda_declaration
from forecast_harness.targets.cuda.source import KernelSignature
from forecast_harness.targets.cuda.toolkit import nvcc_release
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.kernels.user_kernel import KERNEL_PLACE, UserKernel
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.load import load_pack, make_solution
from forecast_harness.targets.packs.schema import Language, Pack, PackFormat, Solution

NO_KERNELS_ON_CPU = (
    "a Triton kernel can only be searched on a CUDA device: on the CPU it is interpreted, which shows "
    "whether it is right and says nothing about how fast it is. Search a pack with torch solutions on the "
    "CPU instead, or give a device"
)
NO_CUDA_ON_CPU = (
    "a CUDA kernel can only be searched on a CUDA device, and this run has none: give a device, or search a pack "
    "with torch solutions on the CPU"
)
_MOST_SUBJECTS_READ = 16
_subject_cache: dict[int, tuple[object, tuple[BaseKernel, ...]]] = {}
"""Kernels of the latest targets by `id` of the list they were read from, which is kept: no other has its `id`."""


def open_target(text: str, *, device: str) -> tuple[SearchTarget, tuple[Node, ...]]:
    """The target that `text` names and the nodes to start from, the first of which speed-ups are stated against.

    `text`: a shipped pack, a folder of one or a KernelBench file; or `FILE.py:KERNEL` or
    `package.module:KERNEL`, a Triton kernel whose calls are known (`inputs` or `CASES` in its file, or problems in
    the store); or `FILE.cu:KERNEL`, a CUDA C++ kernel declared in `FILE.toml`.
    `device`: `cpu` or `cuda`. A pack starts from its own solutions: in torch on a CPU, in Triton on a device,
    where it has such.

    Raises `RecordError` for a text that names neither, or a pack without a solution to start from, and
    `SettingsError` for a device that is none of these, or on which a kernel cannot be timed.
    """
    if device not in ("cpu", "cuda"):
        raise SettingsError(f"device must be cpu or cuda, not {device!r}")
    if CUDA_PLACE.match(text):
        return _cuda_target(text, device)
    if KERNEL_PLACE.match(text):
        return _kernel_target(text, device)
    return _pack_target(load_pack(text), device)


def pack_of(target: SearchTarget) -> Pack:
    """The pack of a target, as its payload holds it. Raises `RecordError` for a target of another kind."""
    if target.kind is not TargetKind.PACK:
        raise RecordError(f"{target.name} is a {target.kind}, not a pack")
    return Pack.from_json(target.payload["pack"])


def is_cuda_kernel(target: SearchTarget) -> bool:
    """Whether sources are CUDA C++ files with a declared signature."""
    return "signature" in target.payload


def cuda_signature_of(target: SearchTarget) -> KernelSignature:
    """The signature of a CUDA kernel's target. Raises `RecordError` for a target that is none."""
    if not is_cuda_kernel(target):
        raise RecordError(f"{target.name} is no CUDA kernel with a declared signature")
    return KernelSignature.from_json(target.payload["signature"])


def subjects_of(target: SearchTarget) -> tuple[BaseKernel, ...]:
    """The base kernels of a kernel target. Raises `RecordError` for another kind."""
    if target.kind is not TargetKind.KERNEL:
        raise RecordError(f"{target.name} is a {target.kind}, not a kernel")
    data = target.payload["subjects"]
    # A search asks for them several times a node; they may be long.
    if (entry := _subject_cache.get(id(data))) is None or entry[0] is not data:
        while len(_subject_cache) >= _MOST_SUBJECTS_READ:
            _subject_cache.pop(next(iter(_subject_cache)), None)
        entry = _subject_cache[id(data)] = data, tuple(BaseKernel.from_json(s) for s in data)
    return entry[1]


def advice_of(target: SearchTarget) -> dict[str, Advice]:
    """The store's advice on the base kernel when the search began, by the source that it is about.

    It is filed under that source's own digest, as forecasts of a search name kernels by theirs.
    """
    if (data := target.payload.get("advice")) is None:
        return {}
    source = subjects_of(target)[0].source
    return {source: replace(Advice.from_json(data), source_sha256=digest(source))}


def configs_for(target: SearchTarget, source: str) -> list[Config]:
    """Configs of a source of a kernel target: its own list, or the base's without what it has dropped.

    In the order given, without repeats. Raises `RecordError` for a source that breaks the contract.
    """
    contract = read_contract(source, target.entry)
    if contract.configs:
        return list(dict.fromkeys(contract.configs))
    meta = set(contract.meta)
    base = [c for s in subjects_of(target)[:1] for c in s.configs]
    return list(dict.fromkeys(replace(c, kwargs=tuple(p for p in c.kwargs if p[0] in meta)) for c in base))


def decided_config(target: SearchTarget, source: str) -> Config | None:
    """The config that the store of whoever began the search has decided on for the base kernel, of its source."""
    data = target.payload.get("decided")
    if data is None or source != subjects_of(target)[0].source:
        return None
    return Config.from_json(data)


def solution_of(target: SearchTarget, node: Node) -> Solution:
    """A node as a solution of its target's pack."""
    return Solution(node.id, Language(node.language), node.source, target.entry)


def _pack_target(pack: Pack, device: str) -> tuple[SearchTarget, tuple[Node, ...]]:
    language = Language.TORCH if device == "cpu" else Language.TRITON
    seeds = [s for s in pack.solutions if s.language is language and not s.files]
    seeds = seeds or [s for s in pack.solutions if s.language is Language.TORCH and not s.files]
    seeds = seeds or [_reference_solution(pack)]
    about, entry = pack.definition, seeds[0].entry
    words = statement.pack_statement(pack, str(language), entry, device)
    payload = {"pack": pack.to_json()}
    if device == "cuda":
        payload["device"] = cuda_device().to_json()
    target = SearchTarget(TargetKind.PACK, about.name, pack.id, str(language), entry, words, payload)
    return target, tuple(_seed(target, s.source, str(s.language), s.name) for s in seeds)


def _cuda_target(text: str, device: str) -> tuple[SearchTarget, tuple[Node, ...]]:
    if device == "cpu":
        raise SettingsError(f"{text}: {NO_CUDA_ON_CPU}")
    declaration, release = read_cuda_declaration(text), nvcc_release()
    signature, pack = declaration.signature, declaration.pack
    payload = {
        "pack": pack.to_json(),
        "signature": signature.to_json(),
        "device": cuda_device().to_json(),
        "nvcc": release,
    }
    words = statement.cuda_statement(pack, signature, device)
    identity = digest(pack.id, signature.to_json())
    target = SearchTarget(TargetKind.PACK, signature.entry, identity, "cuda", signature.entry, words, payload)
    return target, (_seed(target, declaration.source, "cuda", "base"),)


def _reference_solution(pack: Pack) -> Solution:
    """The reference of a foreign task as a solution. Raises `RecordError` for a pack of our own."""
    form = pack.definition.format
    if form is PackFormat.KERNELBENCH:
        source = f"{pack.reference.rstrip()}\n\n\nclass ModelNew(Model):\n    pass\n"
    else:
        raise RecordError(
            f"pack {pack.definition.name} has no torch solution to start from; add one as "
            "solutions/NAME.py beside its reference.py"
        )
    return make_solution("reference", source, form)


def _seed(target: SearchTarget, source: str, language: str, name: str) -> Node:
    provenance = Provenance(Origin.HAND, note=name)
    return Node(node_identity(target.id, language, source), source, language, (), provenance, arm="seed")


def _kernel_target(text: str, device: str) -> tuple[SearchTarget, tuple[Node, ...]]:
    if device == "cpu":
        raise SettingsError(f"{text}: {NO_KERNELS_ON_CPU}")
    # Imports the user's file, which needs triton and runs the user's own code.
    store = Store.default()
    kernel = UserKernel.of(text, store)
    subjects = kernel.subjects(store)
    payload: dict[str, Any] = {}
    uses_advice = Settings.from_environment().advice != "off"
    if uses_advice and (advice := advice_for(store, kernel.kernel)) is not None:
        payload["advice"] = advice.to_json()
    if (config := _stored_config(store, kernel.kernel, subjects)) is not None:
        payload["decided"] = config.to_json()
    target, base = kernel_target(kernel, subjects, cuda_device())
    return replace(target, payload={**target.payload, **payload}), (base,)


def kernel_target(
    kernel: UserKernel, subjects: Sequence[BaseKernel], device: Device | None
) -> tuple[SearchTarget, Node]:
    """The target of a user's kernel, called as `subjects` are, and the node of its own source."""
    name, sha = kernel.kernel.name, kernel.kernel.source_sha256
    calls = [s.calls[0] for s in subjects if s.calls]
    words = statement.kernel_statement(name, kernel.text, calls, kernel.configs, device)
    payload = {
        "subjects": [s.to_json() for s in subjects],
        "file": str(kernel.path.absolute()),
        "name": kernel.name,
        "source_sha256": sha,
        **({} if device is None else {"device": device.to_json()}),
    }
    identity = digest(sha, _subject_identities(subjects))
    target = SearchTarget(TargetKind.KERNEL, name, identity, "triton", name, words, payload)
    return target, _seed(target, kernel.text, "triton", "base")


def _stored_config(store: Store, kernel: Kernel, subjects: Sequence[BaseKernel]) -> Config | None:
    """The config that the store decided on for the first call of the base source on this device."""
    if not subjects or not subjects[0].calls:
        return None
    for problem, decision in store.decisions(kernel.name, cuda_device().slug):
        same_source = problem.kernel.source_sha256 == kernel.source_sha256
        if same_source and problem.arguments == subjects[0].calls[0] and decision.chosen.is_base_variant:
            return decision.chosen.config
    return None


_DEVICE_SCRIPT = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    assert getattr(cuda, name)(*arguments) == 0, name
def attribute(which):
    call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), number)
    return value.value
number, value, name, size = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
call("cuInit", ctypes.c_uint(0))
call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(0))
call("cuDeviceGetName", name, ctypes.c_int(256), number)
call("cuDeviceTotalMem_v2", ctypes.byref(size), number)
print(json.dumps({
    "name": name.value.decode(),
    "backend": "cuda",
    "arch": f"{attribute(75)}{attribute(76)}",
    "multiprocessors": attribute(16),
    "shared_memory_bytes": attribute(97),
    "threads_per_multiprocessor": attribute(39),
    "l2_bytes": attribute(38),
    "memory_bytes": size.value,
    "warp_size": attribute(10),
}))
"""
"""Prints the fields of `Device` as torch reports them, without the two seconds that importing torch takes."""


@cache
def cuda_device() -> Device:
    """The first CUDA device, asked of a child process: the driver is not opened in this one."""
    run = subprocess.run([sys.executable, "-c", _DEVICE_SCRIPT], capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return Device.from_json(json.loads(run.stdout))
    return Device("unknown", "cuda")


def _subject_identities(subjects: Sequence[BaseKernel]) -> list[object]:
    """The parts of the subjects that tell targets apart: not where their file happens to lie."""
    return [
        {**s.to_json(), "file": bool(s.file), "captured": s.captured.rpartition("/")[2]} for s in subjects
    ]
