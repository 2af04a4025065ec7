(() => {
"use strict";
const DIFFERENCE = "loss_difference", TITLES = new Map([["loss", "loss"], [DIFFERENCE, "difference of loss"], ["batch_size", "batch size"], ["accumulation", "accumulation"], ["lr", "learning rate"],
  ["grad_norm", "gradient norm"], ["noise_scale", "noise scale"], ["memory", "memory"], ["throughput", "throughput"], ["step_memory", "memory of a step"]]);
const DOUBLING = new Set(["batch_size", "accumulation", "noise_scale"]);  // logarithmic, with powers of two on the axis
const FROM_ZERO = new Set(["lr", "memory", "throughput", "step_memory"]);
const COLOURS = 9, DASHES = [[], [2, 3], [12, 4, 2, 4], [6, 3]], PLANNED = [10, 5];  // a colour for each run; dashes from the tenth run on
// What happened, by weight: the first kind is what a crowded mark shows, and "grave" ones cross every panel.
const EVENTS = {out_of_memory: ["✕", "out of memory"], checkpoint_failed: ["!", "checkpoint failed"], resume: ["↻", "resume"],
  skipped_step: ["∅", "skipped step"], stop: ["■", "stop"], start: ["▶", "start"], decided_size: ["◆", "change of size"], period: ["◇", "period"],
  checkpoint: ["▲", "checkpoint"], evaluation: ["○", "evaluation"]};
const WEIGHTS = Object.keys(EVENTS);
const MANY = 8, MOST_BUTTONS = 40;  // more runs than these have a field to find them; so many are buttons
const GRAVE = new Set(["out_of_memory", "checkpoint_failed", "resume", "skipped_step"]);

// ---- elements: text is only ever text
const SVG = "http://www.w3.org/2000/svg";
const byId = id => document.getElementById(id);
function make(tag, attributes = {}, ...children) {
  const element = ["svg", "line", "circle"].includes(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}
function swatch({colour = "currentColor", dash = [], width = 2.5, alpha = 1, dots = false}, name = "") {
  const drawn = {stroke: colour, "stroke-opacity": alpha}, line = make("line", {...drawn, x1: 0, x2: 28, y1: 5, y2: 5, "stroke-width": width, "stroke-dasharray": dash.join(" ")});
  return make("svg", {class: `swatch ${name}`, "aria-hidden": "true"}, line, ...(dots ? [make("circle", {...drawn, cx: 10, cy: 5, r: 3, fill: colours.raised, "stroke-width": 1.6})] : []));
}

// ---- data
function bytes(text) {
  const characters = atob(text), out = new Uint8Array(characters.length);
  for (let i = 0; i < out.length; i++) out[i] = characters.charCodeAt(i);
  return out.buffer;
}
function decode(value, Type) {  // base64, or {"f64": base64}
  if (value == null) return null;
  return typeof value === "string" ? new Type(bytes(value)) : new Float64Array(bytes(value.f64));
}
const readSeries = raw => ({...raw, rows: decode(raw.rows, Uint32Array), values: decode(raw.values, Float32Array),
  low: decode(raw.low, Float32Array), high: decode(raw.high, Float32Array)});
function readRun(raw) {
  const clock = {};
  for (const [unit] of AXES) if (raw.clock[unit] != null) clock[unit] = decode(raw.clock[unit], Float64Array);
  const n = Object.values(clock)[0]?.length ?? 0, series = (raw.series ?? []).map(readSeries), events = raw.events ?? [];
  return {...raw, n, clock, smooth: {}, series, events: [...events, ...changes(series, events)], shown: true};
}
function changes(series, events) {  // of the batch size, unless the run says them; a ramp of more than 100 is no list of marks
  const sizes = events.some(event => event.kind === "decided_size") ? null : series.find(s => s.name === "batch_size" && s.step && !s.planned);
  const at = [...(sizes?.values ?? []).keys()].filter(i => i && sizes.values[i] !== sizes.values[i - 1] && Number.isFinite(sizes.values[i]));
  return at.length > 100 ? [] : at.map(i => ({row: sizes.rows[i], kind: "decided_size", attempt: 1, text: `${quantity(sizes.values[i - 1])} to ${quantity(sizes.values[i])}`}));
}

function readMemory(raw, number = raw.step) {  // a step on the phantom as a run whose clock counts events, its categories one above the other
  const one = raw.steps.find(other => other.step === number), clock = {ev: decode(one.times, Float64Array)}, n = clock.ev.length;
  const rows = Uint32Array.from({length: n}, (_, i) => i);
  let low = new Float64Array(n);
  const series = one.categories.map((category, i) => {
    const own = decode(category.bytes, Float64Array), high = low.map((v, k) => v + own[k]);
    const made = {name: category.name, label: category.name, panel: "step_memory", step: true, unit: "bytes", rows, values: high, own, low, high, colour: i % COLOURS};
    low = high;
    return made;
  });
  const facts = [["peak", quantity(raw.peak_bytes, "bytes")]].concat(raw.limit_bytes == null ? [] : [["memory of the card", quantity(raw.limit_bytes, "bytes")]],
    raw.time ? [["time", raw.time.replace(/^time: /, "")]] : []);
  const top = low.reduce((best, v, i) => v > low[best] ? i : best, 0);
  return {name: raw.title, kind: "memory", n, clock, smooth: {}, series, events: (one.marks ?? []).map(mark => ({row: mark.at, kind: "mark", text: mark.text})),
    facts, limit: raw.limit_bytes, shown: true, raw, top, number, places: one.places.map(place => ({name: place.name, bytes: decode(place.bytes, Float64Array)}))};
}

// ---- rows and units: the view is kept in rows of one run, so that no switch of the axis changes it
function smooth(run, unit) {  // the clock without gaps and without steps back
  if (!run.smooth[unit]) {
    const out = Float64Array.from(run.clock[unit]);
    let last = out.find(Number.isFinite) ?? 0;
    for (let i = 0; i < out.length; i++) last = out[i] = out[i] > last ? out[i] : last;
    run.smooth[unit] = out;
  }
  return run.smooth[unit];
}
function above(values, v) {  // the first index whose value is larger
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > v) high = middle; else low = middle + 1;
  }
  return low;
}
const logarithm = v => v <= 0 ? -Infinity : Math.log2(v);
const limitOf = panel => panel.traces.find(t => t.run.limit)?.run.limit;
const inTwos = panel => panel.log && (DOUBLING.has(panel.key) || panel.unit === "bytes");
const labelOf = trace => trace.s.label || trace.s.name;
const slope = (values, n) => n > 1 && values[n - 1] > values[0] ? (values[n - 1] - values[0]) / (n - 1) : 1;
function at(run, unit, row) {  // beyond the run's ends, its mean pace
  const values = smooth(run, unit), n = values.length;
  if (row <= 0) return values[0] + row * slope(values, n);
  if (row >= n - 1) return values[n - 1] + (row - n + 1) * slope(values, n);
  const i = Math.floor(row);
  return values[i] + (row - i) * (values[i + 1] - values[i]);
}
function rowAt(run, unit, x) {
  const values = smooth(run, unit), n = values.length;
  if (x <= values[0]) return (x - values[0]) / slope(values, n);
  if (x >= values[n - 1]) return n - 1 + (x - values[n - 1]) / slope(values, n);
  const i = above(values, x) - 1;
  return i + (x - values[i]) / (values[i + 1] - values[i]);
}

// ---- ticks
function xTicks(low, high, width) {
  const unit = state.axis, zone = unit === "utc" ? -60 * new Date(low * 1000).getTimezoneOffset() : 0;
  return multiples(low, high, stepOf(low, high, width / (unit === "utc" ? 85 : 62), unit), zone);
}
function xLabels(values) {
  const step = values.length > 1 ? values[1] - values[0] : 1, unit = state.axis;
  if (unit === "dur") return values.map(v => `${(100 * v).toFixed(digits(100 * step))}%`);
  if (unit === "sec") return values.map(v => duration(v, step < 1 ? digits(step) : 0));
  if (unit !== "utc") return plain(values);
  let day = "";
  return values.map(v => {
    const date = clockTime(v, DAY), time = clockTime(v, step < 60 ? SECOND : MINUTE), text = step >= 86400 ? date : date === day ? time : `${time}\n${date}`;
    day = date;
    return text;
  });
}

function yTicks(panel, low, high, height) {  // low and high are logarithms of base two on a logarithmic panel
  const count = Math.max(2, height / (inTwos(panel) ? 22 : 32));
  if (!panel.log) {
    const factor = panel.unit === "bytes" ? (BYTES.find(([f]) => high >= f) ?? [1])[0] : 1;
    return multiples(low / factor, high / factor, stepOf(low / factor, high / factor, count)).map(v => v * factor);
  }
  if (inTwos(panel)) return multiples(low, high, Math.max(1, Math.ceil((high - low) / count)));
  const out = [];
  const tens = v => Math.min(Math.max(Math.floor(v * Math.LOG10E / Math.LOG2E), -330), 310);  // all that a double has
  for (let power = tens(low); power <= tens(high); power++)
    for (const m of [1, 2, 5]) out.push({m, v: Math.log2(m * 10 ** power)});
  const inside = out.filter(t => t.v >= low && t.v <= high), decades = inside.filter(t => t.m === 1);
  if (inside.length < 3 && high - low < 40) return multiples(2 ** low, 2 ** high, stepOf(2 ** low, 2 ** high, count)).filter(v => v > 0).map(Math.log2);
  const used = inside.length <= count + 1 ? inside : decades.filter((_, i) => i % Math.ceil(decades.length / count) === 0);
  return used.map(t => t.v);
}

function yLabels(panel, values) {
  const numbers = panel.log ? values.map(v => 2 ** v) : values;
  if (panel.unit === "bytes") return numbers.map(v => v === 0 ? "0" : quantity(v, "bytes"));
  if (!panel.log) return plain(numbers);
  return DOUBLING.has(panel.key) ? values.map(power) : numbers.map(v => v < 1e-3 ? tiny(v) : v >= 1e3 ? plain([v])[0] : trimmed(v.toPrecision(3)));
}

// ---- state
const payload = JSON.parse(byId("data").textContent);
const runs = (payload.runs ?? []).map(readRun).concat(payload.memory ? [readMemory(payload.memory)] : []);
const panels = [];
const state = {axis: "ba", zoom: null, cursor: null, chosen: new Map(), logs: new Map()};
const wanted = new Set();  // runs of the server that were asked for by name
let range = [0, 1], colours = {}, names = payload.names ?? [], fresh = [];

const shown = () => runs.filter(run => run.shown && run.n);
const colourOf = run => runs.indexOf(run) % COLOURS;
const dashOf = run => DASHES[Math.floor(runs.indexOf(run) / COLOURS) % DASHES.length];
function styleOf({run, s, order}) {  // of one run, each series has a colour; of several, each run, and its second series is nearer to the ink
  const isOne = runs.length === 1, colour = colours[`c${s.colour ?? (isOne ? order : colourOf(run)) % COLOURS}${order && !isOne ? "+" : ""}`];
  if (s.planned) return {colour, dash: PLANNED, width: 4.5, alpha: 0.45};
  return {colour, dash: s.own ? [] : dashOf(run), width: s.own ? 1 : order ? 2.1 : 1.5, dots: order > 0 && !s.step};
}
const named = name => runs.find(run => run.name === name);
const reference = () => shown().find(run => run.clock[state.axis]);
function xOf(run, row) {  // through batches, if the run has no such unit
  if (run.clock[state.axis]) return at(run, state.axis, row);
  const other = reference();
  return other ? at(other, state.axis, rowAt(other, "ba", at(run, "ba", row))) : 0;
}

function wholeRange() {
  let low = Infinity, high = -Infinity;
  for (const run of shown()) if (run.clock[state.axis]) {
    const values = smooth(run, state.axis);
    low = Math.min(low, values[0]);
    high = Math.max(high, values[run.n - 1]);
  }
  if (state.axis !== "utc" && low > 0 && low < high / 10) low = 0;
  return low <= high ? [low, high] : [0, 1];
}

function viewRange() {
  const run = state.zoom && named(state.zoom.run);
  const [low, high] = run ? [xOf(run, state.zoom.from), xOf(run, state.zoom.to)] : wholeRange();
  if (high > low) return [low, high];
  const room = Math.max(Math.abs(low) * 1e-9, ["ba", "sp", "tok", "ev"].includes(state.axis) ? 1 : 1e-3);
  return [low - room, low + room];
}
function zoomTo(low, high) {
  const [first, last] = wholeRange(), run = reference(), least = (last - first) * 1e-7;
  low = Math.max(low, first);
  high = Math.min(high, last);
  if (!run || !(high - low > least)) return;
  look(low <= first && high >= last ? null : {run: run.name, from: rowAt(run, state.axis, low), to: rowAt(run, state.axis, high)});
}
const zoomBy = (factor, centre = (range[0] + range[1]) / 2) => zoomTo(centre - (centre - range[0]) * factor, centre + (range[1] - centre) * factor);
function pan(share) {
  const [first, last] = wholeRange(), width = range[1] - range[0];
  const low = Math.min(Math.max(range[0] + share * width, first), Math.max(first, last - width));
  if (state.zoom) zoomTo(low, low + width);
}
function look(zoom) {
  state.zoom = zoom;
  remember();
  schedule();
}
function renew(draw) {  // after a change of the axis, of the rows or of what is shown
  for (const panel of panels) panel.placed = false;
  draw();
}
function setAxis(unit) {
  state.axis = unit;
  for (const input of byId("axis").querySelectorAll("input")) input.checked = input.value === unit;
  remember();
  renew(render);
}
function remember() {  // in the address, so that a reload and a copied address show the same view
  const {zoom} = state, parts = new URLSearchParams({axis: state.axis});
  if (zoom) parts.set("rows", `${runs.indexOf(named(zoom.run))},${zoom.from},${zoom.to}`);
  if (state.theme) parts.set("theme", state.theme);
  if (state.base) parts.set("minus", state.base);
  for (const name of wanted) parts.append("also", name);
  try { history.replaceState(null, "", `#${parts}`); } catch { /* a frame without an address */ }
}
function recall(offered) {
  const parts = new URLSearchParams(location.hash.slice(1)), [index, from, to] = (parts.get("rows") ?? "").split(",").map(Number);
  if (offered.includes(parts.get("axis"))) state.axis = parts.get("axis");
  if (runs[index] && to > from) state.zoom = {run: runs[index].name, from, to};
  state.base = parts.get("minus");
  parts.getAll("also").forEach(want);
  if (["light", "dark"].includes(parts.get("theme"))) state.theme = parts.get("theme");
}

// ---- points of a panel on the current axis
function lastRow(run) {  // of what the run has done: a plan's rows may lie beyond
  const rows = [...run.events.map(event => event.row), ...run.series.map(s => s.planned ? 0 : s.rows.at(-1) ?? 0)];
  return rows.reduce((a, b) => Math.max(a, b), 0);
}
function pointsOf(run, s) {
  const clock = run.clock[state.axis], room = s.rows.length + 1, x = new Float64Array(room), index = new Int32Array(room);
  let n = 0, last = -Infinity;
  const add = (row, i) => {
    if (!Number.isFinite(clock[row])) return;
    x[n] = last = Math.max(last, clock[row]);  // uneven clocks (a corrected wall clock) never run back
    index[n++] = i;
  };
  if (clock) for (let i = 0; i < s.rows.length; i++) add(s.rows[i], i);
  if (clock && s.step && n) {  // the last value holds to the end: of the plan, or of what the run has done
    let end = s.planned || run.kind !== "run" ? run.n - 1 : lastRow(run);
    while (end > 0 && !Number.isFinite(clock[end])) end--;
    if (clock[end] > last) add(end, s.rows.length - 1);
  }
  return {x: x.subarray(0, n), index: index.subarray(0, n)};
}

function between({s, x, index}, at) {  // the value on the line between two points; none beyond its ends
  const i = above(x, at) - 1, here = s.values[index[i]];
  if (i < 0 || x[i] === at) return here ?? NaN;
  return i + 1 < x.length ? here + (at - x[i]) / (x[i + 1] - x[i]) * (s.values[index[i + 1]] - here) : NaN;
}
const lossesOf = run => run.series.filter(s => s.panel === "loss" && !s.planned);
function differences(base) {  // of each loss from that of the same name, at the points of the first, on the axis of now
  const theirs = new Map(lossesOf(base).map(s => [s.name, {s, ...pointsOf(base, s)}]));
  return shown().filter(run => run !== base).flatMap(run => lossesOf(run).filter(s => theirs.has(s.name)).map((s, order) => {
    const {x, index} = pointsOf(run, s), values = Float64Array.from(x, (at, i) => s.values[index[i]] - between(theirs.get(s.name), at));
    return {run, s: {...s, values, low: null, high: null}, x, index: Int32Array.from(x.keys()), order};
  }));
}

function place(panel) {
  panel.traces = panel.key === DIFFERENCE ? differences(named(state.base)) : shown().flatMap(run => {
    const all = run.series.filter(s => s.panel === panel.key).sort((a, b) => Boolean(b.planned) - Boolean(a.planned)), own = s => s.name.replace(/^planned\//, "");
    const names = [...new Set([...all.filter(s => !s.planned), ...all].map(own))];
    return all.map(s => ({run, s, ...pointsOf(run, s), order: s.own ? 0 : names.indexOf(own(s))}));
  });
  panel.unit = panel.traces.find(t => t.s.unit)?.s.unit ?? "";
  panel.wide = panel.key === "loss" && spans(panel.traces.map(t => t.s.values));
  panel.placed = true;
}
function spans(series) {  // a decade, all above zero
  const ends = (values, best) => values.reduce((a, v) => Number.isFinite(v) ? best(a, v) : a, best());
  const low = Math.min(...series.map(values => ends(values, Math.min))), high = Math.max(...series.map(values => ends(values, Math.max)));
  return low > 0 && high >= 10 * low && high < Infinity;
}
function visible(trace) {  // indices of the points in view; of a step also the one that holds at its start
  const first = above(trace.x, range[0] - (range[1] - range[0]) * 1e-12), last = above(trace.x, range[1]) - 1;
  if (trace.s.step || first > last) return [Math.max(0, first - 1), Math.max(last, Math.min(first, trace.x.length - 1))];
  return [first, last];
}

function extent(panel) {
  const f = panel.log ? logarithm : v => v;
  let low = Infinity, high = -Infinity, least = Infinity, most = -Infinity;
  for (const t of panel.traces) {
    const [first, last] = t.x.length ? visible(t) : [0, -1];
    for (let i = first; i <= last; i++) {
      const k = t.index[i], v = f(t.s.values[k]);
      if (!Number.isFinite(v)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
      if (!t.s.low) continue;
      if (f(t.s.low[k]) < least) least = f(t.s.low[k]);
      if (f(t.s.high[k]) > most) most = f(t.s.high[k]);
    }
  }
  if (low > high) return panel.log ? [0, 3] : [0, 1];
  const span = Math.max(high - low, panel.log ? 1 : 0);  // a wide interval may not flatten the line
  if (least < low) low = Math.max(least, low - span);
  if (most > high) high = Math.min(most, high + span);
  const limit = limitOf(panel);
  if (limit && limit < 4 * high) high = Math.max(high, limit);
  if (!panel.log && FROM_ZERO.has(panel.key) && low > 0) low = 0;
  let room = (high - low) * 0.06;
  if (!(room > 0)) room = panel.log ? 0.5 : Math.abs(high) * 0.1 || 0.5;
  if (panel.log && high - low < 1) room = (1.2 - (high - low)) / 2;
  return [!panel.log && low === 0 ? 0 : low - room, high + room];
}

// ---- drawing, in CSS pixels
const finiteAt = (t, values, Y) => i => Number.isFinite(Y(values[t.index[i]]));
function stretches(from, to, good, cut = () => false) {  // [first, last] of the points between gaps
  const out = [];
  for (let i = from; i <= to; i++) if (good(i)) {
    if (out.at(-1)?.[1] === i - 1 && !cut(i)) out.at(-1)[1] = i; else out.push([i, i]);
  }
  return out;
}
function corners(t, first, last, values, X, Y) {
  const out = [];
  for (let i = first; i <= last; i++) {
    if (t.s.step && i > first) out.push([X(t.x[i]), Y(values[t.index[i - 1]])]);
    out.push([X(t.x[i]), Y(values[t.index[i]])]);
  }
  return out;
}
function trail(points) {
  const shape = new Path2D();
  points.forEach(([x, y], i) => i ? shape.lineTo(x, y) : shape.moveTo(x, y));
  return shape;
}
function stroke(ctx, shape, colour, width, dash = [], alpha = 1) {
  Object.assign(ctx, {strokeStyle: colour, lineWidth: width, globalAlpha: alpha});
  ctx.setLineDash(dash);
  ctx.stroke(shape);
  ctx.setLineDash([]);
  ctx.globalAlpha = 1;
}
function write(ctx, text, x, y, colour, weight = 400) {  // with a rim, so that it can be read on any stack
  Object.assign(ctx, {fillStyle: colour, strokeStyle: colours.raised, lineWidth: 4, font: `${weight} 12px system-ui, sans-serif`, textAlign: "left", textBaseline: "alphabetic"});
  ctx.strokeText(text, x, y);
  ctx.fillText(text, x, y);
}

function paint(panel, u) {
  const {ctx} = u, scale = devicePixelRatio, [low, high] = panel.y, f = panel.log ? logarithm : v => v;
  const box = {left: u.bbox.left / scale, top: u.bbox.top / scale, width: u.bbox.width / scale, height: u.bbox.height / scale};
  const X = x => box.left + (x - range[0]) / (range[1] - range[0]) * box.width;
  const Y = v => box.top + (high - f(v)) / (high - low) * box.height;
  ctx.save();
  ctx.scale(scale, scale);
  ctx.beginPath();
  ctx.rect(box.left - 4, box.top - 1, box.width + 8, box.height + 2);
  ctx.clip();
  ctx.lineJoin = "round";
  for (const t of panel.traces) if (t.x.length) paintTrace(ctx, t, box, X, Y);
  paintEvents(ctx, box, X);
  if (panel.key === DIFFERENCE) stroke(ctx, trail([[box.left, Y(0)], [box.left + box.width, Y(0)]]), colours.soft, 1, [3, 3]);
  const limit = limitOf(panel), y = limit && Y(limit);
  if (y >= box.top) stroke(ctx, trail([[box.left, y], [box.left + box.width, y]]), colours.warn, 2, [8, 4]);
  if (limit) write(ctx, `${y < box.top ? "↑ " : ""}${quantity(limit, "bytes")} on the card`, box.left + 8, Math.max(y, box.top) + 15, colours.warn, 600);
  ctx.restore();
}

function paintTrace(ctx, t, box, X, Y) {
  const {s} = t, [first, last] = visible(t), from = Math.max(0, first - 1), to = Math.min(t.x.length - 1, last + 1);
  const {colour, dash, width, alpha = 1, dots: dotted} = styleOf(t), good = finiteAt(t, s.values, Y);
  ctx.fillStyle = colour;
  ctx.globalAlpha = s.own ? 0.55 : 0.18;
  // An end that the axis does not hold, such as zero on a logarithmic one, lies at its edge.
  const edge = v => Math.min(Math.max(Y(v), box.top - 9), box.top + box.height + 9);
  const isBand = s.low ? i => finiteAt(t, s.low, edge)(i) && finiteAt(t, s.high, edge)(i) : () => false;
  for (const [a, b] of stretches(from, to, isBand)) ctx.fill(trail([...corners(t, a, b, s.high, X, edge), ...corners(t, a, b, s.low, X, edge).reverse()]));
  ctx.globalAlpha = 1;
  // On the time of day, a run that was away has a gap.
  const away = state.axis === "utc" && !s.step ? t.run.events.filter(event => event.kind === "resume").map(event => event.row) : [];
  const parts = stretches(from, to, good, i => away.some(row => s.rows[t.index[i - 1]] <= row && s.rows[t.index[i]] > row));
  const line = new Path2D(), dots = new Path2D(), few = dotted && last - first < box.width / 14, r = dotted ? 2.6 : 2.2;
  for (const [a, b] of parts) {
    line.addPath(trail(corners(t, a, b, s.values, X, Y)));
    if (few || a === b) for (let i = a; i <= b; i++) {
      const x = X(t.x[i]), y = Y(s.values[t.index[i]]);
      dots.moveTo(x + r, y);
      dots.arc(x, y, r, 0, 7);
    }
  }
  stroke(ctx, line, colour, width, dash, alpha);
  ctx.fillStyle = dotted ? colours.raised : colour;
  ctx.fill(dots);
  if (dotted) stroke(ctx, dots, colour, 1.4);
}

function paintEvents(ctx, box, X) {
  const bottom = box.top + box.height, ends = [];  // where the last text of each line of texts ends
  for (const run of shown()) for (const event of [...run.events].sort((p, q) => p.row - q.row)) {
    const x = X(run.clock[state.axis]?.[event.row]), mark = event.kind === "mark", grave = mark || GRAVE.has(event.kind);
    if (!(x >= box.left && x <= box.left + box.width)) continue;
    const colour = event.kind === "out_of_memory" ? colours.warn : mark ? colours.soft : colours[`c${colourOf(run)}`];
    const dash = !grave ? [] : event.kind === "resume" ? [2, 3] : [5, 3];
    stroke(ctx, trail([[x, grave ? box.top : bottom - 5], [x, bottom]]), colour, 1.1, dash, grave ? 0.9 : 0.6);
    if (!mark) continue;
    ctx.font = "400 12px system-ui, sans-serif";
    const width = ctx.measureText(event.text).width, left = x + 5 + width > box.left + box.width ? x - 5 - width : x + 5;
    let line = ends.findIndex(end => end + 6 < left);
    if (line < 0) line = ends.length;
    ends[line] = left + width;
    write(ctx, event.text, left, bottom - 8 - 16 * line, colours.ink);
  }
}

// ---- panels
const isLog = panel => state.logs.get(panel.key) ?? (DOUBLING.has(panel.key) || panel.wide);
function newPanel(key) {
  const panel = {key, log: false, wide: false, placed: false, traces: [], y: [0, 1], unit: ""};
  const title = key === "step_memory" ? runs.find(run => run.kind === "memory").name : TITLES.get(key) ?? key;
  panel.values = make("div", {class: "values"});
  panel.small = make("small");
  panel.button = make("button", {type: "button", title: "logarithmic axis", click: () => {
    state.logs.set(key, !isLog(panel));  // `render` changes the panel, together with what it shows
    schedule();
  }}, "log");
  panel.lanes = make("div", {class: "lanes"});
  panel.plot = make("div", {class: "plot"});
  panel.root = make("section", {class: "panel", tabindex: 0, role: "group", "aria-label": `${title}: Shift with arrow keys moves the cursor`, keydown: event => press(panel, event)},
    make("div", {class: "top"}, make("h2", {}, title, " ", panel.small), ...(key === "step_memory" ? [] : [panel.button]), panel.values), panel.lanes, panel.plot);
  return panel;
}

const heightOf = panel => panel.root.classList.contains("wide") ? (innerWidth < 600 ? 230 : 290) : 180;

function mount(panel) {
  const font = "12px system-ui, sans-serif", ink = () => colours.soft, grid = {stroke: () => colours.grid, width: 1};
  const u = panel.u = new uPlot({
    width: Math.max(80, panel.plot.clientWidth), height: heightOf(panel), pxAlign: 0, legend: {show: false}, padding: [6, 20, 0, 0],
    // Runs have clocks of their own, uPlot has one for all series: it keeps scales, axes, cursor and selection, and `paint` draws.
    scales: {x: {time: false, range: () => range}, y: {range: () => panel.y}},
    series: [{}, {paths: () => null, points: {show: false}}],
    axes: [{stroke: ink, font, grid, ticks: {show: false}, size: () => state.axis === "utc" ? 42 : 26, gap: 6, splits: (u, _, low, high) => xTicks(low, high, u.over.clientWidth || u.width), values: (u, v) => xLabels(v).map((text, i) => u.valToPos(v[i], "x") + 3.8 * text.split("\n")[0].length < u.over.clientWidth + 20 ? text : "")},
      {stroke: ink, font, grid, ticks: {show: false}, size: (_, texts) => Math.max(56, ...(texts ?? []).map(text => 12 + 7 * text.length)), gap: 6, splits: (_, __, low, high) => yTicks(panel, low, high, heightOf(panel) - 40), values: (_, v) => yLabels(panel, v)}],
    cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false}, bind: {dblclick: () => () => look(null)}},
    hooks: {draw: [u => paint(panel, u)], setCursor: [u => moveCursor(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null, panel)],
      setSelect: [u => {
        const {left, width} = u.select;
        if (width >= 4) zoomTo(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
        u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
      }]},
  }, [[0, 1], [null, null]], panel.plot);
  touch(u);
  new ResizeObserver(() => {
    const width = Math.max(80, panel.plot.clientWidth);
    if (width !== u.width || u.height !== heightOf(panel)) { u.setSize({width, height: heightOf(panel)}); schedule(); }
  }).observe(panel.plot);
}

function touch(u) {  // two fingers zoom, one moves the cursor; the wheel zooms with Ctrl, as a trackpad's pinch does
  const fingers = new Map(), places = () => [...fingers.values()].sort((p, q) => p - q).map(x => u.posToVal(x, "x"));
  let held = [];
  const on = (names, handle) => names.forEach(name => u.over.addEventListener(name, event => { if (event.pointerType !== "mouse") handle(event); }));
  on(["pointerdown"], event => { fingers.set(event.pointerId, event.offsetX); held = places(); });
  on(["pointerup", "pointercancel"], event => { fingers.delete(event.pointerId); held = places(); });
  on(["pointermove"], event => {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, event.offsetX);
    const [a, b] = places();
    if (b === undefined) return moveCursor(a, null);
    const pace = (held[1] - held[0]) / Math.max(b - a, (range[1] - range[0]) / 50), low = held[0] - (a - range[0]) * pace;
    zoomTo(low, low + (range[1] - range[0]) * pace);
  });
  u.over.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomBy(Math.exp(event.deltaY / 200), u.posToVal(event.offsetX, "x"));
  }, {passive: false});
}

