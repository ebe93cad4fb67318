"""HTML report page, ``Report.page``: one self-contained file that loads nothing from a network.

The file embeds Plotly's library, which draws the charts. Without JavaScript, the charts are missing.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_writable, write_file_atomically
from arm_recipes._internal.messages import INSTALL_PLOTLY
from arm_recipes._internal.rendering import Section, as_html, cell_as_html, format_bytes
from arm_recipes.report.layer_graph import build_layer_graph, short_source
from arm_recipes.report.page_summary import Answer, answer_questions

if TYPE_CHECKING:
    from arm_recipes.report.comparisons import ComparisonRecord, LayerAccuracy
    from arm_recipes.report.context import ExportContext
    from arm_recipes.report.memory import LiveTensor, MemoryOverTime
    from arm_recipes.report.npu_layer_costs import LayerCost
    from arm_recipes.report.record import ExportRecord

_LIVE_TENSOR_COLUMNS = ("bytes", "kind", "layer", "line")
_LAYER_COLUMNS = ("layer", "line", "cycles", "share", "MACs", "MAC util.", "read", "written", "bound by", "operators")


@dataclass(frozen=True)
class Page:
    """An HTML page: ``save`` it, or show it in a notebook.

    Attributes:
        text: the HTML file.
    """

    text: str

    def save(self, path: str | Path) -> Path:
        """Write the page.

        Raises:
            ValueError: ``path`` is not writable; the message says why.
        """
        target = check_writable(path)
        write_file_atomically(target, self.text.encode())
        return target

    def _repr_html_(self) -> str:
        # The iframe isolates the page's styles and names from the notebook.
        return f'<iframe srcdoc="{html.escape(self.text)}" style="width: 100%; height: 900px; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"<Page: {format_bytes(len(self.text))}>"


def build_page(
    report: ExportRecord,
    context: ExportContext,
    comparisons: Sequence[ComparisonRecord],
    measured_npu_cycles: Mapping[str, float],
) -> Page:
    """Build the page; see ``Report.page`` and ``answer_questions``."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the page needs Plotly: {INSTALL_PLOTLY}") from error
    graphs = [
        build_layer_graph(
            profile,
            [cost for cost in report.layers if (cost.method, cost.delegate) == (profile.method, profile.record.name)],
        )
        for method in report.methods
        for profile in method.profiles
    ]
    layer_graphs = [graph for graph in graphs if graph is not None]
    data = {
        "layer_graphs": layer_graphs,
        "layers": [_cost_dict(cost) for cost in report.layers],
        "memory": [_memory_dict(report, used) for used in report.memory],
        "accuracy": [{"layers": [_accuracy_dict(layer) for layer in comparison.layers]} for comparison in comparisons],
    }
    answers = answer_questions(report, context, comparisons, measured_npu_cycles)
    text = Template(_read_resource("page.html")).substitute(
        title=html.escape(", ".join(filter(None, (context.model, report.recipe, context.date)))),
        heading=html.escape(context.model or report.recipe),
        subtitle=", ".join(f"<span>{html.escape(part)}</span>" for part in _subtitle(report, context)),
        answers="".join(map(_render_answer, answers)),
        css=_read_resource("page.css"),
        script=_read_resource("page.js"),
        plotly=get_plotlyjs(),
        # "</script>" in a name would end the element, and "<!--" would begin a comment.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        cards="".join(_render_card(*card) for card in _summary_cards(report)),
        body="\n".join(_render_body(report, layer_graphs, comparisons)),
    )
    return Page(text)


def _read_resource(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _subtitle(report: ExportRecord, context: ExportContext) -> Iterator[str]:
    yield report.recipe
    if context.date:
        yield f"exported {context.date}" + ("" if report.cached else f" in {report.total_seconds:.1f} s")
    if context.board:
        yield f"board {context.board}"


def _render_answer(answer: Answer) -> str:
    details = "".join(f"<li>{html.escape(detail)}</li>" for detail in answer.details)
    return (
        f"<section><h2>{html.escape(answer.question)}</h2><strong>{html.escape(answer.value)}</strong>"
        f"<ul>{details}</ul></section>"
    )


def _render_card(name: str, text: str) -> str:
    # <wbr>: lines may break after "_", which the names of Vela's configurations contain.
    return f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text).replace('_', '_<wbr>')}</dd></div>"


def _summary_cards(report: ExportRecord) -> Iterator[tuple[str, str]]:
    estimates = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    if estimates:
        yield "system configuration", estimates[0].system_config
        yield "memory mode", estimates[0].memory_mode
    yield "delegates", str(len(report.delegates))
    yield "operators on the CPU", str(sum(operator.count for operator in report.cpu_operators))


