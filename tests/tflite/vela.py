"""Vela's TFLite front end, with both of its compiler cores."""

from __future__ import annotations

import tempfile
from pathlib import Path

from arm_backend_core.workers import vela_process
from arm_backend_core.workers.worker import Worker, WorkerDied, WorkerError

#: Vela's compiler cores with the flags that select them. The legacy core, in Python, compiles for U55 and U65 only.
CORES = {"regor": (), "legacy": ("--debug-force-legacy-core",)}
#: A separate worker, because the compiler's own worker patches ``vela``. Vela crashes on some networks.
_worker = Worker(Path(vela_process.__file__))
_SECONDS = 300.0


class VelaRefusal(Exception):
    """Vela does not compile a network, or crashes."""


def compile_tflite(flatbuffer: bytes, accelerator: str, *flags: str) -> bytes:
    """Compile a TFLite flatbuffer by Vela's command line; returns a flatbuffer with ``ethos-u`` operators.

    Raises:
        VelaRefusal: Vela failed; the message has its output.
    """
    try:
        reply = _worker.call("tests.tflite.vela:run_command_line", flatbuffer, accelerator, *flags, timeout=_SECONDS)
    except WorkerError as error:
        raise VelaRefusal(f"{error}\n{error.log}") from None
    except WorkerDied as death:
        raise VelaRefusal(f"Vela {death}\n{death.log}") from None
    if reply.value is None:
        raise VelaRefusal(reply.log)
    written: bytes = reply.value
    return written


def run_command_line(flatbuffer: bytes, accelerator: str, *flags: str) -> bytes | None:
    """Run Vela in this process; None if it fails, after it printed the error."""
    from ethosu.vela import vela

    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "network.tflite")
        source.write_bytes(flatbuffer)
        if vela.main([str(source), f"--accelerator-config={accelerator}", f"--output-dir={directory}", *flags]):
            return None
        return Path(directory, "network_vela.tflite").read_bytes()
