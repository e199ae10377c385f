/* Small hand-drawn SVG charts. Shapes carry a class and tokens.css decides their colour; geometry is in attributes. */
import { $$, hideTip, hover, language, num, say, showTip, zone } from "./app.js";

const NS = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, children = []) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function text(x, y, words, anchor = "start", css = "") {
  return el("text", { x, y, "text-anchor": anchor, class: css }, [String(words)]);
}

/** An empty drawing as wide as its host. */
export function stage(host, height) {
  const width = Math.max(40, Math.floor(host.clientWidth));
  const label = host.dataset.label;
  const svg = el("svg", { width, height, role: label ? "img" : "presentation" });
  if (label) svg.setAttribute("aria-label", label);
  else svg.setAttribute("aria-hidden", "true");
  host.replaceChildren(svg);
  return { svg, w: width, h: height, add: (...nodes) => svg.append(...nodes) };
}

export function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

/** Lines through what was measured: a hole in the data is a hole in the line; a lone point is a short dash. */
export function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (point[1] === null) {
      if (run.length) found.push(run);
      run = [];
    } else run.push(point);
  }
  if (run.length) found.push(run);
  return found.map((r) => (r.length > 1 ? r : [[r[0][0] - 1.5, r[0][1]], [r[0][0] + 1.5, r[0][1]]]));
}

/** A round number at least as large, and the ticks below it. */
export function ladder(largest, parts = 3) {
  if (!(largest > 0)) return { max: 1, ticks: [0, 1] };
  const raw = largest / parts;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = 0; i * step < largest * 1.0001 + step * 0.999 && i <= parts + 1; i++) ticks.push(i * step);
  return { max: ticks[ticks.length - 1], ticks };
}

const clocks = new Map();
export function clock(seconds, span) {
  const kind = span > 2 * 86400 ? "day" : "time";
  if (!clocks.has(kind)) {
    const parts = kind === "day" ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
    clocks.set(kind, new Intl.DateTimeFormat(language, { ...parts, timeZone: zone }));
  }
  return clocks.get(kind).format(new Date(seconds * 1000));
}

function exact(seconds, span) {
  const options = { hour: "2-digit", minute: "2-digit", second: span < 3600 ? "2-digit" : undefined, hourCycle: "h23", timeZone: zone };
  if (span > 86400) Object.assign(options, { month: "short", day: "numeric" });
  return new Intl.DateTimeFormat(language, options).format(new Date(seconds * 1000));
}

function figure(value) {
  return num(value, value < 10 && value % 1 ? 1 : 0);
}

function frame(g, pad, scale, unit, series) {
  const Y = (v) => g.h - pad.b - (v / scale.max) * (g.h - pad.t - pad.b);
  for (const tick of scale.ticks) {
    const y = Math.round(Y(tick)) + 0.5;
    g.add(el("line", { x1: pad.l, x2: g.w - pad.r, y1: y, y2: y, class: tick ? "gl" : "ax" }));
    const last = tick === scale.ticks[scale.ticks.length - 1];
    g.add(text(pad.l - 8, y + 4, figure(tick) + (last && unit ? ` ${unit}` : ""), "end"));
  }
  const n = series.ok.length;
  const span = n * series.step;
  const wanted = Math.max(2, Math.min(7, Math.floor((g.w - pad.l - pad.r) / 76)));
  const each = Math.max(1, Math.round(n / wanted));
  for (let i = n; i >= 0; i -= each) {
    const x = pad.l + (i / n) * (g.w - pad.l - pad.r);
    if (x < pad.l + 18 && i !== n && i > 0) continue;
    g.add(text(x, g.h - 6, clock(series.start + i * series.step, span), i === n ? "end" : i === 0 ? "start" : "middle"));
  }
  return Y;
}

function link(series, i) {
  const from = new Date((series.start + i * series.step) * 1000).toISOString();
  const to = new Date((series.start + (i + 1) * series.step) * 1000).toISOString();
  return `/requests/?from=${encodeURIComponent(from)}&to=${encodeURIComponent(to)}`;
}

/** A pointer over a chart chooses a bar: says what it is, leads to its requests. */
function pick(g, pad, series, describe) {
  const n = series.ok.length;
  const cross = el("line", { y1: pad.t, y2: g.h - pad.b, class: "cross" });
  const hit = el("rect", { x: pad.l, y: 0, width: Math.max(1, g.w - pad.l - pad.r), height: g.h, class: "hit" });
  g.add(cross, hit);
  const at = (event) => {
    const x = event.clientX - g.svg.getBoundingClientRect().left - pad.l;
    return Math.max(0, Math.min(n - 1, Math.floor((x / (g.w - pad.l - pad.r)) * n)));
  };
  hit.addEventListener("pointermove", (event) => {
    const i = at(event);
    const x = pad.l + ((i + 0.5) / n) * (g.w - pad.l - pad.r);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.classList.add("on");
    showTip(event, describe(i, exact(series.start + i * series.step, n * series.step)));
  });
  hit.addEventListener("pointerleave", () => {
    cross.classList.remove("on");
    hideTip();
  });
  hit.addEventListener("click", (event) => (location.href = link(series, at(event))));
}

