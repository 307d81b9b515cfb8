"""Cost functions that want to do harm: refused when they are read, or evaluated to plain numbers in no time."""

from __future__ import annotations

import random
import time
import warnings

import numpy as np
import pytest

from forecast_autotune.llm.advice.asking import check_function
from forecast_autotune.llm.advice.language import MAX_CHARACTERS, Costs, parse_cost_function
from forecast_autotune.llm.advice.subject import AdviceError
from tests.core.llm.advice.functions import GOOD, sample, subject

MUTATIONS = 200
WITHIN_S = 10.0
"""Of this thread on a processor: neither a busy host nor other threads of the process count. What is let through would
take hours."""
HEAD = "def cost(config, args, device, launch):\n    "


def body(*lines: str) -> str:
    return HEAD + "\n    ".join(lines) + "\n"


HOSTILE = {
    # Refused when it is read ...
    "an import": "import os\n" + body("return 1"),
    "an import inside": body("import os", "return 1"),
    "an import by name": body('return __import__("os").getpid()'),
    "from the future": "from __future__ import annotations\n" + body("return 1"),
    "eval": body('return eval("1")'),
    "open": body('return open("/etc/passwd")'),
    "getattr": body('return getattr(config, "BLOCK")'),
    "a method of a number": body("return (1).bit_length()"),
    "a method of a column": body('return config.BLOCK.tofile("/tmp/x")'),
    "an attribute of a call": body("return max(1, 2).real"),
    "a module that is not math": body("return os.abs(1)"),
    "another module's function": body("return np.linalg(1)"),
    "a chain of modules": body("return np.linalg.norm(1)"),
    "a subscript of a name": body("x = 1", "return x[0]"),
    "a computed index": body("return args.x.shape[config.num_warps]"),
    "a slice": body("return args.x.shape[0:1]"),
    "a lambda": body("return (lambda: 1)()"),
    "a comprehension": body("return max([1 for _ in range(9)])"),
    "a generator": body("return sum(i for i in range(9))"),
    "a list": body("return [1]"),
    "a dictionary": body("return {1: 2}"),
    "a text by format": body('return f"{config}"'),
    "a walrus": body("return (x := 1)"),
    "a yield": body("yield 1"),
    "await": "async " + body("return 1"),
    "a class": "class A: pass\n" + body("return 1"),
    "a class inside": body("class A: pass", "return 1"),
    "a function inside": body("def f(): return 1", "return f()"),
    "a decorator": "@print\n" + body("return 1"),
    "a default": "def cost(config, args, device, launch=print()):\n    return 1\n",
    "an annotation is not run": "def f(x: print()):\n    return x\n",
    "star arguments": "def cost(*config):\n    return 1\n",
    "a starred call": body("return max(*args)"),
    "keywords": body("return max(1, key=abs)"),
    "global": body("global x", "return 1"),
    "while": body("while True:", "    pass", "return 1"),
    "try": body("try:", "    pass", "finally:", "    pass", "return 1"),
    "with": body('with open("x"):', "    pass", "return 1"),
    "raise": body("raise SystemExit"),
    "assert": body("assert 0", "return 1"),
    "delete": body("del config", "return 1"),
    "a loop over a tuple": body("for i in (1, 2):", "    pass", "return 1"),
    "a loop's else": body("for i in range(2):", "    pass", "else:", "    pass", "return 1"),
    "assignment to an attribute": body("config.BLOCK = 1", "return 1"),
    "assignment to an element": body("args.x.shape[0] = 1", "return 1"),
    "assignment to what is given": body("device = 1", "return 1"),
    "unpacking": body("a, *b = 1, 2", "return 1"),
    "a chain of assignments": body("a = b = 1", "return 1"),
    "a call as a statement": body("print(1)", "return 1"),
    "recursion": "def f(x):\n    return f(x)\n" + body("return f(1)"),
    "recursion of cost": body("return cost(config, args, device, launch)"),
    "mutual recursion": "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n" + body("return f(1)"),
    "a huge literal": body("return 1" + "0" * 40),
    "a huge hexadecimal": body("return 0x" + "f" * 4000),
    "an infinite literal": body("return 1e999"),
    "a complex number": body("return 1j"),
    "bytes": body('return b"1"'),
    "an ellipsis": body("return ..."),
    "deep parentheses": body("return " + "(" * 400 + "1" + ")" * 400),
    "deep negation": body("return " + "-" * 3000 + "1"),
    "deep sums": body("return " + "+".join(["1"] * 3000)),
    "deep ifs": HEAD + "".join(f"{' ' * i}if 1:\n     " for i in range(99)) + " " * 99 + "return 1\n",
    "too long": body("return 1" + " " * MAX_CHARACTERS),
    "a null byte": body("return 1\0"),
    "a surrogate": body("return '\ud800' == 1"),
    "no syntax": "def cost(",
    "nothing": "",
    "no cost": "def price(config, args, device, launch):\n    return 1\n",
    "other parameters": "def cost(c, args, device, launch):\n    return 1\n",
    "a statement of the module": "print(1)\n" + body("return 1"),
    "a computed summary": "SUMMARY = print()\n" + body("return 1"),
    "too sure": "CONFIDENCE = 2\n" + body("return 1"),
    "not a number": "CONFIDENCE = 'much'\n" + body("return 1"),
    "a constant of nothing": body("return constant(0)"),
    "a computed constant": body("return constant(config.BLOCK)"),
    "a boundless constant": body("return constant(1, spread=1e9)"),
    "many constants": body("return " + " + ".join(f"constant({i + 1})" for i in range(20))),
    "a term without a text": body("return term(1, config.BLOCK)"),
    "a bitwise and": body("return 1 & 2"),
    "a matrix product": body("return config.BLOCK @ config.BLOCK"),
    "is": body("return 1 if config.BLOCK is None else 2"),
    "a return of nothing": body("return"),
    # ... and when it is evaluated.
    "no such meta-parameter": body("return config.BLOK"),
    "dunder of config": body("return config.__class__"),
    "dunder of arguments": body("return args.__init__.__globals__"),
    "dunder of a tensor": body("return args.x.__class__"),
    "another attribute of the device": body("return device.extra"),
    "a method of the device": body("return device.__hash__"),
    "other elements of the grid": body("return launch.grid[7]"),
    "the grid itself": body("return launch.grid"),
    "no such dimension": body("return args.x.shape[5]"),
    "a tensor as a number": body("return args.x"),
    "config itself": body("return config"),
    "an unset name": body("return nothing"),
    "a name that only one branch sets": body("if config.num_warps > 99:", "    x = 1", "return x"),
    "nothing in some case": body("if config.num_warps > 4:", "    return 1"),
    "a text": body('return "fast"'),
    "a sum of texts": body('return args.x.dtype + "1"'),
    "a multiplied text": body('return "a" * 1000000000'),
    "zero": body("return 0"),
    "below zero": body("return -1"),
    "not finite": body("return 1 / 0"),
    "no number": body("return 0 / 0"),
    "overflow": body("return 10 ** 10 ** 10"),
    "an endless loop": body("for i in range(1000000):", "    pass", "return 1"),
    "a loop without a step": body("x = 0", "for i in range(0, 9, 0):", "    x = 1", "return x"),
    "a loop that differs": body("for i in range(config.num_warps):", "    pass", "return 1"),
    "a loop to infinity": body("for i in range(1 / 0):", "    pass", "return 1"),
    "loops in loops": HEAD
    + "".join("    " * i + f"    for a{i} in range(64):\n"[4 if i == 0 else 0 :] for i in range(4))
    + "    " * 5
    + "x = 1\n    return 1\n",
    "a chain of calls": "".join(
        f"def f{i + 1}(x):\n    return f{i}(x)\n" if i else "def f1(x):\n    return x\n" for i in range(12)
    )
    + body("return f12(1)"),
    "slow operations in loops": body(
        "x = config.BLOCK",
        "for i in range(64):",
        "    for j in range(64):",
        "        y = " + " + ".join(["x ** 0.5"] * 150),
        "return y",
    ),
    "calls that double": "def f0(x):\n    return x\n"
    + "".join(f"def f{i}(x):\n    return {' + '.join([f'f{i - 1}(x)'] * 12)}\n" for i in range(1, 7))
    + body("return f6(1)"),
    "too few arguments": "def f(x, y):\n    return x\n" + body("return f(1)"),
    "no arguments of max": body("return max()"),
    "too many arguments of sqrt": body("return sqrt(1, 2, 3)"),
    "negative power": body("return (0 - config.BLOCK) ** 0.5"),
}


