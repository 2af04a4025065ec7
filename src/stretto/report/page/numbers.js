// Numbers, times and ticks as text, for page.js.
// Units of the axis, in the order of the switch. A row of a run's clock holds one number of each.
const AXES = [["ba", "batches"], ["sp", "samples"], ["tok", "tokens"], ["ep", "epochs"], ["dur", "fraction"],
  ["sec", "training time"], ["utc", "clock time"], ["ev", "events of the step"]];

// ---- text of numbers
const digits = step => Math.max(0, Math.min(9, Math.ceil(-Math.log10(step) - 1e-9)));
const grouped = (v, places) => v.toLocaleString("en-US", {minimumFractionDigits: places, maximumFractionDigits: places});
const trimmed = text => text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const THOUSANDS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];

function quantity(v, unit = "") {
  if (!Number.isFinite(v)) return String(v);
  const size = Math.abs(v);
  if (unit === "bytes") {
    const [factor, name] = BYTES.find(([f]) => size >= f) ?? [1, "B"];
    return `${trimmed((v / factor).toPrecision(4))} ${name}`;
  }
  const tail = unit ? ` ${unit}` : "";
  if (size >= 1e3 || Number.isInteger(v)) return grouped(v, 0) + tail;
  if (size < 1e-3) return trimmed(v.toPrecision(3)).replace("e-0", "e-") + tail;
  return trimmed(v.toPrecision(4)) + tail;
}

function duration(seconds, places = 0) {
  const sign = seconds < 0 ? "-" : "", total = Math.abs(Number(seconds.toFixed(places)));
  const days = Math.floor(total / 86400), hours = Math.floor(total / 3600) % 24, minutes = Math.floor(total / 60) % 60;
  const two = v => String(v).padStart(2, "0"), rest = (total % 60).toFixed(places).padStart(places ? places + 3 : 2, "0");
  return `${sign}${days ? `${days}d ` : ""}${days || hours ? `${hours}:${two(minutes)}` : minutes}:${rest}`;
}
const clockTime = (seconds, style) => new Intl.DateTimeFormat("en-GB", style).format(new Date(seconds * 1000));
const DAY = {day: "numeric", month: "short"}, MINUTE = {hour: "2-digit", minute: "2-digit"}, SECOND = {...MINUTE, second: "2-digit"};
function reading(unit, x) {  // a position in words, for the line under the legend
  if (!Number.isFinite(x)) return "";
  if (unit === "dur") return `${(100 * x).toFixed(2)}% of the run`;
  if (unit === "sec") return `${duration(x)} of training`;
  if (unit === "utc") return clockTime(x, {...DAY, ...SECOND});
  if (unit === "ep") return `epoch ${trimmed(x.toFixed(3))}`;
  if (unit === "ev") return `event ${Math.round(x)}`;
  return `${grouped(Math.floor(x * (1 + 1e-12) + 1e-9), 0)} ${AXES.find(([name]) => name === unit)[1]}`;
}

// ---- ticks
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
function stepOf(low, high, count, unit) {
  const raw = (high - low) / Math.max(1, count);
  if ((unit === "sec" || unit === "utc") && raw > 0.5) return TIMES.find(t => t >= raw) ?? 86400 * Math.ceil(raw / 86400);
  const power = 10 ** Math.floor(Math.log10(raw)), step = power * [1, 2, 5, 10].find(m => m * power >= raw * 0.999);
  return ["ba", "sp", "tok", "ev"].includes(unit) ? Math.max(1, step) : step;
}
function multiples(low, high, step, zone = 0) {
  const out = [];
  if (!(step > 0) || (high - low) / step > 200) return out;
  // Counted: beyond 2 ** 53, adding 1 to a number changes nothing.
  for (let first = Math.ceil((low + zone) / step - 1e-9), i = 0; i <= 201 && (first + i) * step - zone <= high + step * 1e-9; i++) out.push((first + i) * step - zone);
  return [...new Set(out)];
}
const tiny = v => Number(v.toPrecision(3)).toExponential();
function plain(values, step = values.length > 1 ? values[1] - values[0] : 1) {
  const most = Math.max(...values.map(Math.abs));
  if (most < 1e-3) return values.map(v => v === 0 ? "0" : tiny(v));
  return values.map(v => {
    const [factor, suffix] = most >= 1e4 && THOUSANDS.find(([f]) => Math.abs(v) >= f) || [1, ""];
    return step / factor < 1e-3 ? grouped(v, digits(step)) : trimmed(grouped(v / factor, digits(step / factor))) + suffix;
  });
}
function power(exponent) {  // of two, with 1K for 1,024: a batch of 16,384 is one of 16K
  const tens = exponent < 14 ? 0 : Math.min(4, Math.floor(exponent / 10));
  return exponent < 0 ? trimmed((2 ** exponent).toPrecision(3)) : grouped(2 ** (exponent - 10 * tens), 0) + ["", "K", "M", "B", "T"][tens];
}
