"""Pool sizes of firmware: it runs with exactly these, and fails with one byte less in any pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from arm_recipes import RunError
from arm_recipes.firmware.host_run import PoolSizes, run_on_host
from arm_recipes.firmware.io_tensors import tensor_from_bytes
from arm_recipes.firmware.render_templates import FirmwareData, render_files
from arm_recipes.firmware.saving import collect_firmware_data
from tests.firmware.programs import PROGRAMS, program, samples

pytestmark = pytest.mark.xdist_group("firmware")


@cache
def _firmware_data(name: str) -> FirmwareData:
    return collect_firmware_data(program(name), samples(name), name)


def _reduce_each_pool(sizes: PoolSizes) -> Iterator[tuple[str, PoolSizes]]:
    """Yield each pool that is not empty, and the sizes with one byte less in it."""
    if sizes.fast_scratch:
        yield "fast scratch", replace(sizes, fast_scratch=sizes.fast_scratch - 1)
    assert sizes.temp is not None
    if sizes.temp:
        yield "temp", replace(sizes, temp=sizes.temp - 1)
    for at, size in enumerate(sizes.shared):
        if not size:  # nothing is planned in this memory
            continue
        shared = (*sizes.shared[:at], size - 1, *sizes.shared[at + 1 :])
        yield f"shared {at}", replace(sizes, shared=shared)
    for at, (name, pool, planned) in enumerate(sizes.methods):
        assert pool is not None
        for kind, less in (("pool", (name, pool - 1, planned)), ("planned", (name, pool, planned - 1))):
            if less[2] >= 0:
                yield f"{kind} of {name}", replace(sizes, methods=(*sizes.methods[:at], less, *sizes.methods[at + 1 :]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_firmware_needs_exactly_the_pool_sizes(name: str) -> None:
    """In ExecuTorch's runtime, with the backend, the kernels and the memory that firmware has."""
    firmware = _firmware_data(name)
    sizes, cases = firmware.pools.host_sizes(), firmware.test_vectors.cases
    assert run_on_host(firmware.program, sizes, cases, firmware.data_file).outputs == firmware.test_vectors.outputs
    tried = []
    for pool, less in _reduce_each_pool(sizes):
        with pytest.raises(RunError, match=r"cannot (load|execute) the method"):
            run_on_host(firmware.program, less, cases, firmware.data_file)
        tried.append(pool)
    assert len(tried) >= 2 * len(sizes.methods) + bool(sizes.temp)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_golden_outputs_are_those_of_run(name: str) -> None:
    """The plugin has another backend than firmware. State is kept from one case to the next."""
    firmware, result = _firmware_data(name), program(name).program()
    for case, outputs in zip(firmware.test_vectors.cases, firmware.test_vectors.outputs, strict=True):
        (method_io,) = (each for each in firmware.methods if each.method == case.method)
        given = [tensor_from_bytes(data, port) for data, port in zip(case.inputs, method_io.inputs, strict=True)]
        seen: list[Tensor] = result.execute(*given, method=case.method)
        assert all(output.unique().numel() > 1 or output.numel() == 1 for output in seen)
        for data, port, output in zip(outputs, method_io.outputs, seen, strict=True):
            assert torch.equal(tensor_from_bytes(data, port), output), port.info.name


@pytest.mark.parametrize("name", PROGRAMS)
def test_pool_sizes_of_a_cortex_m_are_smaller_than_those_of_this_machine(name: str) -> None:
    """The builds of test_device.py assert the sizes of types on a Cortex-M."""
    pools = _firmware_data(name).pools
    # Memory of kernels is measured on this machine, its share of pointers is unknown: ``topk`` needs more than the NPU.
    assert pools.exact is (
        name not in ("kernels_memory", "cpu_between_u85", "cpu_between_board", "memories_u85", "methods_u55")
    )
    assert all(0 < method.method_allocator < method.method_allocator_64 for method in pools.methods)
    assert 0 <= pools.temp <= pools.temp_64


def test_pool_sizes_of_this_machine_bound_those_that_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime allocates other blocks than the computation knows."""
    exact = _firmware_data("float_u55")
    monkeypatch.setattr("arm_recipes.firmware.memory_pools.method_allocator_bytes", lambda plan, bits, _: 100 + bits)
    bound = collect_firmware_data(program("float_u55"), None, "bound")
    (method,) = bound.pools.methods
    assert (method.method_allocator, method.method_allocator_64) == (exact.pools.methods[0].method_allocator_64,) * 2
    assert not bound.pools.exact
    assert "Some sizes for Cortex-M could not be computed" in render_files(bound)["model.h"].decode()
    assert "are computed from the program" in render_files(exact)["model.h"].decode()


def test_the_programs_need_each_kind_of_memory() -> None:
    """What ten and more programs together need."""
    pools = [_firmware_data(name).pools for name in PROGRAMS]
    assert len(pools) >= 10
    assert any(each.shared and min(each.shared) > 0 for each in pools)
    assert any(each.fast_scratch for each in pools)
    assert any(len(each.methods) > 1 for each in pools)
    assert any(each.temp < each.temp_64 for each in pools)
    assert _firmware_data("kernels_memory").pools.temp == 600 * 16
