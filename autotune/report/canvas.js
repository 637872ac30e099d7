"use strict";
// What plotly draws with WebGL only, drawn on plain canvases: machines that people reach over ssh often have none.
const Canvas = (() => {
  // The page's colours as they are now, each looked up once for a drawing of thousands of lines.
  const palette = () => {
    const style = getComputedStyle(document.documentElement), seen = {};
    return (name) => (seen[name] ??= style.getPropertyValue(name).trim());
  };
  const family = () => getComputedStyle(document.body).fontFamily;

  // Does something once a frame, however many events ask for it.
  function together(run) {
    let asked = false;
    return () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; run(); });
    };
  }

  // A context in CSS pixels, as large as the canvas is shown.
  function context(canvas) {
    const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    return { pen, width: box.width, height: box.height };
  }

  /* Points in a box that can be turned.
     points: [{at: [x, y, z] in 0..1, bars: [[low, high] x 3], ink, size, diamond, name, tip}], axes: [{title, low, high} x 3] */
  function solid(canvas, tip) {
    let scene = { points: [], axes: [] }, yaw = -0.7, pitch = 0.42, spots = [], held = null;

    const turn = ([x, y, z]) => {
      const [a, b, c] = [x - 0.5, y - 0.5, z - 0.5];
      const across = a * Math.cos(yaw) - b * Math.sin(yaw), deep = a * Math.sin(yaw) + b * Math.cos(yaw);
      return [across, c * Math.cos(pitch) + deep * Math.sin(pitch), deep * Math.cos(pitch) - c * Math.sin(pitch)];
    };

    function draw() {
      const { pen, width, height } = context(canvas), colour = palette();
      const size = Math.min(width * 0.56, height * 0.62);
      const place = (at) => {
        const [x, y, depth] = turn(at), near = 1 / (1 + 0.25 * depth);
        return [width / 2 + x * size * near, height / 2 - 8 - y * size * near, depth];
      };
      const line = (from, to, ink, wide, dash = []) => {
        const [a, b] = [place(from), place(to)];
        pen.beginPath(); pen.setLineDash(dash); pen.strokeStyle = ink; pen.lineWidth = wide;
        pen.moveTo(a[0], a[1]); pen.lineTo(b[0], b[1]); pen.stroke(); pen.setLineDash([]);
      };
      pen.font = `12px ${family()}`;
      // The floor and the two walls behind, with a grid.
      const back = [0, 1].map((axis) => { const probe = [[0, 0.5, 0.5], [1, 0.5, 0.5]].map((p) => (axis ? [p[1], p[0], 0.5] : p)); return turn(probe[0])[2] > turn(probe[1])[2] ? 0 : 1; });
      const faint = colour("--line");
      for (let i = 0; i <= 4; i++) {
        const t = i / 4;
        line([t, 0, 0], [t, 1, 0], faint, 1); line([0, t, 0], [1, t, 0], faint, 1);
        line([back[0], t, 0], [back[0], t, 1], faint, 1); line([back[0], 0, t], [back[0], 1, t], faint, 1);
        line([t, back[1], 0], [t, back[1], 1], faint, 1); line([0, back[1], t], [1, back[1], t], faint, 1);
      }
      // Titles and ends of the axes, on the edges in front.
      const front = back.map((side) => 1 - side);
      const edges = [[[0, front[1], 0], [1, front[1], 0]], [[front[0], 0, 0], [front[0], 1, 0]], [[back[0], front[1], 0], [back[0], front[1], 1]]];
      pen.textBaseline = "middle";
      const text = (words, at, ink, shift) => {
        const [x, y] = place(at), wide = pen.measureText(words).width;
        const left = Math.max(4, Math.min(width - wide - 4, x - wide / 2 + shift[0]));
        pen.fillStyle = ink; pen.textAlign = "left"; pen.fillText(words, left, Math.max(10, Math.min(height - 8, y + shift[1])));
      };
      scene.axes.forEach((axis, i) => {
        const [from, to] = edges[i], middle = from.map((v, j) => (v + to[j]) / 2);
        if (i === 2) {
          text(axis.low, from, colour("--muted"), [-26, -8]); text(axis.high, to, colour("--muted"), [-26, 0]);
          text(axis.title, to, colour("--text"), [0, -18]);
        } else {
          const side = place(middle)[0] < width / 2 ? -1 : 1;
          text(axis.low, from.map((v, j) => v + 0.06 * (j === i ? 1 : 0)), colour("--muted"), [side * 14, 14]);
          text(axis.high, to.map((v, j) => v - 0.06 * (j === i ? 1 : 0)), colour("--muted"), [side * 14, 14]);
          text(axis.title, middle, colour("--text"), [side * 30, 34]);
        }
      });
      // Far points first.
      spots = scene.points.map((point) => ({ point, spot: place(point.at) })).sort((a, b) => b.spot[2] - a.spot[2]);
      for (const { point, spot } of spots) {
        if (point.name || scene.points.length < 150) line(point.at, [point.at[0], point.at[1], 0], faint, 1, [2, 3]);
        point.bars.forEach(([low, high], i) => {
          const end = (v) => point.at.map((w, j) => (j === i ? Math.max(-0.04, Math.min(1.04, v)) : w));
          if (high - low > 0.004) line(end(low), end(high), point.ink, 1);
        });
        pen.beginPath();
        const r = point.size / (1 + 0.25 * spot[2]);
        if (point.diamond) { pen.moveTo(spot[0], spot[1] - r); pen.lineTo(spot[0] + r, spot[1]); pen.lineTo(spot[0], spot[1] + r); pen.lineTo(spot[0] - r, spot[1]); pen.closePath(); }
        else pen.arc(spot[0], spot[1], r, 0, 7);
        pen.fillStyle = point.diamond ? colour("--surface") : point.ink; pen.fill();
        pen.lineWidth = point.diamond ? 2 : 1; pen.strokeStyle = point.diamond ? point.ink : colour("--surface"); pen.stroke();
      }
      const taken = [];
      for (const { point, spot } of [...spots].reverse()) {
        if (!point.name || width < 560) continue;
        const wide = pen.measureText(point.name).width;
        let top = spot[1] - 14;
        while (taken.some(([l, t, r]) => Math.abs(t - top) < 15 && l < spot[0] + 10 + wide && r > spot[0] + 10)) top += 15;
        taken.push([spot[0] + 10, top, spot[0] + 10 + wide]);
        // A rim in the ground's colour: names lie over points and bars.
        pen.textAlign = "left"; pen.lineJoin = "round"; pen.lineWidth = 4; pen.strokeStyle = colour("--surface"); pen.fillStyle = colour("--text");
        const left = Math.min(width - wide - 4, spot[0] + 10);
        pen.strokeText(point.name, left, top); pen.fillText(point.name, left, top);
      }
    }

    function show(event) {
      const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      let best = null, nearest = 18;
      for (const each of spots) {
        const far = Math.hypot(each.spot[0] - x, each.spot[1] - y);
        if (far < nearest) [best, nearest] = [each, far];
      }
      tip.hidden = !best;
      if (!best) return;
      tip.textContent = best.point.tip;
      tip.style.left = `${Math.max(6, Math.min(box.width - tip.offsetWidth - 6, x + 14))}px`;
      tip.style.top = `${Math.max(6, Math.min(box.height - tip.offsetHeight - 6, y + 14))}px`;
    }

    const redraw = together(draw);
    const tilt = (dx, dy) => { yaw += dx; pitch = Math.max(-0.2, Math.min(1.45, pitch + dy)); redraw(); };
    canvas.addEventListener("pointerdown", (event) => { held = [event.clientX, event.clientY]; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return show(event);
      tip.hidden = true;
      // A finger scrolls the page up and down; it turns the box sideways only.
      tilt((event.clientX - held[0]) * -0.008, event.pointerType === "touch" ? 0 : (event.clientY - held[1]) * 0.006);
      held = [event.clientX, event.clientY];
    });
    canvas.addEventListener("pointerup", (event) => { held = null; show(event); });
    canvas.addEventListener("pointercancel", () => { held = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0.1, 0], ArrowRight: [-0.1, 0], ArrowUp: [0, 0.08], ArrowDown: [0, -0.08] }[event.key];
      if (step) { event.preventDefault(); tilt(...step); }
    });
    new ResizeObserver(redraw).observe(canvas);
    return (next) => { scene = next; draw(); };
  }

  /* Lines through parallel axes.
     axes: [{title, levels: [text]} or {title, low, high}], lines: [{at: [0..1 or null for each axis], shade: 0..1, wide, ink}]
     heard(chosen, n): which level of which axis was chosen, and how many lines are left */
  function parallel(canvas, heard) {
    let scene = { axes: [], lines: [] }, chosen = new Map(), boxes = [];

    const keeps = (line) => [...chosen].every(([i, level]) => line.at[i] === level);
    const height = (axis, t, top, bottom) => bottom - (axis.levels ? (axis.levels.length < 2 ? 0.5 : t / (axis.levels.length - 1)) : t) * (bottom - top);

    function draw() {
      canvas.style.width = `${Math.max(canvas.parentElement.parentElement.clientWidth, 92 * scene.axes.length)}px`;
      const { pen, width, height: tall } = context(canvas), colour = palette();
      const top = 76, bottom = tall - 24, left = 70, right = width - 70;
      const x = (i) => left + (scene.axes.length < 2 ? 0 : i / (scene.axes.length - 1)) * (right - left);
      pen.lineJoin = "round";
      const ordered = [...scene.lines].sort((a, b) => a.wide - b.wide || a.shade - b.shade);
      const thin = Math.max(0.12, Math.min(0.6, 60 / (scene.lines.filter(keeps).length + 1)));
      for (const pass of [false, true]) {
        for (const line of ordered) {
          if (keeps(line) !== pass) continue;
          pen.beginPath();
          pen.strokeStyle = pass ? line.ink : colour("--line"); pen.lineWidth = pass ? line.wide : 1; pen.globalAlpha = pass ? (line.wide > 1.5 ? 1 : thin) : 0.5 * thin;
          let last = null;
          line.at.forEach((t, i) => {
            if (t === null) { last = null; return; }
            // Lines through one value are spread a little, or all would be one.
            const y = height(scene.axes[i], t, top, bottom) + (scene.axes[i].levels ? line.jitter * 9 : 0);
            if (!last) pen.moveTo(x(i), y);
            else pen.bezierCurveTo((last[0] + x(i)) / 2, last[1], (last[0] + x(i)) / 2, y, x(i), y);
            last = [x(i), y];
          });
          pen.stroke();
        }
      }
      pen.globalAlpha = 1;
      boxes = [];
      const write = (text, at, y, ink) => {
        const wide = pen.measureText(text).width, start = Math.max(4, Math.min(width - wide - 4, at - wide / 2));
        pen.fillStyle = ink; pen.fillText(text, start, y);
      };
      scene.axes.forEach((axis, i) => {
        pen.textBaseline = "middle"; pen.textAlign = "left"; pen.strokeStyle = colour("--muted"); pen.lineWidth = 1;
        pen.beginPath(); pen.moveTo(x(i), top); pen.lineTo(x(i), bottom); pen.stroke();
        pen.font = `600 12px ${family()}`;
        const room = scene.axes.length > 1 ? (right - left) / (scene.axes.length - 1) - 8 : width;
        wrap(pen, axis.title, room).slice(0, 4).forEach((part, n) => write(part, x(i), 12 + 14 * n, colour("--text")));
        pen.font = `12px ${family()}`;
        const marks = axis.levels ? axis.levels.map((text, level) => [text, height(axis, level, top, bottom), level]) : [[axis.high, top, null], [axis.low, bottom, null]];
        for (const [text, y, level] of marks) {
          const shown = fit(pen, text, Math.max(room, 40)), wide = pen.measureText(shown).width, on = chosen.get(i) === level && level !== null;
          pen.globalAlpha = 0.86; pen.fillStyle = on ? colour("--accent") : colour("--surface");
          const start = Math.max(2, Math.min(width - wide - 10, x(i) - wide / 2 - 4));
          pen.beginPath(); pen.roundRect(start, y - 9, wide + 8, 18, 5); pen.fill(); pen.globalAlpha = 1;
          pen.fillStyle = on ? colour("--surface") : colour("--text"); pen.fillText(shown, start + 4, y);
          if (level !== null) boxes.push([start - 4, y - 13, wide + 16, 26, i, level]);
        }
      });
    }
    const fit = (pen, text, room) => {
      let cut = text;
      while (cut.length > 3 && pen.measureText(cut).width > room) cut = cut.slice(0, -1);
      return cut === text ? text : `${cut.slice(0, -1)}…`;
    };
    const wrap = (pen, text, room) => text.split(/(?<=[_ ])/).reduce((lines, part) => {
      const last = lines[lines.length - 1];
      if (last !== undefined && pen.measureText(last + part).width <= room) lines[lines.length - 1] = last + part;
      else lines.push(part);
      return lines;
    }, []);

    const under = (event) => {
      const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      return boxes.find(([l, t, w, h]) => px >= l && px <= l + w && py >= t && py <= t + h);
    };
    const redraw = together(draw);
    const choose = (i, level) => {
      if (level === "" || chosen.get(i) === Number(level)) chosen.delete(i);
      else chosen.set(i, Number(level));
      heard(chosen, scene.lines.filter(keeps).length);
      redraw();
    };
    canvas.addEventListener("click", (event) => {
      const hit = under(event);
      if (hit) choose(hit[4], hit[5]);
    });
    canvas.addEventListener("pointermove", (event) => { canvas.style.cursor = under(event) ? "pointer" : ""; });
    new ResizeObserver(redraw).observe(canvas.parentElement.parentElement);
    return { show: (next) => { scene = next; draw(); }, choose };
  }

  return { solid, parallel, together };
})();