function keysOfPanels() {
  const keys = new Set(runs.flatMap(run => run.series.map(s => s.panel)).concat(named(state.base) && runs.length > 1 ? [DIFFERENCE] : []));
  return [...TITLES.keys()].filter(key => keys.has(key)).concat([...keys].filter(key => !TITLES.has(key)).sort());
}

function layPanels() {
  const keys = keysOfPanels().filter(key => state.chosen.get(key) ?? TITLES.has(key)), place = byId("panels");
  for (const panel of panels.filter(p => !keys.includes(p.key))) { panel.u.destroy(); panel.root.remove(); }
  const kept = new Map(panels.map(p => [p.key, p]));
  panels.length = 0;
  keys.forEach((key, i) => {
    const known = kept.get(key), panel = known ?? newPanel(key);
    panel.root.classList.toggle("wide", i === 0);
    if (place.children[i] !== panel.root) place.insertBefore(panel.root, place.children[i] ?? null);
    panels.push(panel);
    if (!known) mount(panel);
  });
}

let waiting = false;
function schedule() {
  if (!waiting) requestAnimationFrame(() => { waiting = false; render(); });
  waiting = true;
}

function render() {
  range = viewRange();
  byId("whole").disabled = !state.zoom;
  panels.forEach((panel, i) => {
    if (!panel.placed) place(panel);
    panel.log = isLog(panel);
    panel.button.setAttribute("aria-pressed", String(panel.log));
    panel.y = extent(panel);
    panel.small.textContent = panel.key === DIFFERENCE ? `from ${state.base}` : panel.unit === "bytes" ? "" : panel.unit;
    panel.u.setScale("x", {min: range[0], max: range[1]});
    panel.u.redraw(false, true);
    panel.lanes.hidden = i !== 0;
    if (i === 0) layLanes(panel);
  });
  layKey();
  showCursor();
}

