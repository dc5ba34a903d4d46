// The page: what the charts of charts.js show of the runs in `data`, again and again where the page is live.
const VERDICTS = ["accepted", "stale", "invalid"];
const chosen = { axis: "time", run: 0 };

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
  else state.append(legend(runs.map((run, i) => [`${run.label} (${run.state})`, PALETTE[i % PALETTE.length]])));
  document.getElementById("clock").textContent = runs.every((run) => run.clock === "virtual") ? "virtual seconds" : "seconds";
}

function tiles(data) {
  const box = document.getElementById("tiles");
  box.replaceChildren();
  if (data.runs.length > 1) { box.style.display = "none"; return; }
  const t = data.runs[0].totals, arrived = t.accepted + t.stale + t.invalid;
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
  for (const [value, text] of entries) box.append(element("div", { class: "tile" }, element("b", {}, value), element("span", {}, text)));
}

function lossCard(data, redraw) {
  const axes = [["time", "time"], ["updates", "updates"]];
  if (data.runs.some((run) => run.training.tokens || run.evaluation.tokens)) axes.push(["tokens", "tokens"]);
  if (!axes.some(([name]) => name === chosen.axis)) chosen.axis = "time";
  const gap = data.runs.every((run) => run.objective === "gap"), series = [];
  data.runs.forEach((run, i) => {
    const tint = PALETTE[i % PALETTE.length], alone = data.runs.length === 1;
    if (!gap && run.training.value.length)
      series.push({ label: alone ? "training, accepted gradients" : run.label, colour: tint, x: run.training[chosen.axis] || [], y: run.training.value,
        faint: alone && run.evaluation.value.length > 0 });
    if (run.evaluation.value.length && (gap || alone))
      series.push({ label: alone ? (gap ? "f(x) − f*" : run.validation || "validation") : run.label, colour: tint, x: run.evaluation[chosen.axis] || [], y: run.evaluation.value });
  });
  const unit = chosen.axis === "time" ? "seconds" : chosen.axis;
  return card(gap ? "Objective gap" : "Loss", `against ${chosen.axis}`, lineChart(series, { wide: true, log: gap, from: 0, xLabel: unit }), {
    wide: true, id: "loss", extra: choice(axes, chosen.axis, (axis) => { chosen.axis = axis; redraw(); }),
    legend: legend(series.map((s) => [s.label, s.colour, s.faint ? "faint" : ""])),
  });
}

function overTime(data, key, title, note, options = {}) {
  const series = data.runs.map((run, i) => ({ label: run.label, colour: PALETTE[i % PALETTE.length], x: run.over_time.time, y: run.over_time[key] || [] }));
  return card(title, note, lineChart(series, { floor: 0, from: 0, ...options }), {
    legend: data.runs.length > 1 ? legend(series.map((s) => [s.label, s.colour])) : null, id: options.id });
}

function delayCard(data) {
  if (data.runs.length > 1) return overTime(data, "delay_mean", "Delay over time", "mean of the gradients that arrived", { id: "delay" });
  const run = data.runs[0], o = run.over_time, parts = run.delays.parts || {};
  const series = [["mean", "#3b7dd8"], ["p95", colour("stale")], ["max", colour("invalid")]].map(([name, tint]) => (
    { label: name, colour: tint, x: o.time, y: o["delay_" + name] || [], faint: name === "max" }));
  if (run.threshold.value.length) series.push({ label: "threshold R", colour: colour("soft"), x: run.threshold.time, y: run.threshold.value, dots: true });
  const note = parts.compute === undefined ? "" : `of a mean of ${short(parts.compute + parts.queue)}, ${short(parts.compute)} while computing, ${short(parts.queue)} in queue and wire`;
  return card("Delay over time", note, lineChart(series, { floor: 0, from: 0 }), { id: "delay", legend: legend(series.map((s) => [s.label, s.colour, s.dots ? "dots" : s.faint ? "faint" : ""])) });
}

