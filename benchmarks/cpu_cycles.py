"""CPU cycles of the MLPerf Tiny networks: our estimates beside published measurements.

Run ``python benchmarks/cpu_cycles.py``; it prints the rows of the table of docs/contributors/cpu_cycles.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from executorch.examples.models import mlperf_tiny

from arm_backend_core.cortex_m.cost.kernels import kernel_work
from arm_backend_core.cortex_m.cost.processors import to_cycles
from arm_backend_core.targets.cortex_m import Processor
from arm_recipes import ArmRecipeType, ExportRecipe, export

#: Name of a network in MLPerf Tiny -> class that builds it.
NETWORKS: Mapping[str, Callable[[], Any]] = {
    "ad": mlperf_tiny.DeepAutoEncoderModel,
    "ic": mlperf_tiny.ResNet8Model,
    "kws": mlperf_tiny.DSCNNKWSModel,
    "vww": mlperf_tiny.MobileNetV1025Model,
}


class Measurement(NamedTuple):
    """Published medians of a board, closed division of MLPerf Tiny.

    Attributes:
        cpu: the processor.
        board: board and software.
        source: repository of mlcommons and folder of the results in it.
        megahertz: clock.
        inferences: network -> inferences per second.
    """

    cpu: str
    board: str
    source: str
    megahertz: float
    inferences: Mapping[str, float]


MEASUREMENTS = (
    Measurement(
        "cortex-m4",
        "NUCLEO-L4R5ZI, microTVM with CMSIS-NN",
        "tiny_results_v1.1/closed/Krai",
        120,
        {"ad": 116.212, "ic": 2.567, "kws": 10.019, "vww": 3.324},
    ),
    Measurement(
        "cortex-m33",
        "nRF5340-DK, microTVM with CMSIS-NN",
        "tiny_results_v1.1/closed/Krai",
        128,
        {"ad": 159.020, "ic": 3.146, "kws": 13.074, "vww": 4.286},
    ),
    Measurement(
        "cortex-m85",
        "EK-RA8D1, TensorFlow Lite Micro with CMSIS-NN",
        "tiny_results_v1.2/closed/Renesas",
        480,
        {"ad": 1884.138, "ic": 117.948, "kws": 288.611, "vww": 74.665},
    ),
    Measurement(
        "cortex-m7",
        "NUCLEO-H7A3ZI-Q, X-CUBE-AI 7.3",
        "tiny_results_v1.1/closed/Krai",
        280,
        {"ad": 547.000, "ic": 18.574, "kws": 59.788, "vww": 19.838},
    ),
    Measurement(
        "cortex-m33",
        "NUCLEO-U575ZI-Q, X-CUBE-AI",
        "tiny_results_v1.0/closed/STMicroelectronics",
        160,
        {"ad": 206.211, "ic": 7.158, "kws": 22.608, "vww": 7.496},
    ),
    Measurement(
        "cortex-m0plus",
        "NUCLEO-G0B1RE, Bosch",
        "tiny_results_v1.2/closed/bosch",
        64,
        {"ad": 24.454, "ic": 0.657, "kws": 2.107, "vww": 0.707},
    ),
)


def estimate(network: str, cpu: str) -> int:
    """Estimated cycles of a network with integer inputs and outputs."""
    entry = NETWORKS[network]()
    sample = tuple(tensor.contiguous() for tensor in entry.get_example_inputs())
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu=cpu, quantized_io=True, require_runnable=False)
    torch.manual_seed(0)
    result = export(entry.get_eager_model().eval(), recipe, [sample], progress=False)
    cycles = result.report.methods[0].cpu_cycles
    assert cycles is not None
    return cycles


def estimate_linear(cpu: str) -> int:
    """Estimated cycles of the linear layers of ``ad`` with the kernel that the measured programs use.

    Our programs compute linear layers with a scale per output channel as 1x1 convolutions.
    """
    processor, model = Processor.resolve(cpu), NETWORKS["ad"]().get_eager_model()
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    works = [
        kernel_work("quantized_linear", processor, [(1, layer.in_features), tuple(layer.weight.shape)])
        for layer in layers
    ]
    return to_cycles(processor, sum(work.instructions for work in works))


def rows() -> Iterator[tuple[str, ...]]:
    """Rows of the table, in Markdown's order of columns."""
    estimates = {(n, m.cpu): estimate(n, m.cpu) for m in MEASUREMENTS for n in NETWORKS}
    for measurement in MEASUREMENTS:
        estimates["ad, quantized_linear", measurement.cpu] = estimate_linear(measurement.cpu)
        given = {**measurement.inferences, "ad, quantized_linear": measurement.inferences["ad"]}
        for network, per_second in given.items():
            measured = measurement.megahertz * 1e6 / per_second
            estimated = estimates[network, measurement.cpu]
            figures = (f"{measured / 1e6:.2f}", f"{estimated / 1e6:.2f}", f"{estimated / measured:.2f}")
            yield (measurement.cpu, measurement.board, network, *figures)


if __name__ == "__main__":
    for row in rows():
        print("| " + " | ".join(row) + " |")
