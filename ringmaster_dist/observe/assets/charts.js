"use strict";
// Small charts, drawn as SVG and canvas. Nothing is loaded from anywhere.
const SVG = "http://www.w3.org/2000/svg";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
// The colour and the dashes of a line by its place, as in style.py.
const look = (place) => ({ colour: colour("line-" + (place % DASHES.length)), dash: DASHES[(place + Math.floor(place / DASHES.length)) % DASHES.length] });
const tip = () => document.getElementById("tip");

// How wide a chart may be: as its card, so that letters keep their size.
function room(wide) {
  const cards = document.getElementById("cards").clientWidth;
  return Math.max(240, (wide || window.innerWidth <= 760 ? cards : (cards - 16) / 2) - 34);
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function short(value, digits = 3) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(digits) + " G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(digits) + " M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(digits) + " k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))));
}

function ticks(low, high, about) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) found.push(+t.toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of high / low > 30 ? [1] : [1, 2, 5]) {
      const value = m * 10 ** p;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  return found.length > 7 ? found.filter((_, i) => i % Math.ceil(found.length / 7) === 0) : found;
}

function extent(values, log) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && isFinite(v) && (!log || v > 0)) { if (v < low) low = v; if (v > high) high = v; }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  return [low, high];
}

// Lines: series of {label, colour, dash, x, y, thin, marks}. Options: log, floor (y from here), ceiling, percent, format, xLabel.
function lineChart(series, options = {}) {
  const wide = options.wide || false, W = room(wide), H = wide ? 300 : 230;
  const left = options.format ? 62 : 52, right = 12, top = 8, bottom = 34, w = W - left - right, h = H - top - bottom;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  series = series.filter((s) => s.y.some((v) => v !== null && (!options.log || v > 0)));
  if (!series.length) {
    shape(svg, "text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing recorded");
    return svg;
  }
  let [x0, x1] = extent(series.flatMap((s) => s.x)), [y0, y1] = extent(series.flatMap((s) => s.y), options.log);
  x0 = Math.min(x0, options.from ?? x0);
  if (options.floor !== undefined) y0 = options.floor;
  if (options.ceiling !== undefined) y1 = options.ceiling;
  else if (!options.log) { const pad = (y1 - y0) * 0.05; y1 += pad; if (options.floor === undefined) y0 -= pad; }
  if (y1 <= y0) y1 = y0 + 1;
  const X = (v) => left + ((v - x0) / (x1 - x0)) * w;
  const scale = options.log ? Math.log : (v) => v;
  const Y = (v) => top + h - ((scale(v) - scale(y0)) / (scale(y1) - scale(y0))) * h;
  for (const t of options.log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    shape(svg, "line", { x1: left, x2: W - right, y1: Y(t), y2: Y(t), stroke: "var(--grid)" });
    shape(svg, "text", { x: left - 7, y: Y(t) + 4, "text-anchor": "end" }, options.percent ? Math.round(100 * t) + " %" : options.format ? options.format(t) : short(t));
  }
  for (const t of ticks(x0, x1, Math.max(3, W / 110)))
    shape(svg, "text", { x: X(t), y: H - bottom + 17, "text-anchor": "middle" }, short(t));
  shape(svg, "line", { x1: left, x2: W - right, y1: top + h, y2: top + h, stroke: "var(--line)" });
  shape(svg, "text", { x: left + w / 2, y: H - 2, "text-anchor": "middle" }, options.xLabel || "seconds");
  for (const s of series) {
    let path = "", pen = false;
    s.x.forEach((x, i) => {
      const y = s.y[i];
      if (y === null || (options.log && y <= 0)) { pen = false; return; }
      path += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(Math.min(Math.max(y, y0), y1)).toFixed(1)}`;
      pen = true;
    });
    const seen = s.y.map((y, i) => [s.x[i], y]).filter(([, y]) => y !== null && (!options.log || y > 0));
    if (seen.length === 1 || (s.marks && seen.length <= 60))
      for (const [x, y] of seen) shape(svg, "circle", { cx: X(x), cy: Y(Math.min(Math.max(y, y0), y1)), r: seen.length === 1 ? 4 : 3, fill: s.colour });
    shape(svg, "path", { d: path, fill: "none", "stroke-linejoin": "round", ...stroke(s) });
  }
  const cross = shape(svg, "line", { y1: top, y2: top + h, stroke: "var(--soft)", "stroke-dasharray": "3 3", opacity: 0 });
  const area = shape(svg, "rect", { x: left, y: top, width: w, height: h, fill: "transparent" });
  area.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect(), at = x0 + (((event.clientX - box.left) / box.width) * W - left) / w * (x1 - x0);
    cross.setAttribute("x1", X(at)); cross.setAttribute("x2", X(at)); cross.setAttribute("opacity", 1);
    const lines = series.map((s) => {
      let best = 0;
      s.x.forEach((x, i) => { if (s.y[i] !== null && Math.abs(x - at) < Math.abs(s.x[best] - at)) best = i; });
      return `${s.label}: ${options.percent ? (100 * s.y[best]).toFixed(1) + " %" : options.format ? options.format(s.y[best]) : short(s.y[best], 4)}`;
    });
    showTip(event, `${options.xLabel || "seconds"} ${short(at, 4)}\n${lines.join("\n")}`);
  });
  area.addEventListener("mouseleave", () => { cross.setAttribute("opacity", 0); hideTip(); });
  return svg;
}

// Bars side by side or stacked: groups of {label, colour, y} over the same x labels.
function barChart(labels, groups, options = {}) {
  const W = room(false), H = 230, left = 52, right = 12, top = 8, bottom = 34, w = W - left - right, h = H - top - bottom;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  const sums = labels.map((_, i) => groups.reduce((sum, g) => sum + g.y[i], 0));
  const y1 = Math.max(...sums, 1e-9), step = w / Math.max(1, labels.length), Y = (v) => (v / y1) * h;
  for (const t of ticks(0, y1, 5)) {
    shape(svg, "line", { x1: left, x2: W - right, y1: top + h - Y(t), y2: top + h - Y(t), stroke: "var(--grid)" });
    shape(svg, "text", { x: left - 7, y: top + h - Y(t) + 4, "text-anchor": "end" }, short(t));
  }
  labels.forEach((label, i) => {
    let base = top + h;
    const column = shape(svg, "g", {});
    for (const g of groups) {
      const size = Y(g.y[i]);
      base -= size;
      if (size > 0) shape(column, "rect", { x: left + i * step + step * 0.1, y: base, width: step * 0.8, height: Math.max(size, 0.8), fill: g.colour });
    }
    shape(column, "rect", { x: left + i * step, y: top, width: step, height: h, fill: "transparent" });
    column.addEventListener("mousemove", (event) =>
      showTip(event, `${options.xLabel} ${label}\n` + groups.map((g) => `${g.label}: ${short(g.y[i], 5)}`).join("\n")));
    column.addEventListener("mouseleave", hideTip);
    if (i % Math.ceil(labels.length / (options.every || 12)) === 0)
      shape(svg, "text", { x: left + (i + 0.5) * step, y: H - bottom + 17, "text-anchor": "middle" }, label);
  });
  shape(svg, "line", { x1: left, x2: W - right, y1: top + h, y2: top + h, stroke: "var(--line)" });
  shape(svg, "text", { x: left + w / 2, y: H - 2, "text-anchor": "middle" }, options.xLabel);
  return svg;
}

// Rows of coloured spans over time; `paint(context, X, rowHeight, Y)` fills them.
function rowsChart(names, begin, end, paint, describe) {
  const box = element("div"), canvas = element("canvas"), height = Math.max(13, Math.min(26, 420 / names.length)), bottom = 24;
  const left = 18 + 6.6 * Math.max(...names.map((name) => name.length));
  box.append(canvas);
  const W = room(true), H = names.length * height + bottom, ratio = window.devicePixelRatio || 1;
  canvas.width = W * ratio; canvas.height = H * ratio; canvas.style.height = H + "px";
  const pen = canvas.getContext("2d"), X = (t) => left + ((t - begin) / (end - begin || 1)) * (W - left - 8);
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  paint(pen, X, height - Math.max(2, height * 0.18), (row) => row * height + 1);
  pen.fillStyle = colour("soft");
  pen.textAlign = "right"; pen.textBaseline = "middle";
  names.forEach((name, row) => pen.fillText(name, left - 8, (row + 0.45) * height));
  pen.textAlign = "center"; pen.textBaseline = "alphabetic";
  for (const t of ticks(begin, end, Math.max(3, W / 130))) pen.fillText(short(t, 4) + " s", Math.min(X(t), W - 20), H - 6);
  canvas.onmousemove = (event) => {
    const rect = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - rect.top) / height);
    const at = begin + ((event.clientX - rect.left - left) / (W - left - 8)) * (end - begin);
    if (row < 0 || row >= names.length || at < begin || at > end) return hideTip();
    showTip(event, describe(row, at));
  };
  canvas.onmouseleave = hideTip;
  return box;
}

function stroke(s) {
  return { stroke: s.colour, "stroke-width": s.thin ? 1.3 : 2.2, "stroke-dasharray": (s.dash || []).join(" ") };
}

// Entries of {label, colour, dash}: those with dashes are lines and are shown as such, the others are areas.
function legend(entries) {
  const box = element("div", { class: "legend" });
  for (const entry of entries) {
    const sample = document.createElementNS(SVG, "svg");
    sample.setAttribute("viewBox", entry.dash ? "0 0 34 12" : "0 0 12 12");
    sample.setAttribute("class", entry.dash ? "line" : "area");
    if (!entry.dash) shape(sample, "rect", { width: 12, height: 12, rx: 3, fill: entry.colour });
    else {
      shape(sample, "line", { x1: 0, x2: 34, y1: 6, y2: 6, ...stroke(entry) });
      if (entry.marks) shape(sample, "circle", { cx: 17, cy: 6, r: 3, fill: entry.colour });
    }
    box.append(element("span", {}, sample, entry.label));
  }
  return box;
}

function showTip(event, text) {
  const box = tip();
  box.textContent = text;
  box.style.opacity = 0.95;
  const right = event.clientX + 16 + box.offsetWidth > window.innerWidth;
  box.style.left = (right ? event.clientX - box.offsetWidth - 12 : event.clientX + 16) + "px";
  box.style.top = Math.max(4, event.clientY - box.offsetHeight - 8) + "px";
}

function hideTip() { tip().style.opacity = 0; }
