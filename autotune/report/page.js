"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads tags in its texts; a name is only ever text.
  const inert = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // When there is nothing else to do; Safari has no such call.
  const later = window.requestIdleCallback ?? ((run) => setTimeout(run, 20));
  const narrow = () => window.innerWidth < 760;
  const words = (p) => inert(data.words[p.trial]);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  // On a logarithmic axis Plotly abbreviates: 2 where it means 200.
  const ticks = (values) => {
    const steps = Math.max(...values) < 8 * Math.min(...values) ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : [1, 2, 5];
    return [...Array(19).keys()].flatMap((i) => steps.map((n) => Number(`${n}e${i - 6}`)));
  };
  // Making a format takes longer than using it, and 1,000 trials say thousands of numbers.
  const formats = new Map(data.metrics.map((m) => [m, new Intl.NumberFormat("en", { minimumFractionDigits: m.decimals, maximumFractionDigits: m.decimals })]));
  const number = (metric, value) => formats.get(metric).format(value / metric.factor);
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
      `<b>trial ${p.trial}</b>${p.marks.length ? ", " + p.marks.map(inert).join(", ") : ""}`, words(p),
      ...data.metrics.filter((m) => p.m[m.name]).map((m) => {
        const [value, low, high] = p.m[m.name].map((v) => number(m, v));
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
    const marked = named.map(place), taken = [];
    const overlap = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));
    const annotations = named.map((spot) => {
      const [px, py] = place(spot);
      const width = 7 * spot.text.length + 10;
      const options = [[24, -22], [-24, -22], [24, 24], [-24, 24], [44, -44], [-44, -44], [44, 46], [-44, 46], [70, 0], [-70, 0],
        [24, -70], [24, 72], [90, -70], [90, 72], [130, -30], [130, 34], [170, -64], [170, 64]].map(([ax, ay], i) => {
        const left = ax < 0 ? px + ax - width : px + ax;
        const box = [left, py + ay - 10, left + width, py + ay + 10];
        const outside = box[0] < 0 || box[2] > xaxis._length || box[1] < 0 || box[3] > yaxis._length;
        const under = ([x, y]) => x > box[0] - 8 && x < box[2] + 8 && y > box[1] - 8 && y < box[3] + 8;
        // A name that hides a pick or the baseline is worse than one far away.
        const hit = points.filter(under).length + 5 * marked.filter(under).length;
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
        hovertemplate: `<b>trial ${curve.trial}</b>${named ? ", " + inert(name) : ""}<br>${words(curve)}<br>loss %{y:.4g}<extra></extra>`,
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

  // A metric's place between the least and the most that was measured; by ratios where it spans more than a decade.
  function ruler(metric, points) {
    const values = points.filter((p) => p.m[metric.name]).map((p) => p.m[metric.name][0]);
    const low = Math.min(...values), high = Math.max(...values), log = low > 0 && high > 10 * low;
    const along = log ? Math.log : (v) => v;
    const place = (value) => (high === low ? 0.5 : (along(log ? Math.max(value, low / 10) : value) - along(low)) / (along(high) - along(low)));
    return { place, low: number(metric, low), high: number(metric, high) };
  }

  let solid = null, parallel = null;
  function drawSolid() {
    solid ??= Canvas.solid($("solid"), document.querySelector("#solid-plot .tip"));
    const metrics = ["solid-x", "solid-y", "solid-z"].map((id) => data.metrics[$(id).value]);
    const shown = data.points.filter((p) => metrics.every((m) => p.m[m.name]));
    if (!shown.length) return;
    const rulers = metrics.map((m) => ruler(m, shown));
    const axes = metrics.map((m, i) => ({ title: `${m.label} (${m.unit})`, low: rulers[i].low, high: rulers[i].high }));
    const points = shown.map((p) => {
      const base = p.marks.includes("baseline"), picked = p.marks.some((mark) => mark !== "baseline");
      return {
        at: metrics.map((m, i) => rulers[i].place(p.m[m.name][0])), bars: metrics.map((m, i) => p.m[m.name].slice(1).map(rulers[i].place)),
        ink: base ? colour("--text") : picked || p.front ? colour("--accent") : colour("--point"), size: base || picked ? 8 : p.front ? 5.5 : 4,
        diamond: base, name: p.marks.join(", "),
        tip: [`trial ${p.trial}${p.marks.length ? ": " + p.marks.join(", ") : ""}`, data.words[p.trial], ...metrics.map((m) => `${m.label} ${number(m, p.m[m.name][0])} ${m.unit}`)].join("\n"),
      };
    });
    solid({ points, axes });
  }

  function drawParallel() {
    parallel ??= Canvas.parallel($("parallel"), (chosen, n) => {
      data.knobs.forEach((_, i) => ($(`axis-${i}`).value = chosen.get(i) ?? ""));
      $("parallel-said").textContent = chosen.size ? `${n} of ${data.points.length} trials` : "";
    });
    const metric = data.metrics[$("parallel-metric").value];
    const objectives = data.metrics.filter((m) => data.objectives.includes(m.name) || m === metric);
    const shown = data.points.filter((p) => p.m[metric.name]);
    const rulers = objectives.map((m) => ruler(m, shown)), own = rulers[objectives.indexOf(metric)];
    const axes = [
      ...data.knobs.map((knob) => ({ title: knob.name.split(".").pop(), levels: knob.levels })),
      ...objectives.map((m, i) => ({ title: `${m.label} (${m.unit})`, low: rulers[i].low, high: rulers[i].high })),
    ];
    const lines = shown.map((p, n) => {
      const place = own.place(p.m[metric.name][0]), shade = metric.direction === "minimize" ? 1 - place : place;
      const picked = p.marks.length > 0;
      return {
        at: [...p.k, ...objectives.map((m, i) => (p.m[m.name] ? rulers[i].place(p.m[m.name][0]) : null))], shade, wide: picked ? 2.5 : 1.3,
        jitter: ((n * 0.618) % 1) * 2 - 1, ink: p.marks.includes("baseline") ? colour("--text") : `color-mix(in oklab, ${colour("--accent")} ${Math.round(100 * shade)}%, ${colour("--c3")})`,
      };
    });
    parallel.show({ axes, lines });
  }

  function drawProgress() {
    const [y, x] = [$("progress-y").value, $("progress-x").value];
    const metric = data.metrics.find((m) => m.name === y), value = (p) => (metric ? (p.m[y] === undefined ? null : p.m[y] / metric.factor) : p.gain);
    const done = data.progress.filter((p) => value(p) !== null), failed = data.progress.filter((p) => value(p) === null);
    const better = metric && metric.direction === "minimize" ? Math.min : Math.max;
    let best = null;
    const line = done.map((p) => (best = best === null ? value(p) : better(best, value(p))));
    const hover = (p) => `<b>trial ${p.trial}</b><br>${words(p)}<br>${inert(p.outcome)} after ${p.at.toFixed(0)} s`;
    const values = done.map(value), foot = values.length ? Math.min(...values) : 0;
    const last = data.progress[data.progress.length - 1];
    const traces = [
      { type: "scatter", mode: "lines", x: [...done.map((p) => p[x]), last[x]], y: [...line, best], line: { color: colour("--accent"), width: 2, shape: "hv" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x: done.map((p) => p[x]), y: values, marker: { size: 7, color: colour("--point") }, text: done.map(hover), hovertemplate: "%{text}<br>%{y:.4g}<extra></extra>" },
      { type: "scatter", mode: "markers", x: failed.map((p) => p[x]), y: failed.map(() => foot), marker: { size: 8, symbol: "x-thin", line: { width: 1.5, color: colour("--muted") } }, text: failed.map(hover), hovertemplate: "%{text}<extra></extra>" },
    ];
    const title = metric ? `${metric.label} (${metric.unit}), ${metric.direction === "minimize" ? "less" : "more"} is better` : "gain over the baseline (×)";
    Plotly.react("progress-plot", traces, layout(axis(x === "at" ? "seconds of trials" : "trial"), axis(title)), config);
  }

  function drawForecasts() {
    const name = $("forecast-metric").value, points = data.forecasts[name], metric = data.metrics.find((m) => m.name === name);
    const said = points.map((p) => p.said.map((v) => v / metric.factor)), was = points.map((p) => p.was / metric.factor);
    const ends = [...said.map((v) => v[0]), ...was], low = Math.min(...ends), high = Math.max(...ends), log = low > 0 && high > 8 * low;
    const bars = { type: "data", symmetric: false, thickness: 1, width: 3, color: colour("--point"), array: said.map((v) => v[2] - v[0]), arrayminus: said.map((v) => v[0] - v[1]) };
    const traces = [
      { type: "scatter", mode: "lines", x: [low * 0.9, high * 1.1], y: [low * 0.9, high * 1.1], line: { color: colour("--muted"), width: 1.5, dash: "dash" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x: said.map((v) => v[0]), y: was, error_x: bars, marker: { size: 8, color: colour("--accent") },
        text: points.map((p) => `<b>trial ${p.trial}</b><br>${words(p)}`), hovertemplate: "%{text}<br>forecast %{x:.4g}, measured %{y:.4g}<extra></extra>" },
    ];
    const unit = `${metric.label} (${metric.unit})`;
    Plotly.react("forecast-plot", traces, layout(axis(`forecast ${unit}`, log && ends), axis(`measured ${unit}`, log && ends)), config);
  }

  function drawSteps() {
    const wanted = $("steps-trials").value.match(/[0-9]+/g)?.map(Number) ?? [];
    const found = [...new Set(wanted)].map((n) => data.steps.find((s) => s.trial === n)).filter(Boolean);
    const missing = wanted.filter((n) => !data.steps.some((s) => s.trial === n)), numbers = data.steps.map((s) => s.trial);
    $("steps-said").textContent = missing.length ? `no steps were timed in trial ${missing.join(", ")}; they were in ${numbers.length} trials from ${Math.min(...numbers)} to ${Math.max(...numbers)}` : "";
    const inks = ["--c1", "--c2", "--c3", "--c4", "--c5", "--text"].map(colour);
    const traces = found.flatMap((s, i) => {
      const step = s.ms.map((_, n) => n * s.size + (Math.min(s.size, s.n - n * s.size) + 1) / 2), high = s.size > 1 ? s.high : s.ms;
      const ink = inks[i % inks.length], cut = step.findIndex((n) => n > s.warmup), at = cut < 0 ? step.length : cut;
      const text = `<b>trial ${s.trial}</b>${s.marks.length ? ", " + s.marks.map(inert).join(", ") : ""}<br>${words(s)}<br>step %{x:.0f}: %{y:.4g} ms<extra></extra>`;
      const piece = (from, to, dash) => ({ type: "scatter", mode: "lines", x: step.slice(from, to), y: s.ms.slice(from, to), line: { color: ink, width: 1.6, dash }, hovertemplate: text });
      const band = { type: "scatter", mode: "lines", x: [...step, ...[...step].reverse()], y: [...high, ...[...s.ms].reverse()], fill: "toself", fillcolor: ink, opacity: 0.14, line: { width: 0 }, hoverinfo: "skip" };
      return [band, piece(0, Math.min(at + 1, step.length), "dot"), piece(at, undefined, "solid")];
    });
    const entries = found.map((s, i) => ({ name: `trial ${s.trial}${s.marks.length ? ": " + s.marks.join(", ") : ""}`, swatch: stroke(inks[i % inks.length], 2), traces: [3 * i, 3 * i + 1, 3 * i + 2] }));
    const values = $("steps-log").checked && found.length ? found.flatMap((s) => s.ms) : undefined;
    Plotly.react("steps-plot", traces, layout(axis("optimizer step"), axis("step time (ms)", values)), config).then((plot) => legend("steps-legend", plot, entries));
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
      const rows = [...body.rows].sort(compare);
      rows.forEach((row) => (row.style.contentVisibility = ""));
      body.append(...rows);
      settleAll();
    }));
    // Rows out of sight are left out of a sort, which is quick then, and laid out a few at a time after it, so that they are there when they scroll by.
    let left = [];
    const settle = () => {
      left.splice(0, 25).forEach((row) => (row.style.contentVisibility = "visible"));
      if (left.length) later(settle);
    };
    const settleAll = () => {
      const idle = !left.length;
      left = [...body.rows];
      if (idle) later(settle);
    };
    settleAll();
    const texts = new Map();
    const filter = () => {
      const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!texts.size) for (const row of body.rows) texts.set(row, row.textContent.toLowerCase());
      let n = 0;
      for (const [row, text] of texts) {
        const hidden = !wanted.every((word) => text.includes(word));
        if (row.hidden !== hidden) row.hidden = hidden;
        n += !hidden;
      }
      $("filtered").textContent = wanted.length ? `${n} of ${texts.size} trials` : "";
    };
    $("filter").addEventListener("input", Canvas.together(filter));
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
  if ($("steps-trials")) {
    const named = data.steps.filter((s) => s.marks.length).slice(0, 4);
    $("steps-trials").value = (named.length ? named : data.steps.slice(0, 3)).map((s) => s.trial).join(" ");
    // A first step that compiles or allocates would press the others flat.
    $("steps-log").checked = data.steps.some((s) => s.marks.length && Math.max(...s.ms, ...s.high) > 6 * Math.min(...s.ms));
  }
  const plots = { "front-plot": drawFront, solid: drawSolid, parallel: drawParallel, "progress-plot": drawProgress, "steps-plot": drawSteps, "loss-plot": drawLosses, "forecast-plot": drawForecasts };
  // One plot after another, the one nearest to what is seen first: all in one go would keep a large study's page from scrolling for seconds.
  const waiting = new Set();
  const far = (id) => Math.abs($(id).getBoundingClientRect().top);
  const drawNext = () => {
    const id = [...waiting].reduce((a, b) => (far(b) < far(a) ? b : a));
    waiting.delete(id);
    plots[id]();
  };
  const drawOn = () => {
    if (waiting.size) drawNext();
    if (waiting.size) later(drawOn);
    else document.documentElement.dataset.drawn = "yes";
  };
  const draw = () => {
    const idle = !waiting.size;
    Object.keys(plots).filter($).forEach((id) => waiting.add(id));
    if (idle) drawOn();
  };
  window.addEventListener("beforeprint", () => { while (waiting.size) drawNext(); });
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
  if ($("trials")) sortable($("trials"));
  ["front-x", "front-y", "front-log"].forEach((id) => $(id)?.addEventListener("change", drawFront));
  $("loss-x")?.addEventListener("change", drawLosses);
  ["solid-x", "solid-y", "solid-z"].forEach((id) => $(id)?.addEventListener("change", drawSolid));
  $("parallel-metric")?.addEventListener("change", drawParallel);
  data.knobs.forEach((_, i) => $(`axis-${i}`)?.addEventListener("change", (event) => parallel?.choose(i, event.target.value)));
  ["progress-x", "progress-y"].forEach((id) => $(id)?.addEventListener("change", drawProgress));
  $("forecast-metric")?.addEventListener("change", drawForecasts);
  $("steps-trials")?.addEventListener("input", Canvas.together(drawSteps));
  $("steps-log")?.addEventListener("change", drawSteps);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("(max-width: 759px)").addEventListener("change", draw);
  draw();
})();