// ---- events
function layLanes(panel) {
  const kept = document.activeElement?.closest?.(".lane button")?.dataset.at;
  panel.lanes.replaceChildren();
  tip();
  const {u} = panel, width = u.over.clientWidth || u.width - 70, offset = u.over.offsetLeft || 56;
  for (const run of shown().filter(run => run.kind !== "memory")) {
    const marks = run.events.map(event => ({event, x: run.clock[state.axis]?.[event.row]}))
      .filter(({x}) => x >= range[0] && x <= range[1]).map(m => ({...m, px: (m.x - range[0]) / (range[1] - range[0]) * width})).sort((a, b) => a.px - b.px);
    if (!marks.length) continue;
    const groups = [];
    for (const mark of marks) {
      if (groups.length && mark.px - groups.at(-1)[0].px < 11) groups.at(-1).push(mark); else groups.push([mark]);
    }
    const lane = make("div", {class: `lane c${colourOf(run)}`, role: "toolbar", "aria-label": `events of ${run.name}; arrow keys move`});
    lane.append(...groups.map((group, i) => markOf(run, group, i === 0, offset)));
    panel.lanes.append(lane);
  }
  if (kept) panel.lanes.querySelector(`[data-at="${CSS.escape(kept)}"]`)?.focus();
}

function markOf(run, group, first, offset) {
  const kinds = group.map(m => m.event.kind), kind = WEIGHTS.find(k => kinds.includes(k)) ?? kinds[0];
  const main = group.find(m => m.event.kind === kind), text = describe(group.map(m => m.event));
  const show = () => { moveCursor(main.x, null); tip(text, button.getBoundingClientRect()); };
  const button = make("button", {type: "button", tabindex: first ? 0 : -1, class: GRAVE.has(kind) ? "grave" : "", "aria-label": text, "data-at": `${run.name}:${main.event.row}`,
    focus: show, mouseenter: show, blur: () => tip(), mouseleave: () => tip(), click: show,
    keydown: event => {
      const next = {ArrowLeft: button.previousElementSibling, ArrowRight: button.nextElementSibling}[event.key];
      if (["ArrowLeft", "ArrowRight"].includes(event.key)) { event.preventDefault(); event.stopPropagation(); }
      if (!next) return;
      button.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }}, EVENTS[kind]?.[0] ?? "•");
  button.style.left = `${offset + main.px}px`;
  return button;
}

