"""Vela's tables of operations and allocated tensors, which ``vela_process.compile_tosa`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from arm_backend_core.backends.vela_estimates import TensorAllocation

#: {name of a table: (column names, rows)}
Tables = Mapping[str, tuple[list[str], list[list[str]]]]
#: Usage of a weight copy in the table of tensors. Vela has no such usage: ``ethosu_weight_cache`` and
#: ``ethosu_prefetch`` add the copies.
WEIGHT_COPY_USAGE = "WeightCopy"
#: Vela's usage of tensors in a cascade: operations that Vela executes interleaved, stripe by stripe.
_CASCADE_USAGE = "OpCascade"
#: Columns of the table of tensors that become the last four fields of ``TensorAllocation``, in the same order.
_ALLOCATION_COLUMNS = ("start_time", "end_time", "start_address", "size")


def read_rows(tables: Tables, name: str) -> list[dict[str, str]]:
    """The rows of a table, each as {column name: value}."""
    header, rows = tables.get(name, ([], []))
    return [dict(zip(header, row, strict=True)) for row in rows]


def read_allocations(tables: Tables) -> tuple[TensorAllocation, ...]:
    """The allocated tensors."""
    return tuple(
        TensorAllocation(
            row["name"], row["memory"], row["usage"], *(int(row[column], 0) for column in _ALLOCATION_COLUMNS)
        )
        for row in read_rows(tables, "tensors")
    )


def operation_ticks(results: Iterable[Sequence[str]], allocations: Sequence[TensorAllocation]) -> Iterator[int]:
    """The time of each NPU operation on Vela's clock: the start of the live range of its result.

    If this start is unknown or too early, the operation follows the previous one by two ticks. Within a cascade, an
    operation with an unknown start has the time of the previous operation.

    Args:
        results: names of the results of each operation, in execution order.
        allocations: the allocated tensors, with their live ranges.
    """
    starts: dict[str, int] = {}
    cascades = set()
    for tensor in allocations:
        if tensor.usage != WEIGHT_COPY_USAGE:
            starts[tensor.name] = max(tensor.start, starts.get(tensor.name, 0))
        if tensor.usage == _CASCADE_USAGE:
            cascades.add(tensor.start)
    now = -2
    for names in results:
        first_tick = max((starts[name] for name in names if name in starts), default=-1)
        if first_tick > now or (first_tick == now and now in cascades):
            now = first_tick
        elif now not in cascades or first_tick >= 0:  # ``first_tick`` belongs to an older tensor at the same address
            now += 2
        yield now
