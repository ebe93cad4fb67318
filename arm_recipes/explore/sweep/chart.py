"""Plotly charts of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from arm_recipes._internal.messages import INSTALL_PLOTLY
from arm_recipes.explore.sweep.rows import Row, column_value

_AXIS_TITLES = {
    "milliseconds": "time of an inference (ms)",
    "npu_cycles": "cycles of the NPU",
    "ram_bytes": "RAM that a board needs (bytes)",
    "sram_bytes": "SRAM of the NPU (bytes)",
    "dram_bytes": "DRAM (bytes)",
    "flash_bytes": "flash (bytes)",
    "weight_bytes": "encoded weights (bytes)",
}
#: Okabe and Ito's colours, which colour-blind people can distinguish. Each recipe has one colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
#: Marker diameter in pixels for the smallest number of MACs, and the increase for each larger number of MACs in the
#: sweep.
_SMALLEST_MARKER, _MARKER_GROWTH = 7, 2
#: Height in pixels of a subplot, and of the space between two subplots, which contains the axis labels.
_SUBPLOT_HEIGHT, _AXIS_HEIGHT = 240, 75
#: Marker symbols, which distinguish memory modes.
_MARKER_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star", "x", "pentagon")


def plot_rows(
    rows: Sequence[Row], metric: str, front: Callable[[str, str], Sequence[Row]], x: str, y: str | Sequence[str]
) -> Any:
    """Plot rows; see ``Sweep.plot``.

    Args:
        rows: rows with estimates.
        metric: name of the accuracy metric.
        front: returns the Pareto-optimal rows for two columns.
        x, y: columns of the axes. Each ``y`` has its own subplot.

    Raises:
        ImportError: Plotly is not installed.
        ValueError: no row has estimates, a column does not exist, or no column of ``y`` has a value.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError(f"plot() needs Plotly: {INSTALL_PLOTLY}") from error
    if not rows:
        raise ValueError("no configuration has estimates, so there is nothing to draw; print the sweep for the errors")
    columns = [y] if isinstance(y, str) else list(y)
    for column in (x, *columns):
        column_value(rows[0], column)
    if x == "milliseconds" and all(column_value(row, x) is None for row in rows):
        x = "cycles"  # no row has a time, because no clock of a Cortex-M was given
    drawn = [column for column in columns if any(column_value(row, column) is not None for row in rows)]
    # Omit columns of zeros, such as a memory that no configuration uses.
    drawn = [column for column in drawn if any(column_value(row, column) for row in rows)] or drawn
    if not drawn:
        raise ValueError(f"y: no configuration has a value of {' or '.join(columns)}; see the notes of the sweep")
    height = len(drawn) * (_SUBPLOT_HEIGHT + _AXIS_HEIGHT)
    figure = make_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=_AXIS_HEIGHT / height)
    for line, column in enumerate(drawn, 1):
        for trace in (
            *_point_traces(rows, metric, x, column),
            *_legend_traces(rows),
            _front_trace(front(x, column), x, column),
        ):
            figure.add_trace({**trace, "showlegend": line == 1}, row=line, col=1)
        figure.update_yaxes(title_text=_axis_title(metric, column), row=line, col=1)
    # Logarithmic, because the slowest and the fastest NPU differ by two orders of magnitude.
    figure.update_xaxes(type="log", title_text=_axis_title(metric, x), title_standoff=6, showticklabels=True)
    figure.update_xaxes(tickvals=_log_ticks([column_value(row, x) for row in rows]), tickformat="~g")
    title = f"{len(rows)} configurations; larger markers: more MACs"
    figure.update_layout(title_text=title, height=100 + height, template="plotly_white")
    return figure


def _point_traces(rows: Sequence[Row], metric: str, x: str, y: str) -> list[dict[str, Any]]:
    """Make a scatter trace for each recipe and target."""
    symbols = _symbol_of_mode(rows)
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    sizes = sorted({row.macs for row in rows})
    traces = []
    for group in dict.fromkeys((row.recipe, row.target) for row in rows):
        points = [row for row in rows if (row.recipe, row.target) == group and column_value(row, y) is not None]
        precision = group[0].rsplit("_", 1)[1]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{group[1]}, {precision}",
                "legendgroup": f"{group[1]}, {precision}",
                "x": [column_value(row, x) for row in points],
                "y": [column_value(row, y) for row in points],
                "text": [_hover_text(metric, row) for row in points],
                "hoverinfo": "text",
                "marker": {
                    "color": _COLOURS[recipes.index(group[0]) % len(_COLOURS)],
                    "symbol": [symbols[row.memory_mode] for row in points],
                    "size": _SMALLEST_MARKER + _MARKER_GROWTH * sizes.index(points[0].macs) if points else 0,
                    "opacity": 0.8,
                    "line": {"color": "#333333", "width": 1},
                },
            }
        )
    return traces


def _log_ticks(values: Sequence[float | None]) -> list[float]:
    """Return 1, 2 and 5 times each power of ten, from the one below to the one above the positive values."""
    positive = [value for value in values if value is not None and value > 0]
    if not positive:
        return []
    decades = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    return [float(f"{factor}e{decade}") for decade in decades for factor in (1, 2, 5)]


def _symbol_of_mode(rows: Sequence[Row]) -> dict[str, str]:
    """Return ``{memory mode: marker symbol}``. The mode of rows without an NPU is ""."""
    modes = dict.fromkeys(row.memory_mode for row in rows)
    return {mode: _MARKER_SYMBOLS[number % len(_MARKER_SYMBOLS)] for number, mode in enumerate(modes)}


def _legend_traces(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Make traces without points, which explain the marker symbols in the legend."""
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": mode,
            "legendgroup": mode,
            "x": [None],
            "y": [None],
            "marker": {"color": "gray", "symbol": symbol, "size": 9},
        }
        for mode, symbol in _symbol_of_mode(rows).items()
        if mode
    ]


def _front_trace(optimal: Sequence[Row], x: str, y: str) -> dict[str, Any]:
    """Make the step line of the Pareto front."""
    front = sorted(
        (column_value(row, x), column_value(row, y))
        for row in optimal
        if column_value(row, x) is not None and column_value(row, y) is not None
    )
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "Pareto front",
        "legendgroup": "front",
        "x": [point[0] for point in front],
        "y": [point[1] for point in front],
        "line": {"shape": "hv", "dash": "dot", "color": "gray"},
        "hoverinfo": "skip",
    }


def _axis_title(metric: str, column: str) -> str:
    return metric if column == "accuracy" else _AXIS_TITLES.get(column, column.replace("_", " "))


def _hover_text(metric: str, row: Row) -> str:
    estimates = row.estimates
    assert estimates is not None
    lines = [
        f"<b>{row.target}</b>, {row.recipe}",
        ", ".join(filter(None, (row.system_config, row.memory_mode))),
        f"{estimates.cycles:,} cycles"
        + ("" if estimates.milliseconds is None else f", {estimates.milliseconds:.3f} ms"),
        *([] if row.ram_bytes is None else [f"RAM of the board {row.ram_bytes:,} B"]),
        f"SRAM {estimates.sram_bytes:,} B{' (exceeds the memory mode)' if estimates.sram_exceeded else ''}",
        f"DRAM {estimates.dram_bytes:,} B, flash {estimates.flash_bytes:,} B",
    ]
    lines += [] if row.accuracy is None else [f"{metric}: {row.accuracy:.4g}"]
    if row.cpu_operators and row.has_npu:
        lines.append(f"{row.cpu_operators} operators on the CPU, not included in the cycles")
    return "<br>".join(filter(None, lines))
