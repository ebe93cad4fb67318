"""Plotly charts of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
#: Marker symbols, which distinguish memory modes. Colours distinguish recipes and NPUs.
_MARKER_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star", "x", "pentagon")


def plot_rows(
    rows: Sequence[Row], metric: str, front: Callable[[str, str], Sequence[Row]], x: str, y: str | Sequence[str]
) -> Any:
    """See ``Sweep.plot``.

    Args:
        rows: rows with estimates.
        metric: name of the accuracy metric.
        front: returns the Pareto-optimal rows for two columns.
        x, y: columns of the axes. Each ``y`` has its own subplot.

    Raises:
        ImportError: Plotly is not installed.
        ValueError: no row has estimates, or a column does not exist or has no values.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise ImportError("plot() needs Plotly: pip install 'arm-recipes[pictures]'") from error
    if not rows:
        raise ValueError("no configuration has estimates, so there is nothing to draw; print the sweep for the errors")
    columns = [y] if isinstance(y, str) else list(y)
    for column in (x, *columns):
        column_value(rows[0], column)
    drawn = [column for column in columns if any(column_value(row, column) is not None for row in rows)]
    if not drawn:
        raise ValueError("y: no configuration has an accuracy; see the notes of the sweep")
    figure = make_subplots(rows=len(drawn), cols=1, shared_xaxes=True, vertical_spacing=0.04)
    for line, column in enumerate(drawn, 1):
        for trace in (
            *_point_traces(rows, metric, x, column),
            *_legend_traces(rows),
            _front_trace(front(x, column), x, column),
        ):
            figure.add_trace({**trace, "showlegend": line == 1}, row=line, col=1)
        figure.update_yaxes(title_text=_axis_title(metric, column), row=line, col=1)
    # Logarithmic, because the slowest and the fastest NPU differ by two orders of magnitude.
    figure.update_xaxes(type="log")
    figure.update_xaxes(title_text=_axis_title(metric, x), row=len(drawn), col=1)
    figure.update_layout(title_text=f"{len(rows)} configurations", height=160 + 280 * len(drawn))
    return figure


def _point_traces(rows: Sequence[Row], metric: str, x: str, y: str) -> list[dict[str, Any]]:
    """Make a scatter trace for each recipe and NPU."""
    from plotly.colors import qualitative

    symbols = _symbol_of_mode(rows)
    traces = []
    for number, group in enumerate(dict.fromkeys((row.recipe, row.target) for row in rows)):
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
                    "color": qualitative.Dark24[number % len(qualitative.Dark24)],
                    "symbol": [symbols[row.memory_mode] for row in points],
                    "size": 9,
                },
            }
        )
    return traces


def _symbol_of_mode(rows: Sequence[Row]) -> dict[str, str]:
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
    ]


def _front_trace(optimal: Sequence[Row], x: str, y: str) -> dict[str, Any]:
    """Make the step line of the Pareto front."""
    front = sorted((column_value(row, x), column_value(row, y)) for row in optimal if column_value(row, y) is not None)
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
        f"{row.system_config}, {row.memory_mode}",
        f"{estimates.cycles:,} cycles, {estimates.milliseconds:.3f} ms",
        *([] if row.ram_bytes is None else [f"RAM of the board {row.ram_bytes:,} B"]),
        f"SRAM {estimates.sram_bytes:,} B{' (exceeds the memory mode)' if estimates.sram_exceeded else ''}",
        f"DRAM {estimates.dram_bytes:,} B, flash {estimates.flash_bytes:,} B",
    ]
    lines += [] if row.accuracy is None else [f"{metric}: {row.accuracy:.4g}"]
    lines += [f"{row.cpu_operators} operators on the CPU, not included in these figures"] if row.cpu_operators else []
    return "<br>".join(lines)
