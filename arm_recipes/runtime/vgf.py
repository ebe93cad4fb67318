"""A VGF file on Vulkan, through the scenario runner of Arm's ML SDK, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime import vulkan
from arm_recipes.runtime.errors import PayloadError, RuntimeUnavailable
from arm_recipes.runtime.lazy import once
from arm_recipes.runtime.payloads import read_vgf

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]

#: Element type -> the scenario runner's name of its Vulkan format.
_FORMATS = {
    "bool": "R8BoolArm",
    "uint8": "R8Uint",
    "int8": "R8Sint",
    "int16": "R16Sint",
    "int32": "R32Sint",
    "int64": "R64Sint",
    "float16": "R16Sfloat",
    "float32": "R32Sfloat",
}
#: The scenario runner (0.11) keeps 430 bytes of timings for every run as long as a scenario lives, so it gets a new
#: one now and then: a third of a second for a small network. Resident memory was then flat from run 7,000 to 16,000;
#: with 4,000 runs a scenario the pieces freed were too large to be used again, and it grew.
_RUNS_PER_SCENARIO = 500


class VgfDelegate:
    """A VGF file with its pipeline, set up once and then run as often as needed.

    Raises:
        PayloadError: the file is damaged, or Vulkan refused it.
        RuntimeUnavailable: there is no Vulkan here that runs it.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._described = read_vgf(memoryview(payload))
        self.inputs, self.outputs = self._described.inputs, self._described.outputs
        self._scenario: Any = None
        self._set_up()

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``Delegate``.

        Raises:
            PayloadError: Vulkan refused to run it.
        """
        if self._runs == _RUNS_PER_SCENARIO:
            self._set_up()
        self._runs += 1
        results = self._tensors[len(self.inputs) :]
        try:
            for tensor, array in zip(self._tensors, arrays, strict=False):
                self._scenario.upload(tensor, array)
            self._scenario.run()
            return [self._scenario.download(tensor) for tensor in results]
        except (RuntimeError, ValueError) as error:
            raise PayloadError(f"Vulkan ({vulkan.connect()}) did not run the VGF file: {error}") from error

    def close(self) -> None:
        """See ``Delegate``."""
        self._scenario = None

    def _set_up(self) -> None:
        """Make tensors and pipeline anew."""
        self._scenario, self._runs = None, 0
        runner = _runner()
        builder, source = runner.ScenarioBuilder(), runner.VgfInfo()
        self._tensors = [_tensor(runner, builder, info) for info in (*self.inputs, *self.outputs)]
        with tempfile.NamedTemporaryFile(suffix=".vgf") as file:
            file.write(self._payload)
            file.flush()
            try:
                source.load_source(file.name)
                dispatch = runner.DispatchVgfData(builder.add_vgf(source))
                dispatch.bindings = [
                    runner.TypedBinding(0, slot, tensor, runner.DescriptorType.TensorArm)
                    for slot, tensor in zip(self._described.bindings, self._tensors, strict=True)
                ]
                builder.add_dispatch_vgf(dispatch)
                self._scenario = builder.build()
            except (RuntimeError, ValueError) as error:
                raise PayloadError(f"Vulkan ({vulkan.connect()}) did not take the VGF file: {error}") from error


def _tensor(runner: ModuleType, builder: Any, info: TensorInfo) -> Any:
    if info.dtype not in _FORMATS:
        raise PayloadError(f"'{info.name}' of the VGF file has element type {info.dtype}, which cannot be passed here")
    return builder.add_tensor(list(info.shape), getattr(runner.Format, _FORMATS[info.dtype]))


@once
def _runner() -> ModuleType:
    vulkan.connect()
    try:
        import scenario_runner_py
    except ImportError as error:
        raise RuntimeUnavailable(
            f"Running a VGF program takes the package ai-ml-sdk-scenario-runner: {error}. "
            "Install it with: pip install 'arm-recipes[vgf]'"
        ) from None
    runner: ModuleType = scenario_runner_py
    return runner