/** p99 and p50 over time. */
export function latency(host, series, of) {
  const g = stage(host, 214);
  const pad = { l: 58, r: 4, t: 12, b: 24 };
  const pairs = series[of];
  const largest = Math.max(0, ...pairs.flat().filter((v) => v !== null));
  const scale = ladder(largest);
  const Y = frame(g, pad, scale, "ms", series);
  const X = (i) => pad.l + ((i + 0.5) / pairs.length) * (g.w - pad.l - pad.r);
  if (!largest && !pairs.flat().some((v) => v !== null)) {
    g.add(text((g.w + pad.l) / 2, (g.h - pad.b) / 2 + 4, say("noData"), "middle", "mut"));
    return;
  }
  const lines = [1, 0].map((which) => runs(pairs.map((p, i) => [X(i), p[which] === null ? null : Y(p[which])])));
  for (const run of lines[0]) {
    g.add(el("path", { d: `${path(run)}L${run[run.length - 1][0].toFixed(1)} ${Y(0)}L${run[0][0].toFixed(1)} ${Y(0)}Z`, class: "ar" }));
  }
  lines.forEach((found, i) => found.forEach((run) => g.add(el("path", { d: path(run), class: i ? "ln b" : "ln" }))));
  pick(g, pad, series, (i, time) => {
    const [p50, p99] = pairs[i];
    return p99 === null ? `${time}  ${say("noData")}` : say("latencyTip", { time, p50: num(p50, p50 < 100 ? 1 : 0), p99: num(p99, p99 < 100 ? 1 : 0) });
  });
}

/** Requests by outcome over time. */
export function traffic(host, series) {
  const g = stage(host, 214);
  const pad = { l: 46, r: 4, t: 12, b: 24 };
  const n = series.ok.length;
  const parts = [["o-ok", series.ok], ["o-cancel", series.cancelled], ["o-reject", series.rejected], ["o-error", series.failed]];
  const sums = series.ok.map((_v, i) => parts.reduce((sum, [, values]) => sum + values[i], 0));
  const scale = ladder(Math.max(1, ...sums));
  const Y = frame(g, pad, scale, "", series);
  const width = (g.w - pad.l - pad.r) / n;
  for (let i = 0; i < n; i++) {
    let below = 0;
    for (const [css, values] of parts) {
      if (!values[i]) continue;
      const top = Y(below + values[i]);
      const height = Math.max(1.5, Y(below) - top);
      g.add(el("rect", { x: (pad.l + i * width + 0.5).toFixed(1), y: (Y(below) - height).toFixed(1), width: Math.max(1, width - 1.4).toFixed(1), height: height.toFixed(1), class: css }));
      below += values[i];
    }
  }
  pick(g, pad, series, (i, time) => say("trafficTip", { time, ok: num(series.ok[i]), cancelled: num(series.cancelled[i]), rejected: num(series.rejected[i]), failed: num(series.failed[i]) }));
}

/** A line without axes. `lines`: arrays of numbers or nulls, the first one filled. */
export function spark(host, lines) {
  const g = stage(host, 24);
  const all = lines.flat().filter((v) => v !== null);
  if (!all.length) return;
  const top = Math.max(...all, 0) || 1;
  lines.forEach((values, which) => {
    const X = (i) => 1 + (i / Math.max(1, values.length - 1)) * (g.w - 4);
    const points = values.map((v, i) => [X(i), v === null ? null : 22 - (v / top) * 20]);
    for (const run of runs(points)) {
      if (!which) g.add(el("path", { d: `${path(run)}L${run[run.length - 1][0].toFixed(1)} 24L${run[0][0].toFixed(1)} 24Z`, class: "ar" }));
      g.add(el("path", { d: path(run), class: which ? "ln b" : "ln" }));
    }
  });
}

/** Draw now and whenever the width changes. */
export function keep(host, draw) {
  let width = 0;
  const again = () => {
    if (host.clientWidth && host.clientWidth !== width) {
      width = host.clientWidth;
      draw();
    }
  };
  new ResizeObserver(again).observe(host);
  again();
  document.fonts?.ready.then(draw);
}

for (const host of $$("[data-draw=spark][data-values]")) keep(host, () => spark(host, [JSON.parse(host.dataset.values)]));

export { hover };
