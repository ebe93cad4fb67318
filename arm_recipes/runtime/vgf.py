"""VGF delegates: the scenario runner of Arm's ML SDK executes VGF files on Vulkan, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime import vulkan
from arm_recipes.runtime.errors import PayloadError, RuntimeUnavailable
from arm_recipes.runtime.lazy import once
from arm_recipes.runtime.vgf_payload import read_vgf

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]

#: Name of the Vulkan format in the scenario runner, by dtype.
_VULKAN_FORMATS = {
    "bool": "R8BoolArm",
    "uint8": "R8Uint",
    "int8": "R8Sint",
    "int16": "R16Sint",
    "int32": "R32Sint",
    "int64": "R64Sint",
    "float16": "R16Sfloat",
    "float32": "R32Sfloat",
}
#: Number of runs after which a new scenario (tensors and pipeline in the scenario runner) replaces the old one. Until a
#: scenario is deleted, the scenario runner (0.11) leaks 430 bytes of timings per run. Creating a scenario takes a third
#: of a second for a small network. With 500 runs per scenario, resident memory was constant from run 7,000 to run
#: 16,000. With 4,000 runs per scenario, resident memory grew, because the freed blocks were too large for reuse.
_RUNS_PER_SCENARIO = 500


class VgfDelegate:
    """A VGF file with its Vulkan pipeline. Many runs share one pipeline.

    Raises:
        PayloadError: the file is damaged, Vulkan rejected it, or the scenario runner does not support a dtype.
        RuntimeUnavailable: this machine has no usable Vulkan loader, driver or emulation layer, or lacks the scenario
            runner.
    """

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._description = read_vgf(memoryview(payload))
        self.inputs, self.outputs = self._description.inputs, self._description.outputs
        self._scenario: Any = None
        self._create_scenario()

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``LoadedDelegate``.

        Raises:
            PayloadError: the run failed in Vulkan.
        """
        if self._runs == _RUNS_PER_SCENARIO:
            self._create_scenario()
        self._runs += 1
        outputs = self._tensors[len(self.inputs) :]
        try:
            for tensor, array in zip(self._tensors, arrays, strict=False):
                self._scenario.upload(tensor, array)
            self._scenario.run()
            return [self._scenario.download(tensor) for tensor in outputs]
        except (RuntimeError, ValueError) as error:
            raise PayloadError(f"Vulkan ({vulkan.set_up_vulkan()}) failed to run the VGF file: {error}") from error

    def close(self) -> None:
        """See ``LoadedDelegate``."""
        self._scenario = None

    def _create_scenario(self) -> None:
        """Create a scenario with the tensors and the pipeline. An earlier scenario is dropped first."""
        self._scenario, self._runs = None, 0
        runner = _import_scenario_runner()
        builder, source = runner.ScenarioBuilder(), runner.VgfInfo()
        self._tensors = [_add_tensor(runner, builder, info) for info in (*self.inputs, *self.outputs)]
        with tempfile.NamedTemporaryFile(suffix=".vgf") as file:
            file.write(self._payload)
            file.flush()
            try:
                source.load_source(file.name)
                dispatch = runner.DispatchVgfData(builder.add_vgf(source))
                dispatch.bindings = [
                    runner.TypedBinding(0, slot, tensor, runner.DescriptorType.TensorArm)
                    for slot, tensor in zip(self._description.bindings, self._tensors, strict=True)
                ]
                builder.add_dispatch_vgf(dispatch)
                self._scenario = builder.build()
            except (RuntimeError, ValueError) as error:
                raise PayloadError(f"Vulkan ({vulkan.set_up_vulkan()}) rejected the VGF file: {error}") from error


def _add_tensor(runner: ModuleType, builder: Any, info: TensorInfo) -> Any:
    if info.dtype not in _VULKAN_FORMATS:
        raise PayloadError(
            f"'{info.name}' of the VGF file has the dtype {info.dtype}, which the scenario runner does not support"
        )
    return builder.add_tensor(list(info.shape), getattr(runner.Format, _VULKAN_FORMATS[info.dtype]))


@once
def _import_scenario_runner() -> ModuleType:
    vulkan.set_up_vulkan()
    try:
        import scenario_runner_py
    except ImportError as error:
        raise RuntimeUnavailable(
            f"Running a VGF program needs the package ai-ml-sdk-scenario-runner: {error}. "
            "Install it with: pip install 'arm-recipes[vgf]'"
        ) from None
    runner: ModuleType = scenario_runner_py
    return runner
