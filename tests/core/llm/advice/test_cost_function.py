"""What a cost function means: columns, branches that differ between candidates, loops, constants, terms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from forecast_autotune.features.devices import device_spec
from forecast_autotune.llm.advice.asking import MOST_SPREAD, check_function
from forecast_autotune.llm.advice.functions import resident_programs, smooth_max, waves
from forecast_autotune.llm.advice.language import CostFunction, parse_cost_function
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.records import Config, Device
from tests.core.llm.advice.functions import CONFIGS, GOOD, sample, subject

H200 = device_spec(Device("NVIDIA H200", arch="90"))
BLOCK = np.array([float(str(dict(c.kwargs)["BLOCK"])) for c in CONFIGS])
WARPS = np.array([float(c.num_warps or 0) for c in CONFIGS])
Array = npt.NDArray[np.float64]


def read(*lines: str, head: str = "") -> CostFunction:
    return parse_cost_function(
        f"{head}\ndef cost(config, args, device, launch):\n" + "".join(f"    {line}\n" for line in lines)
    )


def costs(*lines: str, head: str = "") -> Array:
    return np.asarray(2.0 ** read(*lines, head=head).evaluate(subject()).log2)


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_functions_of_others_hold_at_other_sizes(text: str) -> None:
    check_function(parse_cost_function(text), [sample(), sample(rows=77)])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7 // 2 + 7 % 4 + (0 - 7) // 2 + 20", 22),
        ("2 ** 10 + (1 << 3) + (17 >> 2)", 1024 + 8 + 4),
        ("1 if 2 > 1 and not 0 else 3", 1),
        ("2 if 1 < 2 < 3 else 5", 2),
        ("4 if args.x.dtype == 'float16' else 8", 4),
        ("4 if args.x.dtype != 'float16' else 8", 8),
        ("5 if args.x.dtype not in ('float32', 'int8') else 6", 5),
        ("args.x.shape[0] + args.x.shape[-1] + args.x.stride[1]", 4096 + 1024 + 1),
        ("args.x.numel / args.x.itemsize + args.x.ndim", 4096 * 1024 / 2 + 2),
        ("args.x.bytes", 4096 * 1024 * 2),
        ("args.n + args.bias + 1", 1025),
        ("3 if args.ACTIVATION == 'relu' else 4", 3),
        ("config.ACTIVATION == 'relu'", 1),
        ("device.sms + device.memory_gb_s", 132 + 4800),
        ("config.maxnreg + 1", 1),
        ("math.log2(8) + np.maximum(1, 2) + np.where(1, 2, 3)", 7),
        ("cdiv(5, 2) + ceil_div(4, 2) + ceil(0.5) + floor(1.5) + int(2.9) + abs(-1)", 3 + 2 + 1 + 1 + 2 + 1),
        ("next_power_of_2(5) + next_power_of_2(8) + next_power_of_2(0)", 8 + 8 + 1),
        ("min(3, 1, 2) + max(3, 1, 2) + sqrt(9) + exp(0) + log(1) + exp2(3)", 1 + 3 + 3 + 1 + 8),
        ("True + 1", 2),
        ("0.0 or 2", 1),
    ],
)
def test_expressions(expression: str, value: float) -> None:
    assert costs(f"return {expression}") == pytest.approx(value)


def test_a_branch_is_taken_by_each_candidate_for_itself() -> None:
    result = costs(
        "if config.BLOCK > 128:",
        "    x = config.BLOCK",
        "    y = 2",
        "elif config.num_warps == 8:",
        "    x = 3",
        "    y = 1",
        "else:",
        "    x = 1",
        "    y = 1",
        "return x * y",
    )
    assert result == pytest.approx(np.where(BLOCK > 128, 2 * BLOCK, np.where(WARPS == 8, 3, 1)))


def test_early_returns_hold_for_whom_they_are_meant() -> None:
    result = costs(
        "x = 1",
        "if config.BLOCK == 64:",
        "    if config.num_warps == 2:",
        "        return 7",
        "    x = 2",
        "if config.num_warps == 8:",
        "    return x * 10",
        "return x",
    )
    x = np.where(BLOCK == 64, 2.0, 1.0)
    expected = np.where((BLOCK == 64) & (WARPS == 2), 7, np.where(WARPS == 8, 10 * x, x))
    assert result == pytest.approx(expected)


def test_helpers_return_early_too_and_have_names_of_their_own() -> None:
    head = "def pick(v):\n    x = v\n    if v > 4:\n        return 100\n    return x\n"
    result = costs("x = 5", "y = pick(config.num_warps)", "return x + y", head=head)
    assert result == pytest.approx(5 + np.where(WARPS > 4, 100, WARPS))


def test_loops() -> None:
    result = costs(
        "x = 0", "for i in range(2, 10, 3):", "    x += i", "    x += config.num_warps", "return x"
    )
    assert result == pytest.approx(2 + 5 + 8 + 3 * WARPS)
    assert costs("for i in range(5):", "    if i == 3:", "        return i", "return 9") == pytest.approx(3)
    result = costs(
        "x = config.num_warps", "for i in range(9):", "    if x < 8:", "        x = x * 2", "return x"
    )
    assert result == pytest.approx(8)
    assert costs("x = 1", "for i in range(0):", "    x = 2", "return x") == pytest.approx(1)


def test_a_guard_by_text_keeps_what_is_not_there_out() -> None:
    assert costs("return args.gone if args.x.dtype == 'int8' else 2") == pytest.approx(2)
    assert costs("if args.x.dtype == 'int8' and args.gone > 1:", "    return 1", "return 2") == pytest.approx(
        2
    )


def test_constants_can_be_shifted() -> None:
    function = read(
        "speed = constant(4.0, spread=2.0)",
        'return speed * config.BLOCK + constant(1.0, label="start") + constant(2) + constant(3)',
    )
    names = [c.name for c in function.constants]
    assert names == ["speed", "start", "line 4", "line 4 (2)"]
    assert [c.value for c in function.constants] == [4, 1, 2, 3]
    assert (function.constants[0].spread, function.constants[1].spread) == (2.0, 1.5)
    plain = 2.0 ** function.evaluate(subject()).log2
    assert plain == pytest.approx(4 * BLOCK + 6), "two constants of one line are two"
    moved = 2.0 ** function.evaluate(subject(), {"speed": 1.0, "line 4 (2)": -1.0}).log2
    assert moved == pytest.approx(8 * BLOCK + 4.5)
    both = function.evaluate(subject().repeated(2), {"speed": np.repeat([0.0, 1.0], len(BLOCK))})
    assert 2.0**both.log2 == pytest.approx(np.concatenate([4 * BLOCK, 8 * BLOCK]) + 6)


def test_terms_and_binaries() -> None:
    function = read(
        'x = term(config.BLOCK, "work")',
        'term(2, "start")',
        "same_binary(min(config.BLOCK, 128), config.num_warps)",
        "return x + 1",
        head='SUMMARY = "s"\nCONFIDENCE = 0.25\nSPREAD = 1.5',
    )
    assert (function.summary, function.confidence, function.spread) == ("s", 0.25, 1.5)
    assert function.labels == ("work", "start")
    result = function.evaluate(subject())
    assert result.terms["work"] == pytest.approx(BLOCK)
    assert result.terms["start"] == pytest.approx(np.full(len(BLOCK), 2.0))
    alike = result.identity[:, None] == result.identity[None, :]
    tiles = np.minimum(BLOCK, 128)
    assert (alike == ((tiles[:, None] == tiles) & (WARPS[:, None] == WARPS))).all()
    assert read("return 1").evaluate(subject()).identity is None


def test_binaries_that_only_some_candidates_speak_of() -> None:
    function = read("if config.BLOCK > 128:", "    same_binary(config.num_warps)", "return 1")
    identity = function.evaluate(subject()).identity
    large = BLOCK > 128
    alike = (identity[:, None] == identity[None, :]) & ~np.eye(len(BLOCK), dtype=bool)
    assert (alike == (large[:, None] & large & (WARPS[:, None] == WARPS) & ~np.eye(12, dtype=bool))).all()


def test_what_functions_know_of_hardware() -> None:
    assert resident_programs(H200, 128, 32, 0) == 16, "by threads: 2048 of a multiprocessor"
    assert resident_programs(H200, 256, 255, 0) == 1, "by registers: 65536"
    assert resident_programs(H200, 128, 32, 100_000) == 2, "by shared memory"
    assert resident_programs(H200, 128, 32, 10**9) == 1, "at least one"
    assert waves(H200, 132 * 2 + 1, 2) == 2
    assert smooth_max(0.0, 0.0) == 0
    assert 3 <= smooth_max(3.0, 1.0) < 3.02
    assert costs("return spilled_registers(300) + waves(launch.programs, 1) * 0") == pytest.approx(45)


def test_a_meta_parameter_that_is_a_text_or_not_everywhere() -> None:
    configs = [Config.of({"ORDER": o, "BLOCK": 8}) for o in ("row", "column")] + [Config.of({"BLOCK": 8})]
    function = read("return 2 if config.ORDER == 'row' else 1")
    assert 2.0 ** function.evaluate(subject(configs)).log2 == pytest.approx([2, 1, 1])
    configs = [Config.of({"SPLIT": 2, "BLOCK": 8}), Config.of({"BLOCK": 8})]
    with pytest.raises(AdviceError, match=r"no candidate has config\.SPLIT"):
        read("return config.SPLIT").evaluate(subject(configs))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("config.BLOK", "no candidate has config.BLOK; there are BLOCK, num_warps"),
        ("args.y", "the call has no argument y; it has x, n"),
        ("args.x.shape[2]", "args.x has 2 dimensions, not shape[2]"),
        ("args.x.width", "args.x is a tensor: it has shape"),
        ("args.n.shape[0]", "args.n is no tensor"),
        ("device.cores", "there is no device.cores; there are sms"),
        ("launch.threads", "launch has `programs` and `grid[0]` to `grid[2]`"),
        ("config", "config has no value here"),
        ("nothing(1)", "there is no function nothing"),
    ],
)
def test_messages_name_the_rule_and_what_there_is(expression: str, said: str) -> None:
    with pytest.raises(AdviceError) as caught:
        costs(f"return {expression}")
    assert said in str(caught.value)
    assert "line 3" in str(caught.value)


def test_without_a_grid_the_launch_is_not_known() -> None:
    unknown = Config.of({"BLOCK": 32}, num_warps=4)
    with pytest.raises(AdviceError, match="the launch grid is not known here"):
        read("return launch.programs").evaluate(subject([*CONFIGS, unknown]))


def test_the_check_refuses_what_holds_here_only() -> None:
    with pytest.raises(AdviceError, match=r"at other sizes \(x="):
        check_function(read("return 4097 - args.x.shape[0]"), [sample()])
    with pytest.raises(AdviceError, match="times as long as its fastest"):
        check_function(read(f"return exp2(where(config.num_warps > 4, {MOST_SPREAD + 1}, 0))"), [sample()])
    with pytest.raises(AdviceError, match="on at least one size"):
        check_function(read("return 1"), [])
    check_function(read("return max(1, 4097 - args.x.shape[0])"), [sample()])
