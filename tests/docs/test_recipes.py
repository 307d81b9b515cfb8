"""What the recipes say is done here, as far as it needs neither a GPU nor a service of others."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forecast_autotune
from forecast_autotune.commands import grammar, main
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store, layers
from forecast_autotune.store.bundles import Bundle, write_bundle
from forecast_autotune.store.merging import StoreFolder
from tests.core.tuning.loop import TABLE, Bench, decide

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "how_to" / "recipes"
DEPLOYMENT = ROOT / "docs" / "examples" / "deployment"
PROGRAM = f"{sys.executable} -m forecast_autotune"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one decision."""
    folder = tmp_path_factory.mktemp("made")
    decide(Store(folder / "store"), Bench(TABLE))
    write_bundle(StoreFolder(folder / "store"), folder / "tuned")
    return folder / "tuned"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing is tuned."""
    for name in Settings().describe():
        monkeypatch.delenv(name[0], raising=False)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def serves() -> bool:
    """Whether the example problem is decided here."""
    return Store.default().decision(TABLE.problem) is not None


def check_settings(variables: Mapping[str, str]) -> Settings:
    """The settings that these variables make; all of them must be variables of ours."""
    ours = {name: value for name, value in variables.items() if name.startswith("FORECAST_AUTOTUNE")}
    assert ours
    assert ours.keys() <= {name for name, _, _ in Settings().describe()}
    return Settings.from_environment(ours)


def check_commands(script: str) -> int:
    """How many commands of ours a shell script has; the grammar must take all of them."""
    count = 0
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["forecast-autotune"]:
            grammar.build().parse_args(words[1:])
            count += 1
    return count


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    text = (DEPLOYMENT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_finds_and_serves_its_bundle(
    bundle: Path, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image, context = machine / "image", machine / "context"
    shutil.copytree(bundle, context / "tuned")
    (context / "wheels").mkdir()
    (context / "serve.py").write_text("", encoding="utf-8")
    environment: dict[str, str] = {}
    program = ""
    for word, rest in instructions():
        if word == "COPY":
            source, target = shlex.split(rest)
            place = image / target.lstrip("/")
            if (context / source).is_dir():
                shutil.copytree(context / source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(context / source, place)
        elif word == "RUN" and rest.startswith("forecast-autotune"):
            words = [str(image / w.lstrip("/")) if w.startswith("/") else w for w in shlex.split(rest)[1:]]
            assert main(words) == 0, capsys.readouterr().err
        elif word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "CMD":
            program = json.loads(rest)[-1]
        else:
            assert (word, rest.split()[0]) in {("FROM", "your/torch-image"), ("RUN", "pip")}
    assert "0 faults" in capsys.readouterr().out
    settings = check_settings(environment)
    assert (settings.enabled, settings.mode, settings.on_miss) == (True, Mode.FROZEN, "forecast")
    place = image / program.lstrip("/")
    assert place.is_file()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(place), raising=False)
    assert serves()


def test_the_pods_read_what_the_job_writes() -> None:
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOYMENT / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [d["kind"] for d in documents] == ["Deployment", "Job"]
    containers: list[dict[str, Any]] = []
    for document in documents:
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes
        container["folders"] = {mount["mountPath"]: mount.get("readOnly", False) for mount in mounts.values()}
        containers.append(container)
    serve, warm = containers
    selector = documents[0]["spec"]["selector"]["matchLabels"]
    assert selector == documents[0]["spec"]["template"]["metadata"]["labels"]
    settings = check_settings({e["name"]: e["value"] for e in serve["env"] if "value" in e})
    assert (settings.mode, settings.on_miss) == (Mode.FROZEN, "forecast")
    assert serve["folders"] == {"/tuned": True, "/misses": False}
    assert Path(settings.stores).parent == Path("/tuned")
    assert str(settings.cache_dir) == "/misses/$(POD)"
    assert any(e["name"] == "POD" for e in serve["env"]), "each pod has a folder of its own"
    check_settings({e["name"]: e["value"] for e in warm["env"]})
    script = warm["command"][-1]
    assert check_commands(script.replace("  ", "")) == 3
    assert f"store merge {settings.stores}" in script
    assert not warm["folders"]["/tuned"]


def test_a_slurm_job_leaves_a_bundle_for_the_next(bundle: Path, machine: Path) -> None:
    """Slurm's commands stand in for themselves on one node, and a store that was tuned before for the program."""
    tools = machine / "bin"
    tools.mkdir()
    programs = {
        "srun": 'exec "$@"',
        "scontrol": "echo node-1",
        "torchrun": f"{PROGRAM} store merge {bundle} --into $FORECAST_AUTOTUNE_CACHE_DIR",
        "forecast-autotune": f'exec {PROGRAM} "$@"',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node-1"}
    places = {"SLURM_SUBMIT_DIR": str(machine), "TMPDIR": str(machine / "local")}
    environment = {**os.environ, **job, **places, "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(DEPLOYMENT / "job.sbatch")], env=environment, check=True)
    assert (machine / "tuned").resolve().name == "tuned-7"
    assert Bundle.open(machine / "tuned").manifest.digest == Bundle.open(bundle).manifest.digest


def test_a_librarys_bundle_is_found_through_its_package(
    bundle: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (RECIPES / "kernel_library.md").read_text(encoding="utf-8")
    (project,) = re.findall(r'```toml title="pyproject.toml"\n(.*?)```', text, re.DOTALL)
    points = tomllib.loads(project)["project"]["entry-points"]
    site = machine / "site"
    for value in points[layers.GROUP].values():
        shutil.copytree(bundle, site.joinpath(*value.split(".")))
    (site / "my_kernels" / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    installed = site / "my_kernels-1.0.dist-info"  # as an installer writes it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in given.items()) for group, given in points.items()
    ]
    (installed / "entry_points.txt").write_text("".join(lines))
    assert not serves()
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    # Another cache: the process-wide store of the first has looked already.
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(machine / "other"))
    assert serves()
    assert "my_kernels" not in sys.modules


@pytest.mark.parametrize(
    ("place", "method", "order"),
    [
        ("vllm.v1.worker.gpu_worker:Worker", "compile_or_warm_up_model", ["itself", "ready"]),
        ("sglang.srt.managers.scheduler:Scheduler", "run_event_loop", ["ready", "itself"]),
    ],
)
def test_a_worker_of_an_engine_is_ready_after_its_own_warm_up(
    monkeypatch: pytest.MonkeyPatch, place: str, method: str, order: list[str]
) -> None:
    pytest.importorskip("triton")
    module, _, kind = place.partition(":")
    said: list[str] = []
    worker = type(kind, (), {method: lambda self: said.__iadd__(["itself"]) and 1.5})
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[module], kind, worker, raising=False)
    page = (RECIPES.parent / "cold_start.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if module in block), names)
    monkeypatch.setattr(forecast_autotune, "ready", lambda: said.append("ready"))
    names["register"]()
    assert getattr(worker(), method)() == 1.5
    assert said == order