function describe(events) {
  const sorted = [...events].sort((a, b) => WEIGHTS.indexOf(a.kind) - WEIGHTS.indexOf(b.kind)), lines = sorted.slice(0, 6).map(event => {
    const kind = EVENTS[event.kind]?.[1] ?? (event.kind === "mark" ? "" : event.kind);
    const attempt = event.attempt > 1 ? ` (attempt ${event.attempt})` : "";
    return event.text && kind && !event.text.startsWith(kind) ? `${kind}${attempt}: ${event.text}` : `${event.text || kind}${attempt}`;
  });
  if (events.length > 6) lines.push(`and ${events.length - 6} more`);
  return lines.join("\n");
}
function tip(text = "", box = null) {
  const element = byId("tip");
  element.hidden = !text;
  element.textContent = text;
  if (!text) return;
  const {width, height} = element.getBoundingClientRect(), left = Math.min(Math.max(6, box.left + box.width / 2 - width / 2), innerWidth - width - 6);
  element.style.left = `${left}px`;
  element.style.top = `${box.top - height - 8 > 0 ? box.top - height - 8 : box.bottom + 8}px`;
}

// ---- cursor
function moveCursor(x, source) {
  const run = reference();
  state.cursor = x == null || !run ? null : {run: run.name, row: rowAt(run, state.axis, x)};
  showCursor(source);
}