def evaluated(text: str) -> Costs:
    """What it says of a kernel's candidates, without a warning of Python or numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return parse_cost_function(text).evaluate(subject())


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_gives_no_cost_is_refused_soon_and_no_part_of_it_has_run(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[object] = []
    monkeypatch.setattr("builtins.print", lambda *given, **_: printed.append(given))
    begin = time.thread_time()
    with pytest.raises(AdviceError):
        evaluated(text)
    assert time.thread_time() - begin < WITHIN_S
    assert printed == []


def test_names_are_read_as_python_reads_them() -> None:
    """A compatibility character is the letter that it looks like, here as in Python: no second alphabet."""
    assert parse_cost_function(body("return config.ＢLOCK + 1")).evaluate(subject()).log2.shape == (12,)
    with pytest.raises(AdviceError):
        parse_cost_function(body("return config.ВLOCK")).evaluate(subject())  # a Cyrillic letter
    with pytest.raises(AdviceError):
        parse_cost_function(body("return ｅval(1)"))


def mutated(text: str, generator: random.Random) -> str:
    """The text with one to three changes of characters or lines; the benchmark changes trees."""
    for _ in range(generator.randint(1, 3)):
        text = generator.choice((_character, _line))(text, generator)
    return text


def _character(text: str, generator: random.Random) -> str:
    at = generator.randrange(len(text))
    return text[:at] + generator.choice("()[]:.,+-*/%<>=_ \n\t0x9eajfor\"'#@\\\u0660é") + text[at + 1 :]


def _line(text: str, generator: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    at, to = generator.randrange(len(lines)), generator.randrange(len(lines) + 1)
    lines.insert(to, lines[at])
    if generator.random() < 0.5:
        del lines[generator.randrange(len(lines))]
    return "".join(lines)


def test_mutated_functions_are_refused_or_give_plain_costs() -> None:
    generator, texts, taken = random.Random(0), list(GOOD.values()), 0
    for number in range(MUTATIONS):
        text = mutated(texts[number % len(texts)], generator)
        begin = time.thread_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                function = parse_cost_function(text)
                costs = evaluated(text)
                check_function(function, [sample()])
            except AdviceError:
                pass
            else:
                taken += 1
                assert costs.log2.shape == (12,)
                assert np.isfinite(costs.log2).all()
        assert time.thread_time() - begin < WITHIN_S, text
    assert 0 < taken < MUTATIONS, "neither are all harmless, nor all out of the language"
