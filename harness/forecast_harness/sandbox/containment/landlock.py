"""Landlock: which files a process and its children may reach, without any privilege (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from forecast_harness.sandbox.containment import linux

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL_DEVICE
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LATEST_FILES = (1 << 16) - 1
_TCP = 0b11
"""Binding and connecting."""
_SCOPE_SOCKETS, _SCOPE_SIGNALS = 0b01, 0b10


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi_version() -> int:
    """The kernel's landlock version; 0 when it has none or it is switched off."""
    try:
        return linux.syscall(_SYS_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def scopes_signals() -> bool:
    """Whether a restricted process can signal only its own kind."""
    return abi_version() >= 6


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow reading and executing below `readable`, everything below `writable`, nothing else, for good.

    Also denied, where the kernel knows how: TCP (version 4), signals to and abstract sockets of
    unrestricted processes (6). Paths that do not exist are passed over. Raises `OSError` without landlock.
    """
    abi = linux.syscall(_SYS_CREATE_RULESET, None, 0, 1)
    handled = _FILES_BY_ABI.get(abi, _LATEST_FILES)
    rules = _RulesetAttributes(
        handled, _TCP if abi >= 4 else 0, _SCOPE_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = linux.syscall(_SYS_CREATE_RULESET, ctypes.pointer(rules), size, 0)
    try:
        for path in readable:
            _add_rule(ruleset, path, (_EXECUTE | _READ | _READ_DIR) & handled)
        for path in writable:
            _add_rule(ruleset, path, handled)
        linux.no_new_privileges()
        linux.syscall(_SYS_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = _PathBeneathRule(access if Path(path).is_dir() else access & _ON_FILES, place)
        linux.syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.pointer(rule), 0)
    finally:
        os.close(place)