function histogramCard(data) {
  if (data.runs.length > 1) {
    const series = data.runs.map((run, i) => {
      const d = run.delays, sums = d.low.map((_, k) => VERDICTS.reduce((sum, v) => sum + d[v][k], 0)), all = sums.reduce((a, b) => a + b, 0);
      return { label: run.label, colour: PALETTE[i % PALETTE.length], x: d.low.map((low) => low + (d.width - 1) / 2), y: sums.map((n) => n / all / d.width) };
    });
    return card("Delays", "share of the arriving gradients by delay", lineChart(series, { floor: 0, from: 0, percent: true, xLabel: "delay" }), {
      id: "histogram", legend: legend(series.map((s) => [s.label, s.colour])) });
  }
  const run = data.runs[0], d = run.delays;
  const labels = d.low.map((low) => (d.width > 1 ? `${low}–${low + d.width - 1}` : String(low)));
  const groups = VERDICTS.map((name) => ({ label: name, colour: colour(name), y: d[name] }));
  const beyond = d.beyond > d.low[d.low.length - 1] + d.width - 1 ? `; the last bar goes up to ${short(d.beyond)}` : "";
  const note = "gradients by the updates made while they were on their way" + beyond;
  return card("Delays", note, barChart(labels, groups, { xLabel: "delay", every: d.width > 1 ? 6 : 12 }), { id: "histogram", legend: legend(groups.map((g) => [g.label, g.colour])) });
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
      data.kinds.map((kind, k) => [kind, t.shares[row][k][bin]]).filter(([, s]) => s > 0).map(([kind, s]) => `${kind}: ${percent(s)}`).join("\n");
  });
  const c = t.close;
  const close = rowsChart(names, c.begin, c.end, (pen, X, high, Y) => {
    for (const [row, low, up, kind] of c.spans) {
      pen.fillStyle = tints[kind];
      pen.fillRect(X(low), Y(row), Math.max(0.6, X(up) - X(low) - 0.8), high);
    }
  }, (row, at) => {
    const span = c.spans.find(([r, low, up]) => r === row && low <= at && at <= up);
    return span ? `${names[row]}: ${data.kinds[span[3]]}\n${short(span[2] - span[1])} s` : names[row];
  });
  const colours = legend(data.kinds.map((kind, k) => [kind === "interrupted" ? "stopped early" : kind, tints[k]]));
  return [
    card("What the workers did", "each worker's time, by what became of the work", whole, { wide: true, id: "timeline", extra: pick, legend: colours.cloneNode(true) }),
    card("The last moments, closer", "one span per gradient", close, { wide: true, id: "closer", legend: colours }),
  ];
}

function workersCard(data) {
  const run = data.runs[Math.min(chosen.run, data.runs.length - 1)], table = element("table");
  const hasRows = run.workers.some((w) => w.rows); // the server has assigned rows
  const hasDevices = run.workers.some((w) => w.device);
  const names = ["worker", "share of accepted", "", "s/gradient", ...(hasRows ? ["rows"] : []), ...VERDICTS, "stopped early", "compute wasted",
    ...(hasDevices ? ["device"] : [])];
  table.append(element("thead", {}, element("tr", {}, ...names.map((name) => element("th", {}, name)))));
  const most = Math.max(...run.workers.map((w) => w.share), 1e-9), body = element("tbody");
  for (const w of run.workers) {
    const fill = element("div", { style: `width:${(100 * w.share) / most}%;background:${colour("accepted")}` });
    const spent = w.used_seconds + w.wasted_seconds;
    const cells = [w.worker, percent(w.share), element("div", { class: "stack" }, fill), short(w.tau), ...(hasRows ? [w.rows] : []), ...VERDICTS.map((v) => short(w[v], 6)),
      short(w.interrupted, 6), spent ? percent(w.wasted_seconds / spent) : "–", ...(hasDevices ? [w.device || "–"] : [])];
    body.append(element("tr", {}, ...cells.map((cell, i) => element("td", i === 2 ? { class: "bar" } : {}, cell instanceof Node ? cell : String(cell)))));
  }
  table.append(body);
  const note = (data.runs.length > 1 ? `${run.label}. ` : "") + (run.workers_omitted ? `${run.workers_omitted} more workers are not listed.` : "who contributed what");
  return card("Share of work", note, element("div", { class: "scroll" }, table), { wide: true, id: "workers" });
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
    histogramCard(data), delayCard(data), ...timelineCards(data, redraw), workersCard(data));
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
