"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads tags in its texts; a name is only ever text.
  const inert = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const narrow = () => window.innerWidth < 760;
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  // On a logarithmic axis Plotly abbreviates: 2 where it means 200.
  const ticks = (values) => {
    const steps = Math.max(...values) < 8 * Math.min(...values) ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : [1, 2, 5];
    return [...Array(19).keys()].flatMap((i) => steps.map((n) => Number(`${n}e${i - 6}`)));
  };
  const plain = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

  const axis = (title, values) => ({
    title: { text: title, font: { size: 13 }, standoff: 10 }, type: values ? "log" : "linear", gridcolor: colour("--line"), zeroline: false,
    linecolor: colour("--line"), tickfont: { size: 12, color: colour("--muted") }, fixedrange: narrow(),
    nticks: narrow() ? 5 : 9, exponentformat: "none", separatethousands: true, ...(values ? { tickmode: "array", tickvals: ticks(values), ticktext: ticks(values).map(plain) } : {}),
  });
  const layout = (x, y) => ({
    paper_bgcolor: colour("--surface"), plot_bgcolor: colour("--surface"), hovermode: "closest", dragmode: narrow() ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--text") },
    margin: { l: narrow() ? 66 : 80, r: 22, t: 20, b: 56 }, xaxis: x, yaxis: y, showlegend: false,
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 12 }, align: "left" },
  });

  // Our own legend: it wraps, has room for a finger, and never pushes the plot about.
  function legend(id, plot, entries) {
    $(id).replaceChildren(...entries.map(({ name, swatch, traces }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.innerHTML = `<svg width="26" height="14" viewBox="0 0 26 14" aria-hidden="true">${swatch}</svg>`;
      button.append(name);
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        Plotly.restyle(plot, { visible: shown }, traces);
      });
      return button;
    }));
  }
  const stroke = (ink, width, dash) => `<line x1="1" x2="25" y1="7" y2="7" stroke="${ink}" stroke-width="${width}" stroke-dasharray="${dash ? "5 4" : ""}"/>`;
  const disc = (fill, ink, r) => `<circle cx="13" cy="7" r="${r}" fill="${fill}" stroke="${ink}" stroke-width="2"/>`;

  function stairs(points, x, y) {
    // Best in x first; a point is kept if it is better in y than all before it. The line turns at the corner that is known to be reachable.
    const sign = (m) => (m.direction === "minimize" ? 1 : -1);
    const sorted = [...points].sort((a, b) => sign(x) * (a.m[x.name][0] - b.m[x.name][0]) || sign(y) * (a.m[y.name][0] - b.m[y.name][0]));
    const line = [];
    for (const p of sorted) {
      const last = line[line.length - 1];
      if (!last || sign(y) * p.m[y.name][0] < sign(y) * last.m[y.name][0]) line.push(p);
    }
    return line;
  }

  function drawFront() {
    const x = data.metrics[$("front-x").value], y = data.metrics[$("front-y").value], log = $("front-log").checked;
    const shown = data.points.filter((p) => p.m[x.name] && p.m[y.name]);
    const at = (p, metric, i = 0) => p.m[metric.name][i] / metric.factor;
    const bars = (points, metric) => ({
      type: "data", symmetric: false, thickness: 1, width: 3, color: colour("--point"),
      array: points.map((p) => at(p, metric, 2) - at(p, metric)), arrayminus: points.map((p) => at(p, metric) - at(p, metric, 1)),
    });
    const hover = (p) => [
      `<b>trial ${p.trial}</b>${p.marks.length ? ", " + p.marks.map(inert).join(", ") : ""}`, inert(p.words),
      ...data.metrics.filter((m) => p.m[m.name]).map((m) => {
        const [value, low, high] = p.m[m.name].map((v) => (v / m.factor).toLocaleString("en", { minimumFractionDigits: m.decimals, maximumFractionDigits: m.decimals }));
        return `${inert(m.label)}: ${value}${low !== high ? ` (${low}–${high})` : ""} ${inert(m.unit)}`;
      }),
    ].join("<br>");
    const trace = (name, points, marker, more) => ({
      type: "scatter", mode: "markers", name, x: points.map((p) => at(p, x)), y: points.map((p) => at(p, y)), marker,
      error_x: bars(points, x), error_y: bars(points, y), text: points.map(hover), hovertemplate: "%{text}<extra></extra>", ...more,
    });
    const isBase = (p) => p.marks.includes("baseline");
    const line = stairs(shown.filter((p) => p.feasible), x, y);
    const picks = shown.filter((p) => p.marks.some((mark) => mark !== "baseline"));
    const traces = [
      { type: "scatter", mode: "lines", x: line.map((p) => at(p, x)), y: line.map((p) => at(p, y)), hoverinfo: "skip", showlegend: false,
        line: { color: colour("--accent"), width: 1.5, shape: "hv", dash: "dot" }, opacity: 0.7 },
      trace("tried", shown.filter((p) => !p.front && !isBase(p)), { size: 8, color: colour("--point") }),
      trace("front", shown.filter((p) => p.front && !isBase(p)), { size: 10, color: colour("--accent") }),
      trace("pick", picks, { size: 17, color: "rgba(0,0,0,0)", line: { color: colour("--accent"), width: 2 } }, { hoverinfo: "skip", hovertemplate: null, error_x: {}, error_y: {} }),
      trace("baseline", shown.filter(isBase), { size: 13, symbol: "diamond", color: colour("--surface"), line: { color: colour("--text"), width: 2 } }),
    ].filter((t) => t.x.length);
    const wide = axis(`${x.label} (${x.unit}), ${x.direction === "minimize" ? "less" : "more"} is better`, log && shown.map((p) => at(p, x)));
    const high = axis(`${y.label} (${y.unit}), ${y.direction === "minimize" ? "less" : "more"} is better`, log && shown.map((p) => at(p, y)));
    const named = picks.concat(shown.filter((p) => isBase(p) && !picks.includes(p)));
    const spots = (points) => points.map((p) => ({ x: at(p, x), y: at(p, y), text: p.marks.map(inert).join(", ") }));
    const swatches = {
      tried: disc(colour("--point"), "none", 4), front: disc(colour("--accent"), "none", 5), pick: disc("none", colour("--accent"), 6),
      baseline: `<rect x="9" y="3" width="8" height="8" transform="rotate(45 13 7)" fill="none" stroke="${colour("--text")}" stroke-width="2"/>`,
    };
    Plotly.react("front-plot", traces, layout(wide, high), config).then((plot) => {
      legend("front-legend", plot, traces.flatMap((t, i) => (swatches[t.name] ? [{ name: t.name, swatch: swatches[t.name], traces: [i] }] : [])));
      if (!narrow()) label(plot, spots(named), spots(shown));
    });
  }

  // Names the picks where there is room: not on a point, not on another name, not beyond the edge.
  function label(plot, named, all) {
    const { xaxis, yaxis } = plot._fullLayout;
    const place = ({ x, y }) => [xaxis.d2p(x), yaxis.d2p(y)];
    const points = all.map(place);
    const taken = [];
    const overlap = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));
    const annotations = named.map((spot) => {
      const [px, py] = place(spot);
      const width = 7 * spot.text.length + 10;
      const options = [[24, -22], [-24, -22], [24, 24], [-24, 24], [44, -44], [-44, -44], [44, 46], [-44, 46], [70, 0], [-70, 0]].map(([ax, ay], i) => {
        const left = ax < 0 ? px + ax - width : px + ax;
        const box = [left, py + ay - 10, left + width, py + ay + 10];
        const outside = box[0] < 0 || box[2] > xaxis._length || box[1] < 0 || box[3] > yaxis._length;
        const hit = points.filter(([x, y]) => x > box[0] - 6 && x < box[2] + 6 && y > box[1] - 6 && y < box[3] + 6).length;
        return { ax, ay, box, cost: i + 20 * hit + taken.reduce((sum, other) => sum + overlap(box, other), 0) + (outside ? 1000 : 0) };
      });
      const best = options.reduce((a, b) => (b.cost < a.cost ? b : a));
      taken.push(best.box);
      return {
        x: xaxis.type === "log" ? Math.log10(spot.x) : spot.x, y: yaxis.type === "log" ? Math.log10(spot.y) : spot.y, text: spot.text,
        showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: colour("--muted"), standoff: 9, ax: best.ax, ay: best.ay,
        xanchor: best.ax < 0 ? "right" : "left", font: { size: 12, color: colour("--text") },
      };
    });
    Plotly.relayout(plot, { annotations });
  }

  function drawLosses() {
    const key = $("loss-x").value;
    let next = 2;
    const traces = data.losses.map((curve) => {
      const named = curve.marks.length > 0;
      const base = curve.marks.includes("baseline"), best = curve.marks.includes("recommended");
      const ink = best ? colour("--c1") : base ? colour("--text") : named ? colour(`--c${2 + (next++ - 2) % 4}`) : colour("--point");
      const name = named ? curve.marks.join(", ") : "others";
      return {
        type: "scatter", mode: "lines", x: curve[key], y: curve.loss, name, opacity: named ? 1 : 0.35,
        line: { color: ink, width: best ? 3 : named ? 2 : 1, dash: base && !best ? "dash" : "solid" },
        hovertemplate: `<b>trial ${curve.trial}</b>${named ? ", " + inert(name) : ""}<br>${inert(curve.words)}<br>loss %{y:.4g}<extra></extra>`,
      };
    });
    const title = { samples: "samples trained on", seconds: "seconds of training", steps: "optimizer steps" }[key];
    // The unnamed first, so that the picks lie on top.
    traces.sort((a, b) => a.line.width - b.line.width);
    const entries = [...new Set(traces.map((t) => t.name))].reverse().map((name) => {
      const { line, opacity } = traces.find((t) => t.name === name);
      const swatch = `<g opacity="${Math.max(opacity, 0.7)}">${stroke(line.color, line.width, line.dash === "dash")}</g>`;
      return { name, swatch, traces: traces.flatMap((t, i) => (t.name === name ? [i] : [])) };
    });
    Plotly.react("loss-plot", traces, layout(axis(title), axis("training loss")), config).then((plot) => legend("loss-legend", plot, entries));
  }

  function sortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent;
    heads.forEach((head, i) => head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const numeric = head.classList.contains("n");
      const compare = (a, b) => {
        const [v, w] = [value(a, i), value(b, i)];
        if (v === "" || w === "") return (v === "") - (w === ""); // what is missing stays last, either way
        return (up ? 1 : -1) * (numeric ? v - w : v.localeCompare(w));
      };
      body.append(...[...body.rows].sort(compare));
    }));
    $("filter").addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      let n = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word));
        n += !row.hidden;
      }
      $("filtered").textContent = wanted.length ? `${n} of ${body.rows.length} trials` : "";
    });
  }

  async function copy(button) {
    const source = $(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(source);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  // Where a metric spans more than a decade, most of the trials would crowd into a corner.
  if ($("front-log")) {
    $("front-log").checked = data.metrics.slice(0, 2).some((metric) => {
      const values = data.points.filter((p) => p.m[metric.name]).map((p) => p.m[metric.name][0]);
      return Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
    });
  }
  const draw = () => {
    if ($("front-plot")) drawFront();
    if ($("loss-plot")) drawLosses();
  };
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
  if ($("trials")) sortable($("trials"));
  ["front-x", "front-y", "front-log"].forEach((id) => $(id)?.addEventListener("change", drawFront));
  $("loss-x")?.addEventListener("change", drawLosses);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("(max-width: 759px)").addEventListener("change", draw);
  draw();
})();
