"""Small TOSA graphs for tests: written with a Builder, validated by tosa-opt, compiled by Vela."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.hardware import ETHOS_U_FAMILIES
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError
from tests.accelerators import ACCELERATORS

Body = Callable[..., Value | tuple[Value, ...]]
Input = tuple[tuple[int, ...], DType]
#: Target with everything of TOSA 1.0 that Vela accepts, without the limits of an NPU family.
FULL_TARGET = Target.from_tosa_spec("TOSA-1.0+INT+int16+int4+doubleround")
_ACCELERATORS = {name.rpartition("-")[0]: name for name in ACCELERATORS}


def make_target(name: str, release: vela.Release | None = None) -> Target:
    """Make the target of an Ethos-U family or accelerator, with the extensions that all families have.

    Args:
        name: a family, for example ``ethos-u55``, or an accelerator, for example ``ethos-u55-128``.
        release: release of Vela; default: the installed one.
    """
    found, _, macs = _ACCELERATORS.get(name, name).rpartition("-")
    assert found in ETHOS_U_FAMILIES
    spec = "TOSA-1.0+INT+int16+int4+doubleround"
    return Target.from_tosa_spec(spec, family=found, macs=int(macs), vela_release=release or vela.installed_release())


def build_graph(body: Body, *inputs: Input, target: Target = FULL_TARGET) -> Graph:
    """Build a graph whose outputs are the values that ``body(builder, *inputs)`` returns."""
    result = Graph()
    values = [result.add_input(shape, dtype, f"x{i}") for i, (shape, dtype) in enumerate(inputs)]
    returned = body(LegalizingBuilder(result, target), *values)
    result.outputs = list(returned) if isinstance(returned, tuple) else [returned]
    return result


def build_flatbuffer(body: Body, *inputs: Input, target: Target = FULL_TARGET) -> bytes:
    """Build a graph as ``build_graph`` does, and serialize it."""
    return serialize(build_graph(body, *inputs, target=target))


@cache
def _configuration(name: str) -> vela.VelaConfiguration:
    return vela.parse_command_line((f"--accelerator-config={_ACCELERATORS[name]}", "--output-format=raw"))


def estimate_npu_cycles(name: str, flatbuffer: bytes) -> int:
    """Return Vela's estimate of NPU cycles. Raises WorkerError if Vela refuses the graph, WorkerDied if it crashes."""
    answer, _ = vela.compile_tosa(flatbuffer, _configuration(name), 60.0)
    return int(answer["report"]["npuCycles"])


def is_compiled_by_vela(name: str, flatbuffer: bytes) -> bool:
    """Whether Vela compiles the flatbuffer for a family."""
    try:
        estimate_npu_cycles(name, flatbuffer)
    except (WorkerError, WorkerDied):
        return False
    return True


def validate_by_tosa_opt(flatbuffer: bytes, target: Target) -> str | None:
    """Validate strictly against the target's version, profiles and extensions. Returns the errors, None if valid."""
    profiles = ",".join(f"pro_{profile.lower()}" for profile in sorted(target.profiles))
    version = target.version_text + ".draft" * (target.version > (1, 0))
    extensions = sorted(target.extensions)
    extensions += ["mxfp_conv"] * ("mxfp" in extensions)  # the validator splits the draft's extension into two
    environment = f"specification_version={version} profiles={profiles} extensions={','.join(extensions)}"
    with tempfile.TemporaryDirectory() as folder:
        file, empty = Path(folder, "graph.tosa"), Path(folder, "empty.mlir")
        file.write_bytes(flatbuffer)
        empty.touch()
        pipeline = (
            f"builtin.module(tosa-deserialize{{tosa-flatbuffer-filename={file}}},"
            f"tosa-attach-target{{{environment}}},tosa-validate{{strict-op-spec-alignment}})"
        )
        command = [str(Path(sysconfig.get_path("scripts"), "tosa-opt")), str(empty), f"--pass-pipeline={pipeline}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 and "error:" not in done.stderr else done.stderr.strip() or "it died"


def build_and_validate(body: Body, *inputs: Input, target: Target = FULL_TARGET) -> list[str]:
    """Build a graph and list its operator kinds. Asserts that tosa-opt and the reference model accept the graph."""
    written = build_graph(body, *inputs, target=target)
    flatbuffer = serialize(written)
    assert validate_by_tosa_opt(flatbuffer, target) is None
    arrays = [np.ones(value.shape, value.dtype.numpy) for value in written.inputs]
    if not any(value.dtype is DType.BF16 for value in written.inputs):
        reference_model.run(flatbuffer, arrays)
    return [op.kind for op in written.ops]


def assert_valid(flatbuffer: bytes, spec: str) -> None:
    """Check the flatbuffer strictly against TOSA 1.0; ``spec`` is for example ``TOSA-1.0+INT+int16``.

    Raises:
        AssertionError: the flatbuffer is illegal; the message has the errors of tosa-opt.
    """
    complaint = validate_by_tosa_opt(flatbuffer, Target.from_tosa_spec(spec))
    assert complaint is None, complaint[:2000]
