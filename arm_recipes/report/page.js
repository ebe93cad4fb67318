"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const chartRedraws = []; // functions that draw a chart again, in the current colours of the page

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ground: of("--ground"), raised: of("--raised"), ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), accent: of("--accent"),
    compute: of("--compute"), memory: of("--memory"), inserted: of("--inserted"), weak: of("--weak") };
}

function layout(more) {
  const c = colours();
  const axis = { gridcolor: c.line, zerolinecolor: c.line, linecolor: c.line, automargin: true };
  return {
    paper_bgcolor: c.ground, plot_bgcolor: c.ground, font: { color: c.ink, size: 12 },
    margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, ...more,
    xaxis: { ...axis, ...(more.xaxis || {}) }, yaxis: { ...axis, ...(more.yaxis || {}) },
  };
}

const config = { responsive: true, displayModeBar: false };
const count = (n) => n.toLocaleString("en-US");
const percent = (x) => (100 * x).toFixed(1) + " %";

function bytes(n) {
  if (n < 10000) return count(n) + " B";
  return n < 10 * 2 ** 20 ? (n / 1024).toFixed(1) + " KiB" : (n / 2 ** 20).toFixed(1) + " MiB";
}

function mix(from, to, share) { // colour between two "#rrggbb" colours; `share`: 0 to 1
  const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const [a, b] = [channels(from), channels(to)];
  return `rgb(${a.map((value, i) => Math.round(value + share * (b[i] - value))).join(",")})`;
}

function add(parent, tag, text, more) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  Object.assign(made, more || {});
  parent.append(made);
  return made;
}

// -- layer graph: a folded module is one node --------------------------------------------------------------------

function ancestors(module) {
  const parts = module ? module.split(".") : [];
  return parts.map((_, i) => parts.slice(0, i + 1).join("."));
}

