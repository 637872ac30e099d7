"use strict";
// Draws the figures that Python made, in the page's colours, and makes tables, filters and copy buttons work.
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const narrow = () => window.innerWidth < 760;
  // When there is nothing else to do; Safari has no such call.
  const later = window.requestIdleCallback ?? ((run) => setTimeout(run, 20));
  // Figures and plotly.js lie in the page compressed. It is no request: the policy allows none.
  async function unpacked(id) {
    const packed = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }
  let raw; // the figures, once they are unpacked

  function oncePerFrame(run) {
    let waiting = false;
    return () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; run(); });
    };
  }

  // Python's layout in the page's colours; names at points are left out where there is no room.
  function dressed({ data, layout }, log) {
    const axis = (own, isLog) => own && {
      ...own, gridcolor: css("--line"), linecolor: css("--line"), tickfont: { size: 12, color: css("--muted") }, nticks: narrow() ? 5 : 9,
      fixedrange: own.fixedrange || narrow(), separatethousands: true,
      ...(isLog === undefined ? {} : { type: isLog ? "log" : "linear", tickmode: isLog && own.tickvals ? "array" : "auto" }),
    };
    const ground = css("--surface");
    // A narrow axis has room for the powers of ten alone, if there are two of them.
    const fewer = (own) => {
      const tens = (own?.tickvals ?? []).flatMap((value, i) => (Number.isInteger(Math.round(1e6 * Math.log10(value)) / 1e6) ? [i] : []));
      if (!narrow() || own?.type !== "log" || tens.length < 2 || own.tickvals.length < 8) return own;
      return { ...own, tickvals: tens.map((i) => own.tickvals[i]), ticktext: tens.map((i) => own.ticktext[i]) };
    };
    return {
      data: narrow() ? data.map((trace) => ({ ...trace, mode: trace.mode?.replace("markers+text", "markers") })) : data,
      layout: {
        ...layout, showlegend: false, paper_bgcolor: ground, plot_bgcolor: ground, dragmode: narrow() ? false : "zoom",
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--text") },
        hoverlabel: { bgcolor: ground, bordercolor: css("--line"), font: { color: css("--text"), size: 12 }, align: "left" },
        xaxis: axis(fewer(layout.xaxis), log?.x), yaxis: axis(layout.yaxis, log?.y),
        annotations: layout.annotations?.map((note) => ({ ...note, bgcolor: chosenNote(note.name) ? css("--accent-soft") : ground })),
      },
    };
  }

  // Our own legend: it wraps, has room for a finger, and is reached with the keyboard.
  function drawLegend(plot, traces) {
    const legend = document.querySelector(`[data-legend="${plot.id}"]`);
    if (!legend) return;
    const names = [...new Set(traces.filter((trace) => trace.showlegend !== false && trace.name).map((trace) => trace.name))];
    legend.replaceChildren(...names.map((name) => {
      const sample = traces.find((trace) => trace.name === name && trace.showlegend !== false);
      const group = traces.flatMap((trace, i) => (trace.name === name ? [i] : []));
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch(sample), name);
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        Plotly.restyle(plot, { visible: shown }, group);
      });
      return button;
    }));
  }
  function swatch({ mode, marker, line }) {
    const make = (tag, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
      return made;
    };
    const svg = make("svg", { width: 26, height: 14, viewBox: "0 0 26 14", "aria-hidden": "true" });
    const dashes = { dash: "5 4", dot: "2 3" }[line?.dash] ?? "";
    const diamond = marker?.symbol === "diamond";
    if (marker?.symbol === "x-thin") svg.append(make("path", { d: "M9 3l8 8m0-8l-8 8", stroke: marker.color, "stroke-width": 1.5 }));
    else svg.append(mode === "lines"
      ? make("line", { x1: 1, x2: 25, y1: 7, y2: 7, stroke: line.color, "stroke-width": line.width, "stroke-dasharray": dashes })
      : make("rect", { x: 8, y: 2, width: 10, height: 10, rx: diamond ? 0 : 5, fill: marker?.color, transform: diamond ? "rotate(45 13 7) scale(1)" : "" }));
    return svg;
  }

  const figure = (id) => {
    const key = all(`[data-chooses="${id}"]`).map((select) => select.value).join("|");
    const found = raw.figures[id];
    return structuredClone(found[key] ?? Object.values(found)[0]); // plotly.js writes into what it draws
  };
  const logBox = (id) => document.querySelector(`[data-log="${id}"]`);
  function show(id, { data, layout }, log) {
    if (!window.Plotly) return Promise.resolve($(id));
    const plot = $(id), made = dressed({ data, layout }, log);
    if (layout.meta?.width) plot.style.minWidth = `${layout.meta.width}px`;
    const drawn = Plotly.react(plot, made.data, made.layout, { responsive: true, displaylogo: false, displayModeBar: false });
    drawn.then(() => drawLegend(plot, made.data));
    return drawn;
  }
  function draw(id) {
    if (id === "steps-plot") return drawSteps();
    if (id === "parallel") return drawParallel();
    const made = figure(id), box = logBox(id);
    return show(id, made, box ? { x: box.checked, y: box.checked } : undefined);
  }

  // The values that were chosen on the parallel axes: axis -> level.
  const chosen = new Map();
  const chosenNote = (name) => name && chosen.get(Number(name.split("|")[0])) === Number(name.split("|")[1]);
  function drawParallel() {
    const made = figure("parallel"), levels = raw.levels, size = made.layout.xaxis.tickvals.length + 1;
    const keeps = (trial) => [...chosen].every(([axis, level]) => levels[trial][axis] === level);
    const data = made.data.map((trace) => ({ ...trace, y: trace.y.map((y, i) => (keeps(trace.meta[Math.floor(i / size)]) ? y : null)) }));
    const trials = Object.keys(levels);
    $("parallel-said").textContent = chosen.size ? `${trials.filter(keeps).length} of ${trials.length} trials` : "";
    all("[data-axis]").forEach((select) => (select.value = chosen.get(Number(select.dataset.axis)) ?? ""));
    return show("parallel", { data, layout: made.layout }).then((plot) => {
      if (plot.dataset.heard) return;
      plot.dataset.heard = "yes";
      plot.on("plotly_clickannotation", ({ annotation }) => annotation.name && choose(...annotation.name.split("|")));
    });
  }
  function choose(axis, level) {
    if (level === "" || chosen.get(Number(axis)) === Number(level)) chosen.delete(Number(axis));
    else chosen.set(Number(axis), Number(level));
    drawParallel();
  }

  // The ticks of a logarithmic axis, as Python's `axis` writes them out: over a decade plotly's own read 2 at 20 and at 200.
  function writtenOut(values) {
    const low = Math.min(...values), high = Math.max(...values), tickvals = [];
    if (!(high > 8 * low)) return {};
    for (let power = 10 ** (Math.floor(Math.log10(low)) - 1); power <= high; power *= 10) {
      tickvals.push(...[power, 2 * power, 5 * power].filter((tick) => low / 2 <= tick && tick <= 2 * high));
    }
    return { tickvals, ticktext: tickvals.map((tick) => tick.toLocaleString("en", { maximumSignificantDigits: 6 })) };
  }

  function drawSteps() {
    const { curves, layout, colors } = raw.steps;
    const wanted = [...new Set($("steps-trials").value.match(/[0-9]+/g)?.map(Number) ?? [])];
    const found = wanted.map((n) => curves.find((curve) => curve.trial === n)).filter(Boolean);
    const missing = wanted.filter((n) => !curves.some((curve) => curve.trial === n)), numbers = curves.map((curve) => curve.trial);
    $("steps-said").textContent = missing.length ? `no steps were timed in trial ${missing.join(", ")}; they were in ${numbers.length} trials from ${Math.min(...numbers)} to ${Math.max(...numbers)}` : "";
    const data = found.flatMap((curve, i) => structuredClone(curve.traces).map((trace) => ({ ...trace, line: { ...trace.line, color: colors[i % colors.length] } })));
    const yaxis = { ...layout.yaxis, ...writtenOut(data.flatMap((trace) => trace.y)) };
    return show("steps-plot", { data, layout: structuredClone({ ...layout, yaxis }) }, { y: $("steps-log").checked });
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
    // Rows out of sight are left out of a sort, which is quick then; afterwards they are laid out a few at a time, to be there when they scroll by.
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
    $("filter").addEventListener("input", oncePerFrame(filter));
  }

  async function copy(button) {
    const source = $(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  // One plot after another, the one nearest to what is seen first: all in one go would keep a large study's page from scrolling for seconds.
  const waiting = new Set();
  const distance = (id) => Math.abs($(id).getBoundingClientRect().top);
  const drawNext = () => {
    const id = [...waiting].reduce((a, b) => (distance(b) < distance(a) ? b : a));
    waiting.delete(id);
    draw(id);
  };
  const drawOn = () => {
    if (waiting.size) drawNext();
    if (waiting.size) later(drawOn);
    else document.documentElement.dataset.drawn = "yes";
  };
  const drawAll = () => {
    const idle = !waiting.size;
    all("[data-plot]").forEach((plot) => waiting.add(plot.id));
    if (idle) drawOn();
  };

  const isLog = (id) => { const { xaxis, yaxis } = Object.values(raw.figures[id])[0].layout; return [xaxis, yaxis].some((axis) => axis.type === "log"); };
  async function begin() {
    raw = JSON.parse(await unpacked("data"));
    const script = document.createElement("script");
    script.textContent = await unpacked("library");
    document.head.append(script);
    if ($("front-log")) $("front-log").checked = isLog("front-plot");
    if ($("steps-trials")) {
      const { curves } = raw.steps, named = curves.filter((curve) => curve.named).slice(0, 4), first = named.length ? named : curves.slice(0, 3);
      $("steps-trials").value = first.map((curve) => curve.trial).join(" ");
      // A first step that compiles or allocates would press the others flat.
      $("steps-log").checked = first.some((curve) => {
        const [longest, median] = curve.traces.map((trace) => trace.y);
        return Math.max(...longest) > 6 * Math.min(...median);
      });
      $("steps-trials").addEventListener("input", oncePerFrame(drawSteps));
    }
    all("[data-chooses]").forEach((select) => select.addEventListener("change", () => draw(select.dataset.chooses)));
    all("[data-log]").forEach((box) => box.addEventListener("change", () => draw(box.dataset.log)));
    all("[data-axis]").forEach((select) => select.addEventListener("change", () => choose(select.dataset.axis, select.value)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    matchMedia("(max-width: 759px)").addEventListener("change", drawAll);
    document.documentElement.dataset.ready = "yes";
    drawAll();
  }

  if ($("trials")) sortable($("trials"));
  all("[data-copy]").forEach((button) => button.addEventListener("click", () => copy(button)));
  // Paper is narrower than most windows, and what lies beside it is cut; 950 pixels fit A4 and Letter sideways.
  const PAPER_WIDTH_PX = 950;
  const sizes = (layout) => { if (window.Plotly) all("[data-plot]").forEach((plot) => plot.data && Plotly.relayout(plot, layout(plot))); };
  window.addEventListener("beforeprint", () => {
    while (window.Plotly && waiting.size) drawNext();
    sizes((plot) => ({ width: plot.clientWidth * Math.min(1, PAPER_WIDTH_PX / document.querySelector("main").clientWidth), height: plot.clientHeight }));
  });
  window.addEventListener("afterprint", () => sizes(() => ({ width: null, height: null, autosize: true })));
  begin().catch(() => all("[data-plot]").forEach((plot) => {
    plot.textContent = "This browser is too old to draw the figures; the tables hold the same numbers.";
  }));
})();
