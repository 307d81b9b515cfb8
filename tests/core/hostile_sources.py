"""Texts that parsers choke on: what a broken model, or somebody who means harm, may hand over as source."""

from __future__ import annotations

DEEP = 60_000
"""Levels: more than the parser's stack holds."""


def hostile_sources() -> dict[str, str]:
    """Texts by name. Some are valid Python, and none may end the process that reads it."""
    brackets = {
        f"{name} {way}": f"x = {opening * DEEP}1{closing * DEEP if way == 'closed' else ''}\n"
        for name, opening, closing in (("parentheses", "(", ")"), ("lists", "[", "]"), ("sets", "{", "}"))
        for way in ("closed", "open")
    }
    prefixes = {
        f"chain of {name}": f"x = {prefix * DEEP}1\n"
        for name, prefix in (
            ("minus", "-"),
            ("tilde", "~"),
            ("not", "not "),
            ("lambda", "lambda: "),
            ("lambda with defaults", "lambda a=1: "),
            ("await", "await "),
            ("stars", "*"),
            ("mixed signs", "-+~"),
        )
    }
    suffixes = {
        f"chain of {name}": f"x = a{suffix * DEEP}\n"
        for name, suffix in (
            ("attributes", ".b"),
            ("calls", "()"),
            ("subscripts", "[0]"),
            ("additions", "+1"),
            ("powers", "**1"),
            ("comparisons", "<1"),
            ("conditionals", " if b else c"),
            ("strings", " 'b'"),
            ("walrus", ":=1"),
            ("assignments", " = a"),
            ("alternatives", " | a"),
        )
    }
    towers = {
        "indentation": "".join(f"{' ' * n}if x:\n" for n in range(200)) + " " * 200 + "pass\n",
        "tabs and spaces": "".join(f"{(' ' * 8 if n % 2 else chr(9)) * n}if x:\n" for n in range(99)),
        "dedents to nowhere": "if x:\n        a\n    b\n  c\n",
        "elif": "if x:\n pass\n" + "elif x:\n pass\n" * 20_000,
        "functions": "".join(f"{' ' * n}def f{n}():\n" for n in range(90)) + " " * 90 + "pass\n",
        "classes": "".join(f"{' ' * n}class C{n}:\n" for n in range(90)) + " " * 90 + "pass\n",
        "decorators": "@a\n" * 20_000 + "def f(): pass\n",
        "nested decorators": "@" + "a(" * 90 + ")" * 90 + "\ndef f(): pass\n",
        "comprehension": "x = [a " + "for a in b " * 10_000 + "]\n",
        "comprehensions in each other": "x = " + "[a for a in " * 60 + "b" + "]" * 60 + "\n",
        "f-string": 'x = f"' + "{a}" * 100_000 + '"\n',
        "f-string formats": 'x = f"' + "{a:" * 60 + "}" * 60 + '"\n',
        "f-strings in each other": "x = " + 'f"{' * 200 + "1" + '}"' * 200 + "\n",
        "f-string with brackets": 'x = f"{' + "(" * 5_000 + ")" * 5_000 + '}"\n',
        "match": "match x:\n" + " case [*_, {'a': (1 | 2), **rest}] if rest: pass\n" * 20_000,
        "match in match": "".join(
            f"{' ' * (2 * n)}match x:\n{' ' * (2 * n + 1)}case {n}:\n" for n in range(60)
        ),
        "pattern": "match x:\n case " + "[" * 60 + "]" * 60 + ": pass\n",
        "with": "with " + "(" * 60 + "a" + ")" * 60 + " as b: pass\n",
        "with without its end": "with " + "(" * 60 + "a as b" + ")" * 59 + ": pass\n",
        "calls without an end": "f(" * 60 + "\n",
        "braces without an end": "x = " + "{a: {" * 30 + "\n",
        "arguments": f"def f({', '.join(f'a{n}=1' for n in range(30_000))}): pass\n",
        "statements in a line": "a;" * 90_000 + "\n",
        "except": "try:\n pass\n" + "except a:\n pass\n" * 20_000,
        "globals": "def f():\n global " + ", ".join(f"a{n}" for n in range(50_000)) + "\n",
    }
    numbers = {
        "400 digits": f"x = {'9' * 400}\n",
        "integer of 5,000 digits": f"x = {'9' * 5_000}\n",
        "integer of a million digits": f"x = {'9' * 1_000_000}\n",
        "hexadecimal of a million digits": f"x = 0x{'f' * 1_000_000}\n",
        "float of a million digits": f"x = 1.{'9' * 1_000_000}\n",
        "exponent": "x = 1e" + "9" * 4_000 + "\n",
        "underscores": f"x = {'1_' * 50_000}1\n",
        "imaginary": "x = 1e999j\n",
    }
    characters = {
        "NUL": "x = 1\0\ny = 2\n",
        "NUL in a string": 'x = "\0"\n',
        "byte order mark": "\ufeffx = 1\n",
        "two byte order marks": "\ufeff\ufeffx = 1\n",
        "lone surrogate": "x = '\ud800'\n",
        "surrogate in a name": "x\udfff = 1\n",
        "form feeds": "\f" * 1_000 + "x = 1\n\f\fy = 2\n",
        "carriage returns": "x = 1\ry = 2\r\r\n" * 1_000,
        "vertical tabs": "x\v=\v1\n",
        "other line ends": "x = 1\u2028y = 2\x85z = 3\x1c\n",
        "letters that look alike": "\u0445 = 1\n\uff58 = \u2460\n",
        "digits of another script": "x = \u0661\u0662\n",
        "direction marks": "x = 1 # \u202e evil \u2066\n",
        "a name of a million letters": f"{'a' * 1_000_000} = 1\n",
        "combining letters": f"x{chr(0x301) * 100_000} = 1\n",
        "unknown coding cookie": "# -*- coding: evil -*-\nx = 1\n",
        "coding cookie": "# -*- coding: utf-7 -*-\nx = '+AAo-import os'\n",
        "utf-16 cookie": "# coding: utf-16\nx = 1\n",
        "continuations": "x = 1" + "\\\n" * 50_000 + "\n",
        "continuation at the end": "x = 1 \\",
        "continuation before a space": "x = 1 \\ \n+ 2\n",
        "string prefixes": "x = " + "rbfuRBFU" * 10_000 + "'a'\n",
        "prefix soup": "x = rb'a' Rb'b' f'c' bR'd' u'e' ur'f' bf'g'\n",
        "unfinished string": "x = 'abc\n",
        "unfinished docstring": '"""' + "a" * 900_000,
        "docstrings unfinished often": "'''" * 100_001,
        "quotes": "'\"" * 200_000,
        "backslashes in a string": "x = '" + "\\" * 400_001 + "'\n",
        "named escapes": "x = '" + "\\N{DIGIT ONE}" * 10_000 + "'\n",
        "broken named escape": "x = '\\N{" + "A" * 100_000 + "'\n",
        "comment": "#" * 900_000 + "\n",
        "blank lines": "\n" * 900_000,
        "spaces": " " * 900_000 + "x = 1\n",
        "semicolons": ";" * 100_000 + "\n",
        "at signs": "@" * 100_000 + "\n",
        "nothing": "",
        "a hundred megabytes in a line": "x = '" + "a" * 100_000_000 + "'\n",
        "assignment to an index": "x[" + "0][" * 40_000 + "0] = 1\n",
        "type comments": "x = 1 # type: " + "[" * 60_000 + "\n",
        "heads of edits": "<<<<<<< SEARCH\n" * 40_000,
        "halves of edits": "<<<<<<< SEARCH\n=======\n" * 20_000,
        "fences": "```python\n" * 60_000,
        "comments of C without an end": "/*" * 100_000,
        "strings of C++ without an end": 'R"(' * 60_000,
        "kernels of CUDA without an end": "__global__ void __launch_bounds__(" * 10_000,
        "loops of C": "for (int i = 0; ; )\n" * 9_000,
        "definitions of C": "".join(f"#define A{n} 1\n" for n in range(10_000)),
        "constants": f"x = ({'None, ' * 60_000})\n",
    }
    named = {f"tower of {name}": text for name, text in towers.items()}
    return {**brackets, **prefixes, **suffixes, **named, **numbers, **characters}
