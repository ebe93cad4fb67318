"""A sample of the TOSA conformance generator's tests, compiled by Vela and executed on the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.accelerators import ACCELERATORS
from tests.runtime.ethosu_emulator import Emulator
from tests.tosa.conformance import npu
from tests.tosa.conformance.campaign import find_example, find_explanation, run_test, sample_tests
from tests.tosa.conformance.disagreements import KNOWN_DISAGREEMENTS, KnownDisagreement
from tests.tosa.conformance.generation import CONTROL_FLOW, Entry, entries
from tests.tosa_graphs import Body, build_graph, make_target

#: Integer operator -> its first configuration entry.
_INTEGER: dict[str, Entry] = {}
for _entry in entries():
    if _entry.kind not in CONTROL_FLOW and ("tosa-pro-int" in _entry.group or _entry.group == "standard"):
        _INTEGER.setdefault(_entry.kind, _entry)


@pytest.mark.parametrize("kind", sorted(_INTEGER))
def test_npus_compute_what_the_reference_model_does(kind: str, emulator: Emulator) -> None:
    """For each operator: small tests on U85 and on U55 or U65, until at least two programs have been executed."""
    accelerators = ACCELERATORS[len(kind) % 2], ACCELERATORS[-1]
    executed = []
    for test in sample_tests(_INTEGER[kind], 20, 1, max_elements=1000, max_batches=1):
        written = test.write() if test.fails is None else None
        if written is not None:
            verdicts = [npu.check_on_npu(written, accelerator, emulator) for accelerator in accelerators]
            executed += [verdict for verdict in verdicts if verdict.written not in (npu.UNSUPPORTED, npu.TOO_LARGE)]
        if len(executed) > 1:
            break
    assert executed
    assert all(verdict.written == npu.EQUAL for verdict in executed), executed


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_strided_convolution_of_several_images_is_correct_or_refused(accelerator: str, emulator: Emulator) -> None:
    """Vela miscompiles the second image of a 1x1 convolution with a stride over 3, which the hardware table refuses."""

    def strided(kernel: int, stride: int) -> Body:
        weight = np.arange(12).reshape(3, 1, 2, 2)[:, :, :kernel] - 5

        def body(b: Builder, x: Value) -> Value:
            operands = b.const(weight, DType.INT8), b.const([5, -7, 9], DType.INT32)
            return b.conv2d(x, *operands, pad=(0,) * 4, stride=(1, stride), zps=(3, 0))

        return body

    target = make_target(accelerator)
    for images, kernel, stride in ((1, 1, 4), (2, 1, 3), (2, 2, 4)):
        image = (images, 3, 8 + kernel, 2), DType.INT8
        flatbuffer = serialize(build_graph(strided(kernel, stride), image, target=target))
        inputs = [np.random.default_rng(0).integers(-128, 128, image[0]).astype(np.int8)]
        expected = reference_model.run(flatbuffer, inputs)
        assert npu.compile_and_compare(flatbuffer, inputs, expected, accelerator, emulator) == (npu.EQUAL, "")
    with pytest.raises(Unsupported, match=r"2 images and stride 4 \(3 at most\) together with padding or a 1x1 kernel"):
        build_graph(strided(1, 4), ((2, 3, 9, 2), DType.INT8), target=target)


@pytest.mark.parametrize("kernel", [8, 9, 12])
def test_padded_average_pool_of_several_images_is_correct_or_refused(kernel: int) -> None:
    """Vela miscompiles the later images of a kernel over 8 on U85, or writes behind the result."""
    torch.manual_seed(0)
    model, x = nn.AvgPool2d(kernel, 1, 2, count_include_pad=False).eval(), torch.randn(2, 3, 8, 9)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), [(x,)], progress=False)
    assert bool(result.report.methods[0].kernels) == (kernel > 8)  # the CPU's int8 kernel
    assert torch.equal(result.run(x), result.run(x, backend="tosa"))


_NPU_DISAGREEMENTS = [expected for expected in KNOWN_DISAGREEMENTS if expected.check in ("Vela", "emulator")]


@pytest.mark.parametrize("expected", _NPU_DISAGREEMENTS, ids=lambda expected: f"{expected.kinds[0]}-{expected.check}")
def test_known_disagreement_still_occurs(expected: KnownDisagreement, emulator: Emulator) -> None:
    """Remove a disagreement that no longer occurs from ``KNOWN_DISAGREEMENTS``."""
    outcome = run_test(*find_example(expected), emulator)
    assert any(find_explanation(outcome, finding) is expected for finding in outcome.findings), outcome
