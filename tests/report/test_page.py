"""The HTML page of a report: its data, and its rendering in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from arm_recipes.report import page as page_module
from arm_recipes.report.layer_graph import build_layer_graph
from arm_recipes.report.report import Report

_BROWSER = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=10000"),
    *("--enable-logging=stderr", "--window-size=1200,2000"),
]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Nested(nn.Module):
    """Blocks in a sequence: modules to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


@lru_cache(maxsize=1)
def _result() -> ExportResult:
    torch.manual_seed(0)
    samples = [(torch.randn(1, 3, 32, 32),) for _ in range(2)]
    return export(Nested().eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)


def _page(folder: Path) -> str:
    return _result().report.save_html(folder / "report.html").read_text()


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_nodes_have_all_cycles_of_the_layers(tmp_path: Path) -> None:
    data = _data(_page(tmp_path))
    (graph,) = data["layer_graphs"]
    report = _result().report
    (delegate,) = report.delegates
    assert delegate.vela is not None
    rest = sum(cost.cycles for cost in report.layers if cost.kind == "rest")
    assert sum(node["cycles"] or 0 for node in graph["nodes"]) == delegate.vela.total_cycles - rest
    assert sum(layer["cycles"] for layer in data["layers"]) == delegate.vela.total_cycles


def test_links_are_the_tensors_between_layers() -> None:
    report = _result().report
    graph = build_layer_graph(report.methods[0].profiles[0], report.layers)
    assert graph is not None
    modules = [node["module"] or node["source"].split(",")[0] for node in graph["nodes"]]
    pairs = {(modules[a], modules[b]): count for a, b, count in graph["links"]}
    assert pairs["stem", "blocks.0.first"] == 16 * 16 * 16
    assert pairs["blocks.0.first", "blocks.0.second"] == 16 * 16 * 16
    assert ("stem", "blocks.0") in pairs  # the sum's other operand
    assert ("head", "output 0") in pairs


def test_the_page_has_memory_and_accuracy(tmp_path: Path) -> None:
    result = _result()
    samples = [(torch.randn(1, 3, 32, 32),) for _ in range(2)]
    found = result.compare(samples, workers=1)
    page = result.report.save_html(tmp_path / "report.html", found).read_text()
    data = _data(page)
    (used,) = result.report.memory
    assert data["memory"][0]["bytes"] == [moment.bytes for moment in used.moments]
    (results,) = data["accuracy"]
    assert [layer["name"] for layer in results["layers"]] == [layer.name for layer in found.layers]
    assert results["layers"][-1]["sqnr"] == found.sqnr
    assert f"{found.sqnr:.1f} dB" in page
    for tensor in used.peak:
        assert tensor.module in page


def test_the_page_loads_nothing_from_the_network(tmp_path: Path) -> None:
    page = _page(tmp_path)
    assert "default-src 'none'" in page
    outside = page.replace(page[page.index("<script>") : page.index('<script type="application/json"')], "")
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", outside)


def test_the_page_of_a_cortex_m_program_names_the_processor_and_not_vela() -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu="cortex-m4")
    result = export(nn.Linear(8, 4).eval(), recipe, [(torch.randn(1, 8),)])
    page = result.report.page().text
    assert "by Vela" not in page
    assert "estimate for Cortex-M4 with DSP extension, 32 MACs" in page


