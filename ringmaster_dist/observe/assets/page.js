// The page: what the charts of charts.js show of the runs in `data`, again and again where the page is live.
const VERDICTS = ["accepted", "stale", "invalid"];
const chosen = { axis: "time", run: 0 };
const opened = new Set(); // the runs whose configuration is unfolded

function card(title, note, body, options = {}) {
  const head = element("div", { class: "head" }, element("div", {}, element("h2", {}, title), element("p", { class: "note" }, note)));
  if (options.extra) head.append(options.extra);
  return element("section", { class: options.wide ? "card wide" : "card", id: options.id || "" }, head, body, ...(options.legend ? [options.legend] : []));
}

function choice(names, current, pick) {
  const box = element("div", { class: "choice" });
  for (const [value, text] of names) {
    const button = element("button", { type: "button", "aria-pressed": String(value === current) }, text);
    button.onclick = () => pick(value);
    box.append(button);
  }
  return box;
}

function pill(state) {
  const kind = state.startsWith("running") ? "pill going" : state.startsWith("ended") ? "pill broken" : "pill";
  return element("span", { class: kind }, state);
}

function percent(value) { return value === null || value === undefined ? "–" : (100 * value).toFixed((value > 0 && value < 0.0995) || (value > 0.9 && value < 1) ? 1 : 0) + " %"; }

function heading(data) {
  const runs = data.runs, first = runs[0], title = document.getElementById("title"), state = document.getElementById("state");
  title.textContent = runs.length === 1 ? first.name : `${runs.length} runs`;
  document.title = title.textContent + " · ringmaster";
  state.replaceChildren();
  if (runs.length === 1) state.append(pill(first.state + (first.totals.diverged && !first.state.includes("diverged") ? ", diverges" : "")), ` ${first.method} on ${first.problem}, ${short(first.totals.workers)} ` +
    `${first.clock === "virtual" ? "simulated " : ""}workers, ${short(first.totals.seconds, 4)} ${first.clock === "virtual" ? "virtual " : ""}seconds`);
  else state.append(legend(runs.map((run, i) => ({ label: `${run.label} (${run.state})`, ...look(i) }))));
  document.getElementById("clock").textContent = runs.every((run) => run.clock === "virtual") ? "virtual seconds" : "seconds";
  progress(runs.length === 1 ? first.progress : null);
}

// How much of the budget is used up, and when the run will have ended, while it continues.
function progress(made) {
  const box = document.getElementById("progress");
  box.replaceChildren();
  if (!made || !(made.fraction > 0)) return;
  const end = made.seconds_left === null ? "" : `, about ${duration(made.seconds_left)} left, until ${clockTime(made.seconds_left)}`;
  box.append(element("div", { class: "stack" }, element("div", { style: `width:${100 * made.fraction}%;background:var(--accepted)` })),
    element("p", {}, `${percent(made.fraction)} of the budget${end}`));
}

function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]], at = parts.findIndex(([size]) => seconds >= size);
  if (at < 0) return "1 s";
  const [size, unit] = parts[at], whole = Math.floor(seconds / size), rest = parts[at + 1];
  const more = rest ? Math.floor((seconds - whole * size) / rest[0]) : 0;
  return `${whole} ${unit}` + (more ? ` ${more} ${rest[1]}` : "");
}