function showCursor(source = null) {
  const run = state.cursor && named(state.cursor.run), x = cursorX();
  for (const panel of panels) {
    const left = x == null || x < range[0] || x > range[1] ? -10 : (x - range[0]) / (range[1] - range[0]) * panel.u.over.clientWidth;
    if (panel !== source) panel.u.setCursor({left, top: 0}, false);
    panel.values.replaceChildren(...readouts(panel, x));
  }
  if (payload.kind === "memory") layLargest(x, panels[0].small);
  byId("reading").textContent = run ? AXES.filter(([unit]) => run.clock[unit]).map(([unit]) => reading(unit, at(run, unit, state.cursor.row))).filter(Boolean).join("  ·  ") : "";
  if (!source) return;
  const near = x == null ? [] : nearEvents(x, 4 * (range[1] - range[0]) / source.u.over.clientWidth);
  const box = source.u.over.getBoundingClientRect();
  tip(near.length ? describe(near) : "", {left: box.left + source.u.cursor.left, width: 0, top: box.top, bottom: box.top});
}

function layLargest(x, small) {  // what no parameter, gradient or optimizer owns, by the line or module that allocated it
  const run = runs[0], i = x == null ? run.top : Math.max(0, above(run.clock.ev, x) - 1), when = x == null ? "at the peak" : `at event ${Math.round(run.clock.ev[i])}`;
  small.textContent = when;
  const most = Math.max(...run.places.map(place => place.bytes[i]), 1);
  const rows = run.places.filter(place => place.bytes[i] > 0).sort((p, q) => q.bytes[i] - p.bytes[i]);
  byId("stages").replaceChildren(...(rows.length ? [make("h2", {}, `Largest ${when}`)] : []), ...rows.map(place => {
    const bar = make("span", {class: "length"});
    bar.style.width = `${100 * place.bytes[i] / most}%`;
    return make("div", {class: "largest"}, make("span", {}, place.name), make("b", {}, quantity(place.bytes[i], "bytes")), bar);
  }));
}

