"""Plotly chart of a precision search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arm_recipes._internal.messages import INSTALL_PLOTLY
from arm_recipes.explore.tune.candidate import Candidate


def plot_candidates(
    candidates: Sequence[Candidate],
    frontier: Sequence[Candidate],
    base: Candidate,
    chosen: Candidate,
    metric: str,
    title: str,
) -> Any:
    """Plot candidates and their Pareto front ``frontier``; see ``Tuned.plot``."""
    try:
        from plotly.graph_objects import Figure
    except ImportError as error:
        raise ImportError(f"plot() needs Plotly: {INSTALL_PLOTLY}") from error
    cost_kind = base.cost.time_kind
    figure = Figure()
    groups = (
        ("programs", candidates, {"mode": "markers", "marker": {"color": "gray", "size": 8}}),
        ("frontier", frontier, {"mode": "lines", "line": {"shape": "hv", "dash": "dot", "color": "gray"}}),
        ("unchanged recipe", (base,), {"mode": "markers", "marker": {"symbol": "diamond", "size": 12}}),
        ("chosen", (chosen,), {"mode": "markers", "marker": {"symbol": "star", "size": 14}}),
    )
    for name, group, style in groups:
        figure.add_trace(
            {
                "type": "scatter",
                "name": name,
                "x": [candidate.cost.value(cost_kind) for candidate in group],
                "y": [candidate.accuracy for candidate in group],
                "text": [_hover_text(candidate) for candidate in group],
                "hoverinfo": "text" if "markers" in style["mode"] else "skip",
                **style,
            }
        )
    figure.update_xaxes(title_text=cost_kind)
    figure.update_yaxes(title_text=metric)
    figure.update_layout(title_text=title)
    return figure


def _hover_text(candidate: Candidate) -> str:
    settings = [f"{module or 'all'}: {name}" for module, name in candidate.precisions.items()]
    shown = settings[:12] + ([f"and {len(settings) - 12} more"] if len(settings) > 12 else [])
    return "<br>".join([f"{candidate.accuracy:.4g}", *(shown or ["unchanged recipe"])])