function clockTime(secondsFromNow) {
  const then = new Date(Date.now() + 1000 * secondsFromNow), far = secondsFromNow > 43200;
  return then.toLocaleString([], { hour: "2-digit", minute: "2-digit", ...(far ? { day: "numeric", month: "short" } : {}) });
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"], power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${+(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

function tiles(data) {
  const box = document.getElementById("tiles");
  box.replaceChildren();
  if (data.runs.length > 1) { box.style.display = "none"; return; }
  const run = data.runs[0], t = run.totals, arrived = t.accepted + t.stale + t.invalid;
  const entries = [
    [short(t.updates, 6), "updates"], [short(t.updates_per_second), "updates per second"],
    [percent(arrived ? t.accepted / arrived : null), "of gradients accepted"], [short(t.interrupted, 6), "stopped early"],
    [percent(t.wasted_fraction), "of compute wasted"],
  ];
  const names = { gap: "objective gap", loss: "validation loss" };
  const measured = Object.entries(t.evaluation).map(([name, value]) => [short(value, 4), names[name] || name.replaceAll("_", " ")]);
  if (t.evaluated_on && measured.length) measured[0][1] += ` on ${t.evaluated_on}`;
  entries.unshift(...measured);
  if (t.tokens) entries.push([short(t.tokens), "tokens"]);
  const memory = (run.measured.memory_bytes || []).filter((value) => value !== null);
  if (memory.length) entries.push([bytes(memory.at(-1)), "memory of the server"]);
  if (run.progress && run.progress.seconds_left !== null) entries.unshift([duration(run.progress.seconds_left), "left, about"]);
  for (const [value, text] of entries) box.append(element("div", { class: "tile" }, element("b", {}, value), element("span", {}, text)));
}

function lossCard(data, redraw) {
  const axes = [["time", "time"], ["updates", "updates"]];
  if (data.runs.some((run) => run.training.tokens || run.evaluation.tokens)) axes.push(["tokens", "tokens"]);
  if (!axes.some(([name]) => name === chosen.axis)) chosen.axis = "time";
  const gap = data.runs.every((run) => run.objective === "gap"), alone = data.runs.length === 1, series = [];
  data.runs.forEach((run, i) => {
    if (!gap && run.training.value.length)
      series.push({ label: alone ? "training, accepted gradients" : run.label, ...look(i), x: run.training[chosen.axis] || [], y: run.training.value, thin: alone });
    if (run.evaluation.value.length && (gap || alone))
      series.push({ label: alone ? (gap ? "f(x) − f*" : run.validation || "validation") : run.label, ...look(gap ? i : 1), marks: !gap,
        x: run.evaluation[chosen.axis] || [], y: run.evaluation.value });
  });
  const unit = chosen.axis === "time" ? "seconds" : chosen.axis;
  return card(gap ? "Objective gap" : "Loss", `versus ${chosen.axis}`, lineChart(series, { wide: true, log: gap, from: 0, xLabel: unit }), {
    wide: true, id: "loss", extra: choice(axes, chosen.axis, (axis) => { chosen.axis = axis; redraw(); }), legend: legend(series),
  });
}

function linesCard(title, note, series, options = {}) {
  return card(title, note, lineChart(series, { from: 0, ...options }), { legend: series.length > 1 ? legend(series) : null, id: options.id });
}

function overTime(data, key, title, note, options = {}) {
  const series = data.runs.map((run, i) => ({ label: run.label, ...look(i), x: run.over_time.time, y: run.over_time[key] || [] }));
  return linesCard(title, note, series, { floor: 0, ...options });
}

function delayCard(data) {
  if (data.runs.length > 1) return overTime(data, "delay_mean", "Delay over time", "mean of the gradients that arrived", { id: "delay" });
  const run = data.runs[0], o = run.over_time, parts = run.delays.parts || {};
  const series = ["mean", "p95", "max"].map((name, i) => ({ label: name, ...look(i), x: o.time, y: o["delay_" + name] || [], thin: i > 0 }));
  if (run.threshold.value.length) series.push({ label: "threshold R", colour: colour("soft"), dash: [1, 4], x: run.threshold.time, y: run.threshold.value });
  const note = parts.compute === undefined ? "" : `of a mean of ${short(parts.compute + parts.queue)}, ${short(parts.compute)} while computing, ${short(parts.queue)} in queue and wire`;
  return linesCard("Delay over time", note, series, { floor: 0, id: "delay" });
}

// What the server measures of itself. A simulated run has none of it.
function serverCards(data) {
  const cards = [], runs = data.runs, alone = runs.length === 1;
  const of = (key) => runs.map((run, i) => ({ label: run.label, ...look(i), x: run.measured.time, y: run.measured[key] || [] })).filter((s) => s.y.length);
  if (of("eta").length) cards.push(linesCard("Step size", "eta of a gradient without delay", of("eta"), { floor: 0, id: "eta" }));
  if (of("memory_bytes").length) {
    const series = of("memory_bytes").map((s) => ({ ...s, label: alone ? "the process" : s.label }));
    if (alone) series.push(...of("device_memory_bytes").map((s) => ({ ...s, ...look(1), label: "tensors on its device" })));
    cards.push(linesCard("Memory of the server", "", series, { floor: 0, format: bytes, id: "memory" }));
  }
  for (const [key, title, note] of [["gradient", "Gradient norm", "Euclidean norm of one accepted gradient now and then"], ["update", "Update norm", "Euclidean norm of one update now and then"]]) {
    const series = alone
      ? Object.entries(runs[0].norms[key]).filter(([role], _, all) => role !== "all" || all.length > 2).map(([role, y], i) => ({ label: role, ...look(i), x: runs[0].norms.time, y }))
      : runs.map((run, i) => ({ label: run.label, ...look(i), x: run.norms.time, y: run.norms[key].all }));
    if (series.some((s) => s.y.length)) cards.push(linesCard(title, note + (alone ? ", by role" : ""), series, { log: true, id: key + "-norm" }));
  }
  const rows = runs[Math.min(chosen.run, runs.length - 1)].rows;
  if (rows.lines.length) cards.push(linesCard("Rows per gradient", "that the server gives to each worker by its speed",
    rows.lines.map((line, i) => ({ label: line.label, ...look(i), x: rows.time, y: line.value })), { floor: 0, id: "rows" }));
  return cards;
}

function histogramCard(data) {
  if (data.runs.length > 1) {
    const series = data.runs.map((run, i) => {
      const d = run.delays, sums = d.low.map((_, k) => VERDICTS.reduce((sum, v) => sum + d[v][k], 0)), all = sums.reduce((a, b) => a + b, 0);
      return { label: run.label, ...look(i), x: d.low.map((low) => low + (d.width - 1) / 2), y: sums.map((n) => n / all / d.width) };
    });
    return card("Delays", "share of the arriving gradients by delay", lineChart(series, { floor: 0, from: 0, percent: true, xLabel: "delay" }), {
      id: "histogram", legend: legend(series) });
  }
  const run = data.runs[0], d = run.delays;
  const labels = d.low.map((low) => (d.width > 1 ? `${low}–${low + d.width - 1}` : String(low)));
  const groups = VERDICTS.map((name) => ({ label: name, colour: colour(name), y: d[name] }));
  const beyond = d.beyond > d.low[d.low.length - 1] + d.width - 1 ? `; the last bar goes up to ${short(d.beyond)}` : "";
  const note = "gradients by the updates made while they were on their way" + beyond;
  return card("Delays", note, barChart(labels, groups, { xLabel: "delay", every: d.width > 1 ? 6 : 12 }), { id: "histogram", legend: legend(groups) });
}

function timelineCards(data, redraw) {
  const run = data.runs[Math.min(chosen.run, data.runs.length - 1)], t = run.timeline;
  if (!t.workers.length) return [];
  const names = t.workers.map((w) => "worker " + w), tints = data.kinds.map(colour);
  const pick = data.runs.length > 1 ? choice(data.runs.map((r, i) => [i, r.label]), chosen.run, (i) => { chosen.run = i; redraw(); }) : null;
  const bins = t.shares[0][0].length, width = t.seconds / bins;
  const whole = rowsChart(names, 0, t.seconds, (pen, X, high, Y) => {
    t.shares.forEach((kinds, row) => {
      for (let bin = 0; bin < bins; bin++) {
        let base = Y(row) + high;
        const x = X(bin * width), w = X((bin + 1) * width) - x + 0.4;
        kinds.forEach((shares, kind) => {
          const size = shares[bin] * high;
          if (size > 0) { base -= size; pen.fillStyle = tints[kind]; pen.fillRect(x, base, w, size); }
        });
      }
    });
  }, (row, at) => {
    const bin = Math.min(bins - 1, Math.floor(at / width));
    return `${names[row]}, ${short(bin * width, 4)} to ${short((bin + 1) * width, 4)} s\n` +
      data.kind_names.map((kind, k) => [kind, t.shares[row][k][bin]]).filter(([, s]) => s > 0).map(([kind, s]) => `${kind}: ${percent(s)}`).join("\n");
  });
  const c = t.close;
  const close = rowsChart(names, c.begin, c.end, (pen, X, high, Y) => {
    for (const [row, low, up, kind] of c.spans) {
      pen.fillStyle = tints[kind];
      pen.fillRect(X(low), Y(row), Math.max(0.6, X(up) - X(low) - 0.8), high);
    }
  }, (row, at) => {
    const span = c.spans.find(([r, low, up]) => r === row && low <= at && at <= up);
    return span ? `${names[row]}: ${data.kind_names[span[3]]}\n${short(span[2] - span[1])} s` : names[row];
  });
  const colours = legend(data.kind_names.map((label, k) => ({ label, colour: tints[k] })));
  return [
    card("What the workers did", "each worker's time, by what became of the work", whole, { wide: true, id: "timeline", extra: pick, legend: colours.cloneNode(true) }),
    card("The last moments, closer", "one span per gradient", close, { wide: true, id: "closer", legend: colours }),
  ];
}

function workersCard(data) {
  const run = data.runs[Math.min(chosen.run, data.runs.length - 1)], body = element("tbody");
  const hasRows = run.workers.some((w) => w.rows); // the server has assigned rows
  const hasDevices = run.workers.some((w) => w.device);
  const names = ["worker", "share of accepted", "", "s/gradient", ...(hasRows ? ["rows"] : []), ...VERDICTS, "stopped early", "compute wasted",
    ...(hasDevices ? ["device"] : [])];
  for (const w of run.workers) {
    const fill = element("div", { style: `width:${100 * w.share}%;background:var(--accepted)` }), spent = w.used_seconds + w.wasted_seconds;
    const cells = [w.worker, percent(w.share), element("div", { class: "stack", title: `${percent(w.share)} of all accepted gradients` }, fill), short(w.tau),
      ...(hasRows ? [w.rows] : []), ...VERDICTS.map((v) => short(w[v], 6)), short(w.interrupted, 6), spent ? percent(w.wasted_seconds / spent) : "–",
      ...(hasDevices ? [w.device || "–"] : [])];
    body.append(element("tr", {}, ...cells.map((cell, i) =>
      element("td", { "data-name": names[i], ...(i === 2 ? { class: "bar" } : {}) }, cell instanceof Node ? cell : String(cell)))));
  }
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))), body);
  const note = (data.runs.length > 1 ? `${run.label}. ` : "") + (run.workers_omitted ? `${run.workers_omitted} more workers are not listed.` : "a full bar is all accepted gradients");
  return card("Share of work", note, table, { wide: true, id: "workers" });
}