function laySteps() {  // a slider over the steps of the report
  const [run] = runs, steps = run.raw.steps;
  if (steps.length < 2) return [];
  const said = make("output", {}, `${run.number} (peak)`);
  const slider = make("input", {type: "range", min: 0, max: steps.length - 1, value: steps.findIndex(one => one.step === run.number), "aria-label": "step", input: () => {
    const {step} = steps[Number(slider.value)];
    Object.assign(run, readMemory(run.raw, step));
    said.textContent = step === run.raw.step ? `${step} (peak)` : String(step);
    Object.assign(state, {cursor: null, zoom: null});
    renew(schedule);
  }});
  return [make("label", {class: "steps"}, "step", slider, said)];
}

const nearEvents = (x, reach) => shown().flatMap(run => run.events.filter(event => Math.abs((run.clock[state.axis]?.[event.row] ?? NaN) - x) <= reach));
function valueAt(trace, x) {  // of a step what holds, else the nearest point; without a cursor the last point in view
  if (!trace.x.length) return null;
  let i = above(trace.x, (x ?? range[1]) + (range[1] - range[0]) * 1e-9) - 1;
  if (!trace.s.step && x != null && i + 1 < trace.x.length && (i < 0 || trace.x[i + 1] - x < x - trace.x[i])) i++;
  if (i < 0) return null;
  const k = trace.index[i];
  return {v: (trace.s.own ?? trace.s.values)[k], low: trace.s.own ? null : trace.s.low?.[k], high: trace.s.high?.[k], x: trace.x[i]};
}
function wordsOf(trace, x) {
  const found = valueAt(trace, x);
  if (!found) return null;
  const interval = Number.isFinite(found.low) ? ` (${quantity(found.low)} to ${quantity(found.high)})` : "";
  return quantity(found.v, trace.s.unit === "bytes" ? "bytes" : "") + interval;
}

