"""Programs run under us: `forecast-autotune run`, and FORECAST_AUTOTUNE=1 alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.commands.process import split_run
from tests.core.captured_output import Capture, command, needs_triton, python

pytestmark = pytest.mark.usefixtures("root")  # no test may see the user's own store


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("run s.py", "run s.py", ""),
        ("run s.py --json -x", "run s.py", "--json -x"),
        ("run --json s.py --json", "run --json s.py", "--json"),
        ("run --mode skip --capture s.py a --mode b", "run --mode skip --capture s.py", "a --mode b"),
        ("run --mode=skip s.py -m x", "run --mode=skip s.py", "-m x"),
        ("run -m pkg.mod --help", "run -m pkg.mod", "--help"),
        ("run --store d -mpkg -m", "run --store d -mpkg", "-m"),
        ("run -- s.py -- x", "run s.py", "-- x"),
        ("run --help", "run --help", ""),
        ("run", "run", ""),
    ],
)
def test_everything_behind_the_script_is_the_scripts(words: str, ours: str, theirs: str) -> None:
    assert split_run(words.split()) == (ours.split(), theirs.split())


ECHO = """
import json, os, pickle, sys
class Thing: pass
pickle.loads(pickle.dumps(Thing()))  # works only if __main__ is this file
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[0], __file__, __name__, main.Thing is Thing, main.__spec__ is None]))
"""


@needs_triton
def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "echo.py").write_text(ECHO, encoding="utf-8")
    (tmp_path / "link.py").symlink_to(folder / "echo.py")
    for name in ("sub/echo.py", "link.py"):
        arguments = (name, "--json", "-x", "--store", "y")
        served = command("run", *arguments, cwd=tmp_path)
        assert served.stdout == python(*arguments, cwd=tmp_path).stdout
        assert served.stdout != ""
        assert served.stderr == "forecast-autotune: no kernel had to be tuned\n"


@needs_triton
def test_a_module_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(ECHO, encoding="utf-8")
    served = command("run", "-m", "package", "--json", cwd=tmp_path)
    assert served.stdout == python("-m", "package", "--json", cwd=tmp_path).stdout
    assert served.stdout != ""
    archive = command("run", "package", "a", cwd=tmp_path)
    assert archive.stdout == python("package", "a", cwd=tmp_path).stdout


@needs_triton
@pytest.mark.parametrize(
    "code",
    ["import sys; sys.exit(3)", "import sys; sys.exit('bye')", "1/0", "def f(:"],
)
def test_exit_status_and_traceback_are_pythons(code: str, tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(f"print('begun')\n{code}\n", encoding="utf-8")
    served, plain = command("run", str(script)), python(str(script))
    assert served.returncode == plain.returncode
    assert served.stdout == plain.stdout
    ours = [line for line in served.stderr.splitlines() if not line.startswith("forecast-autotune: ")]
    assert ours == plain.stderr.splitlines()


@needs_triton
def test_a_program_that_forks_gets_one_summary(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    code = (
        "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint('parent' if pid else 'child')\n"
    )
    script.write_text(code, encoding="utf-8")
    done = command("run", str(script))
    assert sorted(done.stdout.split()) == ["child", "parent"]
    assert done.stderr == "forecast-autotune: no kernel had to be tuned\n"


@needs_triton
def test_ctrl_c_in_a_program_is_130(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    words = [sys.executable, "-m", "forecast_autotune", "run", str(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "KeyboardInterrupt" in errors
    assert "no kernel had to be tuned" in errors


@needs_triton
def test_a_missing_script_or_module_is_said_plainly(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", str(tmp_path / "absent.py")]) == 2
    assert "absent.py" in capsys.readouterr().err
    done = command("run", "-m", "absent_module")
    assert (done.returncode, done.stderr) == (
        1,
        "forecast-autotune: error: no module named absent_module: `run -m` takes what `python -m` takes\n",
    )


TUNED = """
import os, sys
assert "triton" not in sys.modules  # the program's own settings come first
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl

def bench(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]

@triton.autotune(configs=[triton.Config({"B": b}) for b in (64, 128, 256)], key=["n"], do_bench=bench)
@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

x, out = torch.ones(300), torch.empty(300)
add[lambda meta: (triton.cdiv(300, meta["B"]),)](x, x, out, 300)
print("sum", out.sum().item(), type(add).__module__)
"""


@needs_triton
def test_autotuned_kernels_are_served_and_counted(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_RISK", "0")
    script = tmp_path / "tuned.py"
    script.write_text(TUNED, encoding="utf-8")
    first = command("run", "--json", "--store", "elsewhere", str(script), cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    counts = json.loads(first.stdout)
    assert (counts["decisions"], counts["stored"], counts["candidates"]) == (1, 0, 3)
    assert counts["measured"] > 0
    assert "sum 600.0 triton.runtime.autotuner" in first.stderr
    assert not root.exists()
    again = command("run", "--store", "elsewhere", str(script), cwd=tmp_path)
    assert again.stdout == "sum 600.0 triton.runtime.autotuner\n"
    assert again.stderr.splitlines()[-1] == "forecast-autotune: 1 decision, 1 from the store"


# --- activation by the environment ---

WATCH = """
import sys
{start}
before = [name for name in ("triton", "numpy", "torch") if name in sys.modules]
import triton, inspect
from triton.runtime.autotuner import Autotuner
hooks = [f for f in sys.meta_path if getattr(f, "package", "") == "triton"]
served = getattr(Autotuner.run, "forecast_autotune", False)
print(before, served, len(hooks), len(inspect.getsource(triton)) > 0)
"""


@needs_triton
@pytest.mark.parametrize(("values", "served"), [(["1"], True), (["0", ""], False)])
def test_the_variable_alone_patches_triton_when_it_is_imported(values: list[str], served: bool) -> None:
    # The line of our .pth file, which site-packages run at start-up: here without the variable first.
    line = (Path(__file__).parents[3] / "forecast_autotune/assets/autoload.pth").read_text(encoding="utf-8")
    start = "\n".join([line, *(f"os.environ['FORECAST_AUTOTUNE'] = {value!r}\n{line}" for value in values)])
    environment = {k: v for k, v in os.environ.items() if k != "FORECAST_AUTOTUNE"}
    done = python("-c", WATCH.format(start=start), env=environment)
    assert done.stdout == f"[] {served} 0 True\n", done.stderr


@needs_triton
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import triton", "assert install()"),
        ("", "from forecast_autotune import autotune"),
        ("", "from forecast_autotune import settle; settle()"),
        ("", "import forecast_integrations.triton.engine"),
    ],
)
def test_triton_is_served_where_it_is_there_already_or_a_module_of_ours_imports_it_first(
    before: str, after: str
) -> None:
    start = f"{before}\nfrom forecast_autotune.activate import install; assert install(); {after}"
    done = python("-c", WATCH.format(start=start), env={**os.environ, "FORECAST_AUTOTUNE": "1"})
    assert done.stdout.endswith("True 0 True\n"), done.stderr


def test_a_bad_variable_is_a_warning_when_activating() -> None:
    environment = {**os.environ, "FORECAST_AUTOTUNE": "perhaps"}
    code = "from forecast_autotune.activate import install; print(install())"
    done = python("-c", code, env=environment)
    assert done.stdout == "False\n"
    assert "FORECAST_AUTOTUNE='perhaps'" in done.stderr