// What the trained model has written. It is shown as it is, and never as a part of the page.
function sampleCards(data) {
  return data.runs.filter((run) => run.sample).map((run) =>
    card("Sample", (data.runs.length > 1 ? `${run.label}. ` : "") + "what the trained model wrote at the end", element("pre", {}, run.sample), { wide: true, id: "sample" }));
}

function configurationCards(data) {
  const cards = [], alone = data.runs.length === 1;
  const commands = data.runs.filter((run) => run.commands.length).map((run) =>
    element("div", {}, ...(alone ? [] : [element("p", { class: "note" }, run.label)]), element("pre", {}, run.commands.join("\n"))));
  if (!alone && data.differing.length) {
    const values = data.runs.map((run) => new Map(run.config)), names = ["run", ...data.differing];
    const rows = data.runs.map((run, i) => element("tr", {}, ...[run.name, ...data.differing.map((key) => values[i].get(key) ?? "–")].map((value, k) => element("td", { "data-name": names[k] }, value))));
    cards.push(card("Differences", "keys in which the configurations differ", element("table", {}, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))),
      element("tbody", {}, ...rows)), { wide: true, id: "differences" }));
  }
  const listed = data.runs.map((run) => element("details", { "data-run": run.name }, element("summary", {}, alone ? "every key" : run.label),
    element("dl", {}, ...run.config.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value))))));
  listed.forEach((box, i) => { box.open = opened.has(i); box.ontoggle = () => box.open ? opened.add(i) : opened.delete(i); });
  cards.push(card("Configuration", commands.length ? "the command, and what it resulted in" : "", element("div", {}, ...commands, ...listed), { wide: true, id: "configuration" }));
  return cards;
}

function show(data) {
  const redraw = () => show(data);
  show.width = window.innerWidth;
  heading(data);
  tiles(data);
  document.getElementById("cards").replaceChildren(
    lossCard(data, redraw),
    overTime(data, "accepted", "Accepted", "share of the arriving gradients", { ceiling: 1.02, percent: true, id: "accept" }),
    overTime(data, "updates_per_second", "Updates per second", "versions made", { id: "rate" }),
    histogramCard(data), delayCard(data), ...serverCards(data), ...timelineCards(data, redraw), workersCard(data), ...sampleCards(data), ...configurationCards(data));
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
}

let current = JSON.parse(document.getElementById("data").textContent);
show(current);
window.addEventListener("resize", () => { if (window.innerWidth !== show.width) { show.width = window.innerWidth; show(current); } });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(current));

const refresh = Number(document.body.dataset.refresh);
if (refresh) setInterval(async () => {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (!answer.ok) return;
    const text = await answer.text();
    if (text !== show.last) { show.last = text; current = JSON.parse(text); hideTip(); show(current); }
  } catch (error) {
    document.getElementById("state").append(current.lost ? "" : " · the watcher has ended");
    current.lost = true;
  }
}, 1000 * refresh);