function addLayerGraph(place, graph) {
  const picture = place.querySelector(".picture"), scale = place.querySelector(".scale"), facts = place.querySelector(".facts");
  const members = new Map(); // module -> indices of its nodes
  graph.nodes.forEach((node, i) => ancestors(node.module).forEach((m) => {
    if (!members.has(m)) members.set(m, []);
    members.get(m).push(i);
  }));
  const isFoldable = (m) => members.get(m).length > 1;
  const open = new Set();
  const shown = (node, i) => ancestors(node.module).find((m) => isFoldable(m) && !open.has(m)) ?? i;
  const total = graph.nodes.reduce((sum, node) => sum + (node.cycles || 0), 0);
  let groups = [];

  function unfoldUpTo(maxNodes) { // unfold modules level by level, up to `maxNodes` visible nodes
    for (let depth = 0; ; depth++) {
      const next = [...members.keys()].filter((m) => isFoldable(m) && m.split(".").length === depth + 1);
      if (!next.length) return;
      next.forEach((m) => open.add(m));
      if (new Set(graph.nodes.map(shown)).size > maxNodes) { next.forEach((m) => open.delete(m)); return; }
    }
  }

  function draw() {
    const keys = graph.nodes.map(shown);
    groups = [...new Set(keys)];
    const at = new Map(groups.map((key, i) => [key, i]));
    const links = new Map();
    for (const [a, b, n] of graph.links) {
      const i = at.get(keys[a]), j = at.get(keys[b]);
      if (i !== j) links.set(i + ">" + j, (links.get(i + ">" + j) || 0) + n);
    }
    const cycles = groups.map((key) => nodesOf(key).reduce((sum, i) => sum + (graph.nodes[i].cycles || 0), 0));
    const most = Math.max(...cycles, 1), c = colours();
    scale.replaceChildren();
    if (total) { add(scale, "span", "0 cycles"); add(scale, "i"); add(scale, "span", count(most) + " cycles"); }
    const ends = [...links.keys()].map((key) => key.split(">").map(Number));
    // newPlot, not react: react fades out the old nodes, which would still be visible if the page is printed meanwhile.
    Plotly.newPlot(picture, [{
      type: "sankey", arrangement: "snap",
      node: {
        label: groups.map(label), pad: 14, thickness: 16, line: { width: 0 },
        color: cycles.map((n) => (total ? mix(c.weak, c.memory, n / most) : c.accent)),
        customdata: groups.map((key, i) => hover(key, cycles[i])), hovertemplate: "%{customdata}<extra></extra>",
      },
      link: {
        source: ends.map((end) => end[0]), target: ends.map((end) => end[1]), value: [...links.values()],
        color: c.line, customdata: [...links.values()].map(bytes),
        hovertemplate: "%{source.label} → %{target.label}: %{customdata}<extra></extra>",
      },
    }], layout({ width: Math.max(place.clientWidth - 4, 120 * depth(groups.length, ends)), height: 420 }), config);
    picture.on("plotly_click", (event) => {
      const point = event.points[0];
      if (!("source" in point)) show(groups[point.pointNumber]);
    });
  }

  function depth(size, ends) { // number of nodes on the longest path
    const to = Array.from({ length: size }, () => []);
    ends.forEach(([a, b]) => to[a].push(b));
    const known = new Array(size).fill(0);
    const visit = (i) => { if (!known[i]) { known[i] = 1; known[i] = 1 + Math.max(0, ...to[i].map(visit)); } return known[i]; };
    return Math.max(...known.map((_, i) => visit(i)));
  }

  const nodesOf = (key) => (typeof key === "string" ? members.get(key) : [key]);
  const short = (module) => { // labels are close together, so show only the end of a long name, from a dot on
    if (module.length <= 18) return module;
    const end = module.slice(-18);
    return "…" + end.slice(Math.max(end.indexOf("."), 0));
  };
  const label = (key) => typeof key === "string" ? short(key) + " ▸" : short(graph.nodes[key].module) || graph.nodes[key].source.split("/").at(-1).split(",")[0] || "(model)";
  const fullName = (key) => (typeof key === "string" ? key : graph.nodes[key].module || graph.nodes[key].source || label(key));
  const hover = (key, n) => fullName(key) + (total ? "<br>" + count(n) + " cycles, " + percent(n / total) : "");

  function show(key) {
    facts.replaceChildren();
    const nodes = nodesOf(key).map((i) => graph.nodes[i]);
    add(facts, "strong", fullName(key));
    const buttons = add(facts, "div", undefined, { className: "controls" });
    if (typeof key === "string") add(buttons, "button", "Unfold", { onclick: () => { open.add(key); draw(); show(nodesOf(key)[0]); } });
    const around = typeof key === "string" ? ancestors(key).slice(0, -1) : ancestors(nodes[0].module);
    around.filter((m) => isFoldable(m) && open.has(m)).forEach((m) => add(buttons, "button", "Fold " + m, {
      onclick: () => { [...open].filter((o) => o === m || o.startsWith(m + ".")).forEach((o) => open.delete(o)); draw(); show(m); },
    }));
    const table = add(add(facts, "div", undefined, { className: "wide" }), "table");
    const head = add(table, "tr");
    ["module", "line", "operators", "TOSA", ...(total ? ["cycles", "share", "MACs", "read", "written"] : [])].forEach((t) => add(head, "th", t));
    nodes.forEach((node) => {
      const row = add(table, "tr");
      [node.module, node.source, node.operators.join(", "), node.tosa.join(", ")].forEach((t) => add(row, "td", t));
      if (total) [count(node.cycles || 0), percent(node.share), count(node.macs), bytes(node.read), bytes(node.written)]
        .forEach((t) => add(row, "td", t, { className: "number" }));
    });
  }

  const controls = place.querySelector(".controls");
  add(controls, "button", "Unfold all", { onclick: () => { [...members.keys()].forEach((m) => open.add(m)); draw(); } });
  add(controls, "button", "Fold all", { onclick: () => { open.clear(); draw(); } });
  const choice = add(controls, "select", undefined, { ariaLabel: "Layer", onchange: () => show(Number(choice.value)) });
  graph.nodes.forEach((node, i) => add(choice, "option", [node.module, node.source].filter(Boolean).join(", ") || "(model)", { value: i }));
  unfoldUpTo(40);
  draw();
  const costs = graph.nodes.map((node) => node.cycles || 0);
  show(shown(graph.nodes[costs.indexOf(Math.max(...costs))], costs.indexOf(Math.max(...costs))));
  chartRedraws.push(draw);
}

// -- other charts ------------------------------------------------------------------------------------------------

function addChart(name, draw) {
  const place = document.getElementById(name);
  if (!place) return;
  const redrawChart = () => draw(place);
  redrawChart();
  chartRedraws.push(redrawChart);
}

document.querySelectorAll(".layer-graph").forEach((place) => addLayerGraph(place, data.layer_graphs[Number(place.dataset.number)]));

