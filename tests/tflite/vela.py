"""Vela's TFLite front end, in both of its cores."""

from __future__ import annotations

import tempfile
from pathlib import Path

from arm_backend_core.workers import vela_process
from arm_backend_core.workers.worker import Worker, WorkerDied, WorkerError

#: Vela's cores with the flags that choose them. The legacy one, in Python, compiles for U55 and U65 only.
CORES = {"regor": (), "legacy": ("--debug-force-legacy-core",)}
#: A process of our own: that of the core has its ``vela`` changed, and Vela crashes on some networks.
_worker = Worker(Path(vela_process.__file__))
_SECONDS = 300.0


class VelaRefusal(Exception):
    """Vela does not compile a network, or crashes."""


def compile_tflite(flatbuffer: bytes, accelerator: str, *flags: str) -> bytes:
    """What Vela's command line writes for a TFLite flatbuffer: another, with ``ethos-u`` operators.

    Raises:
        VelaRefusal: with what Vela printed.
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
    """Run Vela in this process; None if it returns with an error, which it has printed."""
    from ethosu.vela import vela

    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "network.tflite")
        source.write_bytes(flatbuffer)
        if vela.main([str(source), f"--accelerator-config={accelerator}", f"--output-dir={directory}", *flags]):
            return None
        return Path(directory, "network_vela.tflite").read_bytes()
