"""Runs VGF programs in ``executorch.runtime`` with the backend of ``runtime/backends/vgf``, in a separate process.

The process of the tests may have loaded the host plugin's backend of the same name; a process can load only one.

Usage: ``python -m tests.runtime.vgf_process PLUGIN FOLDER``. For each ``NAME.pte`` and ``NAME.npy`` in the folder it
writes the program's output for the array to ``NAME.out.npy``. It writes the error messages of ``small.pte`` without a
driver, without the emulation layer and with wrong inputs to ``outcomes.json``, and those of damaged payloads to
``damaged.json``.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from executorch.runtime import Runtime

_HEADER = 128
_SECTIONS = ("modules", "sequence", "resources", "constants")


def execute(program: bytes, array: np.ndarray) -> np.ndarray:
    """Run a program with one input and one output, and return the output."""
    method = Runtime.get().load_program(program).load_method("forward")
    return method.execute([torch.from_numpy(array)])[0].numpy()


def patch_number(program: bytes, offset: int, layout: str, value: int) -> bytes:
    """Replace the number at ``offset`` of a program."""
    changed = bytearray(program)
    struct.pack_into(layout, changed, offset, value)
    return bytes(changed)


def damage_payloads(program: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield valid programs with damaged VGF files in their delegates."""
    start = program.index(b"VGF1")
    # In a flatbuffer, the length precedes a vector of bytes.
    length = struct.unpack_from("<I", program, start - 4)[0]
    for cut in (0, 1, _HEADER - 1, _HEADER, length // 2, length - 1):
        yield f"cut to {cut}", patch_number(program, start - 4, "<I", cut)
    yield "magic", patch_number(program, start, "<B", ord("v"))
    yield "major version", patch_number(program, start + 8, "<B", 1)
    yield "minor version", patch_number(program, start + 9, "<B", 255)
    for index, section in enumerate(_SECTIONS):
        for field, name in enumerate(("offset", "size")):
            at = start + 16 + 16 * index + 8 * field
            original = struct.unpack_from("<Q", program, at)[0]
            bits = [original ^ (1 << bit) for bit in (2, 12, 20, 32, 40, 63)]
            for value in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1, length, *bits):
                yield f"{section} {name} {value}", patch_number(program, at, "<Q", value)


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change environment variables; the Vulkan loader reads them whenever an instance is created."""
    saved = {name: os.environ[name] for name in changes}
    os.environ.update(changes)
    yield
    os.environ.update(saved)


def catch_message(action: Callable[[], np.ndarray]) -> str:
    """Call ``action`` and return the message of its exception, or an empty string."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def main(plugin: str, folder: Path) -> None:
    """Run the programs of the folder, see the module's docstring."""
    ctypes.CDLL(plugin)
    small, array = (folder / "small.pte").read_bytes(), np.load(folder / "small.npy")
    outcomes = {}
    for name, variable in {"no driver": "VK_DRIVER_FILES", "no layer": "VK_LAYER_PATH"}.items():
        with environment({variable: "/nowhere"}):
            outcomes[name] = catch_message(lambda: execute(small, array))
    for path in sorted(folder.glob("*.pte")):
        np.save(path.with_suffix(".out.npy"), execute(path.read_bytes(), np.load(path.with_suffix(".npy"))))
    outcomes["wrong dtype"] = catch_message(lambda: execute(small, array.astype(np.float32)))
    outcomes["wrong shape"] = catch_message(lambda: execute(small, array[:, :, 1:]))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
    payloads = {name: catch_message(partial(execute, program, array)) for name, program in damage_payloads(small)}
    (folder / "damaged.json").write_text(json.dumps(payloads))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