addChart("costs", (place) => {
  const rows = [...data.layers].sort((a, b) => b.cycles - a.cycles).slice(0, 25).reverse();
  const c = colours();
  const kindOf = (r) => (r.kind !== "layer" ? "inserted" : r.bound === "memory" ? "memory" : "compute");
  const names = { compute: "compute-bound layer", memory: "memory-bound layer", inserted: "inserted operation" };
  const trace = (kind) => ({
    type: "bar", orientation: "h", name: names[kind], showlegend: true, marker: { color: c[kind] },
    x: rows.map((r) => (kindOf(r) === kind ? r.cycles : null)), y: rows.map((_, i) => i),
    customdata: rows.map((r) => [percent(r.share), percent(r.utilization), r.bound, r.source, r.reason]),
    hovertemplate: "%{x:,} cycles, %{customdata[0]}<br>MAC utilization: %{customdata[1]}<br>bound by %{customdata[2]}<br>%{customdata[3]}<br>%{customdata[4]}<extra></extra>",
  });
  const shownKinds = Object.keys(names).filter((kind) => rows.some((r) => kindOf(r) === kind));
  Plotly.react(place, shownKinds.map(trace), layout({
    height: 110 + 22 * rows.length, barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal" },
    xaxis: { title: { text: "cycles (estimate)" } },
    yaxis: { title: { text: "layer", standoff: 12 }, tickvals: rows.map((_, i) => i), ticktext: rows.map((r) => r.name + (r.kind === "layer" ? "" : " (" + r.kind + ")")) },
  }), config);
});

addChart("modules", (place) => {
  const sums = new Map([["", { cycles: 0 }]]);
  const leaf = [];
  data.layers.forEach((r, i) => {
    const path = r.kind === "rest" ? [] : ancestors(r.module);
    ["", ...path].forEach((m) => sums.set(m, { cycles: (sums.get(m)?.cycles || 0) + r.cycles }));
    leaf.push({ id: "#" + i, label: r.kind === "layer" ? r.operators.slice(0, 2).join(", ") : r.kind, parent: path.at(-1) ?? "", cycles: r.cycles });
  });
  const modules = [...sums].map(([id, s]) => ({ id: id || "model", label: id.split(".").at(-1) || "model",
    parent: id ? id.split(".").slice(0, -1).join(".") || "model" : "", cycles: s.cycles }));
  const all = [...modules, ...leaf.map((l) => ({ ...l, parent: l.parent || "model" }))];
  Plotly.react(place, [{
    type: "icicle", branchvalues: "total", maxdepth: 6, tiling: { orientation: "v" },
    ids: all.map((x) => x.id), labels: all.map((x) => x.label), parents: all.map((x) => x.parent), values: all.map((x) => x.cycles),
    texttemplate: "%{label}<br>%{percentRoot}", hovertemplate: "%{label}<br>%{value:,} cycles, %{percentRoot:.1%}<extra></extra>",
    // White on each colour of a module has a contrast of at least 4.5:1. The root has the colour of the page's text.
    root: { color: colours().raised }, leaf: { opacity: 1 }, insidetextfont: { color: "#ffffff" }, pathbar: { textfont: { color: "#ffffff" } },
  }], layout({ height: 420, uniformtext: { minsize: 10, mode: "hide" }, iciclecolorway: ["#0b6e99", "#2c7347", "#7f6318", "#5b5ea6"] }), config);
});

(data.memory || []).forEach((memory, number) => addChart("memory" + number, (place) => {
  const c = colours();
  const shapes = memory.limit ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: memory.limit, y1: memory.limit, line: { color: c.memory, dash: "dash" },
    label: { text: "limit of the memory mode", textposition: "end", font: { color: c.ink } } }] : [];
  Plotly.react(place, [{
    type: "scatter", mode: "lines", line: { shape: "hv", color: c.accent }, fill: "tozeroy",
    x: memory.bytes.map((_, i) => i), y: memory.bytes, customdata: memory.layers.map((name, i) => [name, bytes(memory.bytes[i])]),
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]} in use<extra></extra>",
  }], layout({ height: 300, shapes, xaxis: { title: { text: "operation, in the order of execution" } }, yaxis: { title: { text: "bytes in use" }, rangemode: "tozero" } }), config);
}));

(data.accuracy || []).forEach((comparison, number) => addChart("accuracy" + number, (place) => {
  const c = colours();
  const trace = (name, key, color, symbol) => ({
    type: "scatter", mode: "lines+markers", name, marker: { color, symbol, size: 6 }, line: { color },
    x: comparison.layers.map((_, i) => i), y: comparison.layers.map((l) => l[key]),
    customdata: comparison.layers.map((l) => [l.module || l.name, l.operator, l.source]),
    hovertemplate: name + ": %{y:.1f} dB<br>%{customdata[0]}, %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
  });
  Plotly.react(place, [trace("as the program runs", "sqnr", c.compute, "circle"), trace("the layer alone", "isolated", c.memory, "diamond")],
    layout({ height: 320, showlegend: true, legend: { orientation: "h", y: 1.12 }, xaxis: { title: { text: "layer, in order" } }, yaxis: { title: { text: "SQNR in dB" } } }), config);
}));

const redraw = () => chartRedraws.forEach((draw) => draw());
dark.addEventListener("change", redraw);
window.addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((d) => { d.open = true; }); });
document.body.dataset.ready = "yes";
