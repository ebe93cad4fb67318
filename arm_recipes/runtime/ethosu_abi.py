"""ctypes bindings of the emulator: the declarations of ``runtime/emulator/emulator_abi.h``."""

from __future__ import annotations

import ctypes

from arm_recipes.runtime.lazy import once

REGIONS = 8
#: Findings of the access checker, as bits: an uninitialized byte that is read or returned, and a data hazard (two
#: operations access a byte without the required order).
UNINITIALIZED, HAZARD = 1, 2
ALL_FINDINGS = UNINITIALIZED | HAZARD


class Message(ctypes.Structure):
    """An error message with the byte offset of the command that it concerns. The offset is 0 if there is no command."""

    _fields_ = (("offset", ctypes.c_uint64), ("text", ctypes.c_char * 512))


class ByteRange(ctypes.Structure):
    """A range of bytes in a region."""

    _fields_ = (("region", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class ExecutionStatistics(ctypes.Structure):
    """Statistics of one execution. Arrays have one entry for each memory region."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("operations", "commands", "macs", "uninitialized", "hazards")),
        *((name, ctypes.c_uint64 * REGIONS) for name in ("bytes_read", "bytes_written", "peak", "touched")),
    )


class Operation(ctypes.Structure):
    """An operation of the stream, with the tensor that it writes and its statistics in the last checked execution."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_uint64) for name in ("offset", "commands", "macs")),
        *((name, ctypes.c_uint64 * REGIONS) for name in ("bytes_read", "bytes_written")),
        ("address", ctypes.c_int64),
        ("shape", ctypes.c_int32 * 3),
        *((name, ctypes.c_int32) for name in ("region", "element_size", "is_signed", "zero_point", "indexed")),
    )


def declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare argument and result types of the emulator's functions in ``library``, and return it."""
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    for name, arguments, result in (
        ("load", (ctypes.c_char_p, size, pointer, pointer, pointer), pointer),
        ("execute", (pointer, pointer, pointer), ctypes.c_int32),
        ("step", (pointer, size, pointer, pointer), ctypes.c_int32),
        ("enable_access_checker", (pointer, pointer, size, pointer, size, ctypes.c_uint32, pointer), ctypes.c_int32),
        ("get_statistics", (pointer, pointer), None),
        ("get_operation", (pointer, size, pointer), ctypes.c_int32),
        ("copy_output", (pointer, size, pointer, size), ctypes.c_int32),
        ("required_size", (pointer, ctypes.c_int32), size),
        ("free", (pointer,), None),
    ):
        function = getattr(library, f"ethosu_emulator_{name}")
        function.argtypes, function.restype = arguments, result
    return library


@once
def load_emulator() -> ctypes.CDLL:
    """Load the emulator, which is part of the host plugin.

    Raises:
        RuntimeUnavailable: the plugin cannot be built or loaded.
    """
    from arm_recipes.runtime.host_plugin import load_plugin

    return declare_functions(load_plugin())
