"""A search as a picture, by Plotly."""

from __future__ import annotations

from typing import Any

from arm_recipes.tuning.result import Candidate, Tuned


def picture(tuned: Tuned) -> Any:
    """See ``Tuned.plot``."""
    try:
        from plotly.graph_objects import Figure
    except ImportError as error:
        raise ImportError("plot() needs Plotly: pip install 'arm-recipes[pictures]'") from error
    price = tuned.base.price.main
    figure = Figure()
    groups = (
        ("programs", tuned.candidates, {"mode": "markers", "marker": {"color": "gray", "size": 8}}),
        ("frontier", tuned.frontier, {"mode": "lines", "line": {"shape": "hv", "dash": "dot", "color": "gray"}}),
        ("the recipe's own", (tuned.base,), {"mode": "markers", "marker": {"symbol": "diamond", "size": 12}}),
        ("chosen", (tuned.chosen,), {"mode": "markers", "marker": {"symbol": "star", "size": 14}}),
    )
    for name, candidates, style in groups:
        figure.add_trace(
            {
                "type": "scatter",
                "name": name,
                "x": [candidate.price.of(price) for candidate in candidates],
                "y": [candidate.accuracy for candidate in candidates],
                "text": [_told(candidate) for candidate in candidates],
                "hoverinfo": "text" if "markers" in style["mode"] else "skip",
                **style,
            }
        )
    figure.update_xaxes(title_text=price)
    figure.update_yaxes(title_text=tuned.metric)
    figure.update_layout(title_text=f"{tuned.recipe.type_name}: {tuned.goal}")
    return figure


def _told(candidate: Candidate) -> str:
    settings = [f"{module or 'all'}: {name}" for module, name in candidate.precisions.items()]
    shown = settings[:12] + ([f"and {len(settings) - 12} more"] if len(settings) > 12 else [])
    return "<br>".join([f"{candidate.accuracy:.4g}", *(shown or ["the recipe's own"])])