function readouts(panel, x) {
  return shown().flatMap(run => {
    if (x == null && run.kind === "memory") x = run.clock.ev[run.top];
    const own = panel.traces.filter(t => t.run === run && wordsOf(t, x) != null && !(t.s.planned && shown().length > 3));
    const isPair = own.length === 2 && own[0].s.planned && !own[1].s.planned, nameOf = t => isPair ? t.s.planned ? "planned" : "measured" : labelOf(t);
    const parts = own.map(t => make("span", {}, swatch(t.s.own ? {...styleOf(t), width: 8} : styleOf(t)), own.length > 1 ? `${nameOf(t)} ` : "", make("b", {}, wordsOf(t, x))));
    return parts.length ? [make("span", {title: run.name}, ...parts)] : [];
  });
}

function press(panel, event) {
  if (event.target !== panel.root || event.ctrlKey || event.metaKey || event.altKey) return;
  const forward = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1}[event.key];
  if (event.shiftKey && forward) stride(panel, forward);
  else if (event.shiftKey && event.key === "Home") stride(panel, 1, -Infinity);
  else if (event.shiftKey && event.key === "End") stride(panel, -1, Infinity);
  else if (["ArrowRight", "ArrowLeft"].includes(event.key) && state.zoom) pan(forward * 0.2);
  else if (event.key === "+" || event.key === "=") zoomBy(0.6, cursorX() ?? undefined);
  else if (event.key === "-") zoomBy(1 / 0.6, cursorX() ?? undefined);
  else if (event.key === "0") look(null);
  else return;
  event.preventDefault();
}

const cursorX = () => state.cursor && named(state.cursor.run) ? xOf(named(state.cursor.run), state.cursor.row) : null;

function stride(panel, forward, from = cursorX() ?? (forward > 0 ? -Infinity : Infinity)) {  // to the next point of this panel that is some pixels away
  const least = 3 * (range[1] - range[0]) / panel.u.over.clientWidth;
  let next = null;
  for (const t of panel.traces) for (const x of t.x) {
    if (x < range[0] || x > range[1] || (x - from) * forward < least) continue;
    if (next == null || (next - x) * forward > 0) next = x;
  }
  if (next == null) return;
  moveCursor(next, null);
  const values = panel.traces.map(t => [shown().length > 1 ? `${t.run.name}:` : "", labelOf(t), wordsOf(t, next) ?? "no value"].filter(Boolean).join(" "));
  const near = nearEvents(next, least / 2);
  byId("spoken").textContent = [reading(state.axis, next), ...values, near.length ? describe(near) : ""].filter(Boolean).join("; ");
}

// ---- head, legend, tables, chooser
function layAxis() {
  const offered = AXES.filter(([unit]) => runs.some(run => run.clock[unit])).map(([unit]) => unit), place = byId("axis");
  if (place.dataset.units === offered.join()) return offered;
  place.dataset.units = offered.join();
  place.hidden = offered.length < 2;
  if (!offered.includes(state.axis)) state.axis = offered[0] ?? "ba";
  for (const label of place.querySelectorAll("label")) label.remove();
  for (const [unit, name] of AXES) if (offered.includes(unit))
    place.append(make("label", {}, make("input", {type: "radio", name: "axis", value: unit, change: () => setAxis(unit)}), name));
  return offered;
}

function layLegend() {
  if (payload.kind === "memory") return byId("legend").replaceChildren(...laySteps());
  const search = byId("search"), compare = byId("compare"), held = document.activeElement?.dataset?.run, all = [...new Set([...runs.map(run => run.name), ...names])];
  search.hidden = all.length <= MANY;
  const found = all.filter(name => name.toLowerCase().includes(search.value.toLowerCase())), more = found.length - MOST_BUTTONS;
  const buttons = found.slice(0, MOST_BUTTONS).map(name => {
    const run = named(name);
    return make("button", {type: "button", "data-run": name, "aria-pressed": String(Boolean(run?.shown)), title: run ? "press to hide or show" : "press to read it", click: () => {
      if (run) run.shown = !run.shown; else want(name);
      layLegend();
      renew(schedule);
    }}, ...(run && runs.length > 1 ? [swatch({dash: dashOf(run)}, `c${colourOf(run)}`)] : []), name, ...(run?.kind === "plan" ? [make("small", {}, "plan")] : []));
  });
  byId("legend").replaceChildren(...(all.length ? buttons : [make("small", {}, "no runs yet")]), ...(more > 0 ? [make("small", {}, `and ${more} more: find them by name`)] : []));
  if (held !== undefined) buttons.find(button => button.dataset.run === held)?.focus();
  const losses = runs.filter(run => lossesOf(run).length), choice = compare.querySelector("select");
  compare.hidden = losses.length < 2;
  if (choice.options.length !== losses.length + 1) choice.replaceChildren(make("option", {value: ""}, "no run"), ...losses.map(run => make("option", {value: run.name}, run.name)));
  choice.value = named(state.base) ? state.base : "";
}
function want(name) {  // a run that the server has not sent: the next answer has it
  wanted.add(name);
  fresh.push(name);
}

function layKey() {  // what lines and marks mean, of those that are shown
  const all = shown().flatMap(run => run.series), item = (sign, text) => make("span", {}, sign, text), colour = colours.soft;
  const events = shown().filter(run => run.kind !== "memory").flatMap(run => run.events.map(event => event.kind)), kinds = WEIGHTS.filter(kind => events.includes(kind));
  byId("key").replaceChildren(...(all.some(s => s.planned) ? [item(swatch({colour}), "measured"), item(swatch({colour, dash: PLANNED, width: 4.5, alpha: 0.6}), "planned")] : []),
    ...(runs.length > 1 && all.some(s => /\/loss$/.test(s.name)) ? [item(swatch({colour: colours.ink, dots: true}), "validation")] : []),
    ...kinds.reverse().map(kind => item(make("b", {}, EVENTS[kind][0]), EVENTS[kind][1])));
}

