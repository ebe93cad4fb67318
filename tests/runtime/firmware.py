"""Runs programs on the firmware of ``runtime/tests/firmware``, compiled for a Cortex-M55 and executed by QEMU."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.exir.scalar_type import ScalarType
from executorch.exir.schema import Bool, DelegateCall, ExecutionPlan, IntList, KernelCall, Null, Program, TensorList
from executorch.exir.schema import Tensor as TensorValue
from torch import Tensor

from arm_recipes.runtime.ethosu_payload import read_payload_content
from tests.runtime.cpp_build import RUNTIME, require, run

_TOOLCHAIN = "gcc-arm-none-eabi libnewlib-arm-none-eabi libstdc++-arm-none-eabi-newlib"
_DTYPES = {ScalarType.FLOAT: torch.float32, ScalarType.CHAR: torch.int8, ScalarType.SHORT: torch.int16}
#: NPU products; the index is the driver's product number.
_PRODUCTS = (55, 65, 85)
#: Time limit of a run in seconds; the longest takes 1 s.
_TIMEOUT = 120


def build(directory: Path) -> Path:
    """Compile and link the firmware."""
    require("arm-none-eabi-g++", _TOOLCHAIN)
    options = ["ETHOSU_CORTEX_M", "CORTEX_M_KERNELS", "ETHOSU_EMULATOR", "TESTS"]
    definitions = [
        *(f"-DARM_RUNTIME_{option}=ON" for option in options),
        f"-DCMAKE_TOOLCHAIN_FILE={RUNTIME / 'cmake/cortex-m55.cmake'}",
        f"-DETHOSU_DRIVER_INCLUDE_DIR={RUNTIME / 'emulator/driver'}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
    ]
    run([require("cmake", "cmake"), "-S", str(RUNTIME), "-B", str(directory), *definitions])
    run(["cmake", "--build", str(directory), "--target", "arm_runtime_firmware"])
    return directory / "tests/firmware/arm_runtime_firmware.elf"


@dataclass(frozen=True)
class Run:
    """Result of a firmware run: whether it succeeded, its output text, and its output tensors."""

    ok: bool
    printed: str
    outputs: tuple[Tensor, ...]


def start(image: Path, directory: Path, machine: str = "mps3-an547") -> tuple[bool, str]:
    """Execute an image that can read a folder. Returns whether it succeeded, and what it printed."""
    qemu = [require("qemu-system-arm", "qemu-system-arm"), "-M", machine, "-display", "none"]
    qemu += ["-monitor", "none", "-serial", "none", "-semihosting-config", "enable=on,target=native"]
    done = subprocess.run(
        [*qemu, "-kernel", str(image)],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT,
    )
    return done.returncode == 0, done.stdout


class Firmware:
    """A program in the folder that the firmware reads."""

    def __init__(self, image: Path, program: bytes, directory: Path) -> None:
        self._image, self._directory = image, directory
        self._program: Program = deserialize_pte_binary(program).program
        # Further methods return the quantization parameters of inputs and outputs.
        (self.plan,) = [plan for plan in self._program.execution_plan if plan.name == "forward"]
        self.payloads: list[bytes] = []
        for delegate in self.plan.delegates:
            self.payloads.append(self._program.backend_delegate_data[delegate.processed.index].data)

    @cached_property
    def npu(self) -> tuple[int, int]:
        """NPU of the device: the driver's product number and log2 of the MACs; 0, 0 without delegates."""
        if not self.payloads:
            return 0, 0
        npu = read_payload_content(self.payloads[0]).payload
        return _PRODUCTS.index(npu.product), npu.macs.bit_length() - 1

    def run(self, *inputs: Tensor) -> Run:
        """Execute the program once.

        Raises:
            AssertionError: the program has constants outside its delegates.
        """
        assert not self.constants(), "the firmware has no constants"
        for number, payload in enumerate(self.payloads):
            (self._directory / f"payload{number}").write_bytes(payload)
        for number, tensor in enumerate(inputs):
            (self._directory / f"input{number}").write_bytes(tensor.contiguous().numpy().tobytes())
        (self._directory / "method").write_text("\n".join(self.test_script()) + "\n")
        ok, printed = start(self._image, self._directory)
        return Run(ok, printed, tuple(self._outputs()) if ok else ())

    def constants(self) -> dict[int, bytes]:
        """Return the bytes of the constant tensors by index of the value."""
        buffers = self._program.constant_buffer
        tensors = {number: value.val for number, value in enumerate(self.plan.values)}
        return {
            number: buffers[tensor.data_buffer_idx].storage
            for number, tensor in tensors.items()
            if isinstance(tensor, TensorValue) and tensor.data_buffer_idx and tensor.allocation_info is None
        }

    def test_script(self) -> Iterator[str]:
        """Yield one line per entry of the test script, in the format of runtime/tests/firmware/firmware.cpp."""
        yield f"npu {self.npu[0]} {self.npu[1]}"
        yield from self.method_entries()

    def method_entries(self) -> Iterator[str]:
        """Yield the lines of ``test_script`` without the NPU."""
        plan = self.plan
        yield from (_value(value.val) for value in plan.values)
        for number, delegate in enumerate(plan.delegates):
            specs = [(spec.key, spec.value) for spec in delegate.compile_specs if len(spec.value) == 4]
            words = [f"{key} {struct.unpack('<I', bytes(value))[0]}" for key, value in specs]
            yield " ".join([f"delegate {delegate.id} payload{number} {len(specs)}", *words])
        yield from (f"input {value} input{number}" for number, value in enumerate(plan.inputs))
        yield from _steps(plan)
        yield from (f"output {value} output{number}" for number, value in enumerate(plan.outputs))

    def _outputs(self) -> Iterator[Tensor]:
        for number, index in enumerate(self.plan.outputs):
            value = self.plan.values[index].val
            assert isinstance(value, TensorValue)
            content = bytearray((self._directory / f"output{number}").read_bytes())
            yield torch.frombuffer(content, dtype=_DTYPES[value.scalar_type]).reshape(value.sizes)


def _value(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Null):
        return "null"
    if isinstance(value, (IntList, TensorList)):
        return _call("ints" if isinstance(value, IntList) else "tensors", value.items)
    if isinstance(value, Bool):
        return f"bool {int(value.bool_val)}"
    if isinstance(value, TensorValue):
        numbers = [int(value.scalar_type), len(value.sizes), *value.sizes, *value.dim_order]
        return " ".join(["tensor", *map(str, numbers)])
    return f"{kind.lower()} {getattr(value, f'{kind.lower()}_val')!r}"


def _steps(plan: ExecutionPlan) -> Iterator[str]:
    (chain,) = plan.chains
    for instruction in chain.instructions:
        step = instruction.instr_args
        if isinstance(step, KernelCall):
            operator = plan.operators[step.op_index]
            yield _call(f"kernel {operator.name}.{operator.overload}", step.args)
        elif isinstance(step, DelegateCall):
            yield _call(f"call {step.delegate_index}", step.args)


def _call(prefix: str, arguments: Sequence[int]) -> str:
    return " ".join([prefix, str(len(arguments)), *map(str, arguments)])