def _render_body(
    report: ExportRecord, layer_graphs: Sequence[dict[str, Any]], comparisons: Sequence[ComparisonRecord]
) -> Iterator[str]:
    if report.ram is not None:
        yield _render_sections(report.ram.sections())
    if report.layers:
        yield _render_heading("Cycles by layer", _describe_estimates(report))
        yield '<div id="costs"></div>'
        yield _render_heading(
            "Cycles by module",
            "Click a module to zoom in, and its header to zoom out. Colours only separate the modules.",
        )
        yield '<div id="modules"></div>'
        table = _render_table(_LAYER_COLUMNS, map(_layer_cells, report.layers))
        yield f"<details><summary>All layers</summary>{table}</details>"
    for number, graph in enumerate(layer_graphs):
        yield _render_heading(
            f"Layer graph: {graph['name']}",
            "Tensors between layers; the width shows the bytes. Click a layer for details.",
        )
        yield f'<div class="layer-graph" data-number="{number}"><div class="controls"></div>'
        yield '<div class="scale"></div>'
        yield '<div class="wide"><div class="picture"></div></div><div class="facts"></div></div>'
    for number, used in enumerate(report.memory):
        yield _render_heading(
            f"{used.memory.upper()} of {used.delegate} over time",
            f"Bytes in use at each operation. Required size: {format_bytes(used.bytes)}. The table lists the live "
            "tensors at the peak.",
        )
        table = _render_table(_LIVE_TENSOR_COLUMNS, map(_live_tensor_cells, used.peak))
        yield f'<div id="memory{number}"></div>{table}'
    for number, comparison in enumerate(comparisons):
        yield _render_heading(
            f"Accuracy of '{comparison.method}' by layer", f"{comparison.program} against {comparison.reference}."
        )
        yield f'<div id="accuracy{number}"></div>{_render_sections(comparison.sections())}'
    yield _render_heading("Full report", "")
    yield _render_sections(report.sections())


def _describe_estimates(report: ExportRecord) -> str:
    """Describe the chart of layer costs: its number of layers, and the source of the estimates."""
    sources = ["Vela's estimate"] * any(cost.delegate for cost in report.layers)
    sources += ["the estimate of the CPU's cycles"] * any(not cost.delegate for cost in report.layers)
    return f"The 25 costliest layers and inserted operations by {' and '.join(sources)}."


def _render_heading(text: str, description: str) -> str:
    return f"<h2>{html.escape(text)}</h2>" + (f"<p>{html.escape(description)}</p>" if description else "")


def _render_sections(sections: Iterable[Section]) -> str:
    return "".join(f'<div class="wide">{as_html([section])}</div>' for section in sections)


def _render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(cell_as_html(cell, tag) for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{row(head, "th")}{body}</table></div>'


def _layer_cells(cost: LayerCost) -> tuple[str, ...]:
    return (
        cost.name,
        short_source(cost.source),
        f"{cost.cycles:,}",
        f"{cost.share:.1%}",
        f"{cost.macs:,}",
        f"{cost.utilization:.0%}",
        format_bytes(cost.bytes_read),
        format_bytes(cost.bytes_written),
        cost.bound,
        cost.reason or ", ".join(cost.operators),
    )


def _cost_dict(cost: LayerCost) -> dict[str, Any]:
    names = ("name", "module", "kind", "cycles", "share", "utilization", "bound", "reason")
    return {name: getattr(cost, name) for name in names} | {
        "operators": list(cost.operators),
        "source": short_source(cost.source),
    }


def _live_tensor_cells(tensor: LiveTensor) -> tuple[str, ...]:
    return format_bytes(tensor.bytes), tensor.kind, tensor.module or tensor.name, short_source(tensor.source)


def _memory_dict(report: ExportRecord, used: MemoryOverTime) -> dict[str, Any]:
    """Usage of one memory, for the chart.

    The entry "limit" is the SRAM limit of the memory mode in bytes, or None if the chart does not show the limit.
    """
    estimates = [
        d.vela for m in report.methods for d in m.delegates if (m.name, d.name) == (used.method, used.delegate)
    ]
    limit = estimates[0].sram_limit if estimates and estimates[0] is not None and used.memory == "Sram" else None
    moments = used.moments
    # A limit far above the usage would make the curve flat, so such a limit is not shown.
    is_limit_shown = limit is not None and limit < 4 * used.bytes
    return {
        "limit": limit if is_limit_shown else None,
        "bytes": [moment.bytes for moment in moments],
        "layers": [moment.module or moment.tensor for moment in moments],
    }


def _accuracy_dict(layer: LayerAccuracy) -> dict[str, Any]:
    row = {name: getattr(layer, name) for name in ("name", "module", "operator")} | {
        "source": short_source(layer.source)
    }
    return row | {
        "sqnr": _finite(layer.gap.sqnr),
        "isolated": None if layer.isolated is None else _finite(layer.isolated.sqnr),
    }


def _finite(value: float) -> float | None:
    """Return ``value``, or None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None