function table(columns, rows, numbers) {
  const cells = (tag, row) => row.map((text, i) => make(tag, {class: numbers?.[i] ? "number" : null}, String(text)));
  return make("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "table"}, make("table", {}, make("thead", {}, make("tr", {}, ...cells("th", columns))),
    make("tbody", {}, ...rows.map(row => make("tr", {}, ...cells("td", row))))));
}

function layText() {
  const described = runs.filter(run => run.facts?.length || run.settings?.length), heads = ["", ...described.map(run => run.name)];
  const rowsOf = kind => {
    const all = described.map(run => new Map(run[kind] ?? []));
    return [...new Set(all.flatMap(one => [...one.keys()]))].map(name => [name, ...all.map(one => one.size ? String(one.get(name) ?? "–") : "")]);
  };
  const isSame = ([, ...texts]) => new Set(texts.filter(Boolean)).size < 2;  // a run without a run file differs in no setting
  const rows = rowsOf("facts"), said = new Set(rows.map(([name]) => name)), settings = rowsOf("settings");
  const differ = [...rows, ...settings.filter(([name]) => !said.has(name.replaceAll("_", " ")))].filter(row => !isSame(row));
  byId("facts").replaceChildren(make("dl", {}, ...rows.filter(isSame).map(([name, ...texts]) => [name, texts.find(Boolean)])
    .map(([name, text]) => make("div", {class: text.length > 60 ? "long" : null}, make("dt", {}, name), make("dd", {}, text)))),
  ...(differ.length ? [make("h2", {}, "Settings that differ"), table(heads, differ)] : []));
  byId("settings").replaceChildren(...(settings.length ? [make("details", {}, make("summary", {}, "All settings"), table(heads, settings))] : []));
  const staged = runs.filter(run => run.stages?.rows?.length);
  if (payload.kind !== "memory") byId("stages").replaceChildren(...(staged.length ? [make("h2", {}, "Stages")] : []), ...staged.flatMap(run => {
    const numbers = run.stages.columns.map((_, i) => run.stages.rows.every(row => /^[-–\d]/.test(row[i])));
    return [make("h3", {}, run.name), table(run.stages.columns, run.stages.rows, numbers)];
  }));
  byId("problems").replaceChildren(...runs.filter(run => run.problem).map(run =>
    make("section", {class: "panel", "aria-label": `${run.name} cannot be read`}, make("h2", {}, run.name), make("p", {}, `cannot be read: ${run.problem}`))));
  document.title = `${runs.map(run => run.name).join(", ").slice(0, 80)} – stretto`;
}

function layChooser() {
  const keys = keysOfPanels(), menu = byId("chooser").querySelector(".menu");
  if (menu.dataset.keys === JSON.stringify(keys)) return;
  menu.dataset.keys = JSON.stringify(keys);
  const labels = keys.map(key => make("label", {}, make("input", {type: "checkbox", checked: state.chosen.get(key) ?? TITLES.has(key), change: event => {
    state.chosen.set(key, event.target.checked);
    layPanels();
    schedule();
  }}), TITLES.get(key) ?? key));
  const search = make("input", {type: "search", placeholder: "find a metric", "aria-label": "find a metric", input: () => labels.forEach((label, i) => { label.hidden = !keys[i].includes(search.value); })});
  menu.replaceChildren(...(keys.length > 12 ? [search] : []), ...labels);
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "grid", "warn", "raised", ...Array.from({length: COLOURS}, (_, i) => `c${i}`)]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  const parts = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)), ink = parts(colours.ink);
  for (let i = 0; i < COLOURS; i++) colours[`c${i}+`] = `rgb(${parts(colours[`c${i}`]).map((v, k) => Math.round((v + ink[k]) / 2)).join()})`;
}
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme() {
  document.documentElement.dataset.theme = state.theme ?? (system.matches ? "dark" : "light");
  readColours();
  schedule();
}

// ---- live
function take(raw) {  // a run that is new, or has changed: what is pressed, scrolled or zoomed stays
  const run = readRun(raw), known = named(run.name), text = one => JSON.stringify([one.facts, one.settings, one.stages, one.problem]);
  if (!known) runs.push(run);
  if (!known) return layText();
  const isSaid = text(known) === text(run), kept = state.zoom?.run === run.name ? viewRange() : null, x = state.cursor?.run === run.name ? cursorX() : null;
  Object.assign(known, run, {shown: known.shown});
  if (run.n && run.clock[state.axis]) {
    if (kept) Object.assign(state.zoom, {from: rowAt(known, state.axis, kept[0]), to: rowAt(known, state.axis, kept[1])});
    if (x != null) state.cursor.row = rowAt(known, state.axis, x);
  }
  if (!isSaid) layText();
}

let told = payload.at;
async function ask() {  // for runs that have changed; it takes at most a third of the time of the server
  const sign = byId("live");
  const say = (text, lost) => { sign.hidden = false; sign.textContent = text; sign.classList.toggle("lost", lost); };
  const began = performance.now();
  try {
    const asked = new URLSearchParams({after: told}), now = fresh;
    for (const name of wanted) asked.append(now.includes(name) ? "new" : "also", name);
    const answer = await fetch(`runs?${asked}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    told = found.at;
    fresh = fresh.filter(name => !now.includes(name));
    if (found.runs.length || String(found.names ?? "") !== String(names)) {
      names = found.names ?? [];
      found.runs.forEach(take);
      for (const lay of [layLegend, layAxis, layChooser, layPanels]) lay();
      renew(schedule);
    }
    say("live", false);
  } catch {
    say("connection lost, trying again", true);
  }
  setTimeout(ask, Math.max(1000, 2 * (performance.now() - began)));
}

recall(layAxis());
byId("search").addEventListener("input", layLegend);
byId("compare").querySelector("select").addEventListener("change", event => {
  state.base = event.target.value || null;
  for (const act of [remember, layChooser, layPanels]) act();
  renew(schedule);
});
byId("whole").addEventListener("click", () => look(null));
byId("theme").addEventListener("click", () => {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remember();
  setTheme();
});
system.addEventListener("change", setTheme);
addEventListener("click", event => { if (!byId("chooser").contains(event.target)) byId("chooser").open = false; });
addEventListener("keydown", event => { if (event.key === "Escape") { byId("chooser").open = false; tip(); } });
for (const lay of [setTheme, layLegend, layText, layChooser, layPanels]) lay();
setAxis(state.axis);
if (payload.live) ask();
// For tests and for the browser's console; nothing else reads it.
globalThis.strettoPage = {state, runs, panels, setAxis, zoomTo, view: () => [...range]};
})();