def test_names_are_escaped(tmp_path: Path) -> None:
    report = Report("</script><b>", (), 1, {"<i>": 1.0}, ("<script>alert(1)</script>",))
    page = report.save_html(tmp_path / "report.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;" in page
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page


def test_a_notebook_shows_the_page_that_is_saved(tmp_path: Path) -> None:
    page = _result().report.page()
    shown = page._repr_html_()
    assert shown.startswith("<iframe")
    assert html.unescape(shown[shown.index('srcdoc="') + 8 : shown.rindex('" style=')]) == page.text
    assert page.save(tmp_path / "page.html").read_text() == page.text == _page(tmp_path)


def test_save_html_in_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no directory"):
        _result().report.save_html(tmp_path / "none" / "report.html")


_FOLD_SCRIPT = """
<script>
const button = (text) => [...document.querySelectorAll("button")].find((b) => b.textContent === text);
const labels = () => [...document.querySelectorAll(".sankey .node-label")].map((l) => l.textContent.trim());
const results = { first: labels() };
button("Fold all").click();
setTimeout(() => {
  results.folded = labels();
  button("Unfold all").click();
  setTimeout(() => {
    results.unfolded = labels();
    const choice = document.querySelector("select");
    choice.value = "2";
    choice.dispatchEvent(new Event("change"));
    results.facts = document.querySelector(".facts").textContent;
    results.charts = document.querySelectorAll(".main-svg").length;
    const place = document.createElement("pre");
    place.id = "results";
    place.textContent = JSON.stringify(results);
    document.body.append(place);
  }, 1500);
}, 1500);
</script>
"""


def test_a_browser_draws_and_folds_the_network(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    assert browser is not None, "Debian's package chromium, which 'make test' installs, is missing"
    page = tmp_path / "acted.html"
    page.write_text(_page(tmp_path).replace("</body>", _FOLD_SCRIPT + "</body>"))
    command = [browser, *_BROWSER, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr  # no error, and nothing that the policy had to stop
    assert 'data-ready="yes"' in done.stdout
    found = re.search(r'<pre id="results">(.*?)</pre>', done.stdout)
    assert found is not None
    results = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert "blocks.0.first" in results["first"]
    assert any(label.startswith("blocks ") for label in results["folded"])
    assert not any(label.startswith("blocks.") for label in results["folded"])
    assert "blocks.1.second" in results["unfolded"]
    assert "aten.conv2d.default" in results["facts"]
    assert results["charts"] >= 3


_LAYOUT_SCRIPT = """
<script>
const right = (element) => element.getBoundingClientRect().right;
const results = {
  width: document.documentElement.scrollWidth,
  texts: [...document.querySelectorAll("td.long")].filter((cell) => cell.offsetParent).map(right),
  answers: [...document.querySelectorAll(".answers section")].map((answer) => answer.getBoundingClientRect().bottom),
  legend: [...document.querySelectorAll("#costs .legendtext")].map((text) => text.textContent),
  axes: [...document.querySelectorAll(".xtitle, .ytitle")].map((text) => text.textContent),
};
parent.postMessage(JSON.stringify(results), "*");
</script>
"""
_FRAME = """
<iframe src="narrow.html" style="width: 420px; height: 900px; border: 0"></iframe><pre id="results"></pre>
<script>addEventListener("message", (e) => { document.getElementById("results").textContent = e.data; });</script>
"""


def test_the_page_fits_a_narrow_screen(tmp_path: Path) -> None:
    """At 420 px the page has no horizontal scroll bar, the texts of tables fit, and the answers are on one screen."""
    browser = shutil.which("chromium")
    assert browser is not None
    result = _result()
    comparison = result.compare([(torch.randn(1, 3, 32, 32),) for _ in range(2)], workers=1)
    page = result.report.page(comparison).text
    (tmp_path / "narrow.html").write_text(page.replace("</body>", _LAYOUT_SCRIPT + "</body>"))
    frame = tmp_path / "frame.html"  # a window of Chromium is at least 500 px wide
    frame.write_text(_FRAME)
    command = [browser, *_BROWSER, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    found = re.search(r'<pre id="results">(.*?)</pre>', done.stdout)
    assert found is not None
    results = json.loads(html.unescape(found[1]))
    assert results["width"] <= 420
    assert results["texts"]
    assert max(results["texts"]) <= 420
    assert max(results["answers"]) <= 900
    assert results["legend"] == ["compute-bound layer", "inserted operation"]
    assert len(results["axes"]) == 6  # costs, memory and accuracy, two axes each


def _luminance(colour: str) -> float:
    """The relative luminance of a colour "#rrggbb" (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast_of_colours(scheme: int) -> None:
    css = (Path(page_module.__file__).parent / "page.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]))
    for ground in ("ground", "raised"):
        for name in ("ink", "quiet", "accent", "compute", "memory", "inserted"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    script = (Path(page_module.__file__).parent / "page.js").read_text()
    (modules,) = re.findall(r"iciclecolorway: \[(.*?)\]", script)
    assert all(_contrast("#ffffff", colour) >= 4.5 for colour in re.findall(r"#\w{6}", modules))


def test_title_names_model_recipe_and_date(tmp_path: Path) -> None:
    report = _result().report
    page = _page(tmp_path)
    assert f"<title>Nested, {report.recipe}, {report.context.date}</title>" in page
    assert "<h1>Nested</h1>" in page


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,))


def test_programs_with_control_flow_have_no_network(tmp_path: Path) -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, extensions=["cf"])
    report = export(Branches().eval(), recipe, [(torch.ones(3),)]).report
    assert "COND_IF" in report.delegates[0].tosa_operators
    assert _data(report.save_html(tmp_path / "report.html").read_text())["layer_graphs"] == []
