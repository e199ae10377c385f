/* One request: the waterfall on two scales, the gaps between tokens, the KV blocks. Times come in microseconds. */
import { $, $$, hover, num, say } from "./app.js";
import { el, keep, ladder, stage, text } from "./charts.js";

let mode = "split";
const BREAK = 16; // width of the cut between the two scales

function label(us, digits) {
  return us >= 1e6 ? `${num(us / 1e6, us % 1e6 ? 2 : 0)} s` : `${num(us / 1e3, digits ?? (us % 1e3 ? (us < 1e4 ? 1 : 0) : 0))} ms`;
}

/** Position of a time. Split: the time to first token has its own, larger share of the width. */
function scaleOf(width, total, first) {
  const split = mode === "split" && first > 0 && first < total * 0.995;
  if (!split) return { X: (t) => (t / total) * width, split: false };
  const share = first > total * 0.58 ? first / total : width < 500 ? 0.54 : 0.58;
  const left = width * share;
  return { X: (t) => (t <= first ? (t / first) * left : left + BREAK + ((t - first) / (total - first)) * (width - left - BREAK)), split: true, left };
}

function ticksOf(scale, width, total, first) {
  const wanted = width < 500 ? 2 : 4;
  if (!scale.split) return ladder(total, wanted + 1).ticks.filter((t) => t <= total);
  const before = ladder(first, wanted).ticks.filter((t) => t <= first);
  const after = ladder(total, wanted).ticks.filter((t) => t > first && t <= total);
  return [...before, ...after];
}

function waterfall(host) {
  const total = Number(host.dataset.total);
  const first = Number(host.dataset.ttft || 0);
  for (const row of $$(".wf-row", host)) {
    const cell = $(".t", row);
    const height = cell.clientHeight || 29;
    const g = stage(cell, height);
    const scale = scaleOf(g.w, total, first);
    const ticks = ticksOf(scale, g.w, total, first);
    if (scale.split) g.add(el("rect", { x: scale.left, y: 0, width: BREAK, height, class: "cut" }));
    if (row.classList.contains("axis")) axis(g, scale, ticks);
    else {
      for (const tick of ticks) if (tick) g.add(el("line", { x1: Math.round(scale.X(tick)), x2: Math.round(scale.X(tick)), y1: 0, y2: height, class: "gl" }));
      if (row.classList.contains("events")) marks(g, scale, JSON.parse(row.dataset.events));
      else bars(g, scale, row, first);
    }
    if (scale.split && !row.classList.contains("axis")) g.add(el("path", { d: `M${scale.left + 5} ${height}L${scale.left + 11} 0`, class: "cut-line" }));
  }
}

function axis(g, scale, ticks) {
  let end = -99;
  for (const tick of ticks) {
    const x = scale.X(tick);
    const node = text(x, g.h - 6, label(tick), tick ? "middle" : "start");
    g.add(node);
    const half = node.getComputedTextLength() / 2;
    const from = tick ? x - half : x;
    if (from < end + 8 || (tick && x + half > g.w + 6)) node.remove();
    else end = from + half * 2;
    g.add(el("line", { x1: x, x2: x, y1: g.h - 3, y2: g.h, class: "ax" }));
  }
}

function bars(g, scale, row, first) {
  const layer = row.dataset.l;
  const narrow = g.w < 500;
  const y = narrow ? 3 : Math.round(g.h / 2 - 7);
  const parts = JSON.parse(row.dataset.parts);
  // What crosses the first token is drawn on both sides of the cut, its words on the longer one.
  const drawn = parts.flatMap(([from, to, words]) => {
    if (!scale.split || from >= first || to <= first) return [[from, to, words]];
    return first - from > to - first ? [[from, first, words], [first, to, ""]] : [[from, first, ""], [first, to, words]];
  });
  drawn.forEach(([from, to, words], i) => {
    let x = scale.X(from);
    if (scale.split && from >= first) x = Math.max(x, scale.left + BREAK);
    const end = scale.X(to);
    const width = Math.max(drawn.length > 1 ? 1.5 : 2.5, end - x - (i + 1 < drawn.length && end - x > 3 ? 1 : 0));
    if (x + width > g.w) x = g.w - width;
    g.add(el("rect", { x: x.toFixed(2), y, width: width.toFixed(2), height: 14, rx: Math.min(2, width / 2), class: `l-${layer}` }));
    if (/queue/.test(layer)) g.add(el("rect", { x: x.toFixed(2), y, width: width.toFixed(2), height: 14, class: "hatch" }));
    if (words && !/queue/.test(layer)) {
      const inside = text(x + 7, y + 11, words, "start", "inbar");
      g.add(inside);
      if (inside.getComputedTextLength() + 14 > width) inside.remove();
    }
  });
  if (row.dataset.tipped) return;
  row.dataset.tipped = "1";
  const name = $(".n > span", row).textContent;
  hover($(".t", row), () => `${name}: ${parts.slice(0, 8).map(([from, to, words]) => `${words ? `${words}, ` : ""}${num(from / 1e3, 2)} → ${num(to / 1e3, 2)} ms`).join("; ")}${parts.length > 8 ? " …" : ""}`);
}

/* A label takes its own side, else the other, else only a tick stays; two lines, three on narrow screens. */
function marks(g, scale, events) {
  const lines = g.w < 500 ? [13, 31, 49] : [15, 35];
  const taken = [];
  events.forEach(([t, words], i) => {
    const x = scale.X(t);
    const order = lines.map((_y, n) => lines[(i + n) % lines.length]);
    let placed = false;
    const node = text(x, 0, words, "start", "mut");
    g.add(node);
    const width = node.getComputedTextLength() + 8;
    for (const y of order) {
      for (const side of [1, -1]) {
        const box = side < 0 ? [x - width - 5, x + 4] : [x - 4, x + width + 5];
        if (placed || box[0] < -40 || box[1] > g.w + 24 || taken.some(([ty, a, b]) => ty === y && a < box[1] && box[0] < b)) continue;
        taken.push([y, ...box]);
        node.setAttribute("x", x + side * 7);
        node.setAttribute("y", y);
        node.setAttribute("text-anchor", side < 0 ? "end" : "start");
        g.add(el("line", { x1: x, x2: x, y1: 0, y2: y - 5, class: "ev" }), el("circle", { cx: x, cy: y - 4, r: 3, class: "evd" }));
        placed = true;
      }
    }
    if (!placed) {
      node.remove();
      g.add(el("line", { x1: x, x2: x, y1: 0, y2: 4, class: "ax" }));
    }
  });
}

function tokens(host) {
  const gaps = JSON.parse(host.dataset.gaps).map((v) => v / 10);
  const narrow = host.clientWidth < 520;
  const g = stage(host, 128);
  const pad = narrow ? { l: 34, r: 52, t: 18, b: 22 } : { l: 46, r: 70, t: 18, b: 22 };
  const p50 = Number(host.dataset.p50);
  const p99 = Number(host.dataset.p99);
  const largest = Math.max(...gaps);
  // One very long gap must not flatten the rest: it is cut, and says its size.
  const p95 = [...gaps].sort((a, b) => a - b)[Math.floor(gaps.length * 0.95)];
  const { max, ticks } = ladder(Math.min(largest, Math.max(p95 * 1.6, p50 * 3)) || 1, 3);
  const width = (g.w - pad.l - pad.r) / gaps.length;
  const Y = (v) => g.h - pad.b - (Math.min(v, max) / max) * (g.h - pad.t - pad.b);
  ticks.forEach((tick, i) => {
    g.add(el("line", { x1: pad.l, x2: g.w - pad.r, y1: Y(tick), y2: Y(tick), class: tick ? "gl" : "ax" }));
    g.add(text(pad.l - 8, Y(tick) + 4, num(tick, tick % 1 ? 1 : 0) + (i === ticks.length - 1 && !narrow ? " ms" : ""), "end"));
  });
  const bar = Math.max(0.6, Math.min(28, width - (width > 1.6 ? 0.7 : 0)));
  gaps.forEach((v, i) => g.add(el("rect", { x: (pad.l + i * width + (width - bar) / 2).toFixed(2), y: Y(v).toFixed(1), width: bar.toFixed(2), height: Math.max(0.5, g.h - pad.b - Y(v)).toFixed(1), class: v > p50 * 1.6 ? "l-decode" : "l-decode soft" })));
  let other = -99;
  for (const [name, value] of [["p50", p50], ["p99", p99]]) {
    if (value > max) continue;
    g.add(el("line", { x1: pad.l, x2: g.w - pad.r + 4, y1: Y(value), y2: Y(value), class: name === "p50" ? "pl" : "pl dash" }));
    let y = Y(value) + 4;
    if (Math.abs(y - other) < 12) y = other - 12;
    other = y;
    g.add(text(g.w - pad.r + 8, y, `${name} ${value.toFixed(1)}`, "start", "ink"));
  }
  const at = gaps.indexOf(largest);
  if (largest > max) {
    const x = pad.l + (at + 0.5) * width;
    g.add(el("path", { d: `M${x - 5} ${pad.t + 8}l10 -4M${x - 5} ${pad.t + 13}l10 -4`, class: "cutmark" }));
    g.add(text(Math.max(pad.l + 24, Math.min(g.w - pad.r - 24, x)), 11, `${num(largest, 1)} ms`, "middle", "ink"));
  }
  const last = gaps.length + 1;
  const marksAt = [...new Set([2, ...[0.25, 0.5, 0.75].map((s) => Math.round(last * s)), last])].filter((n) => n >= 2 && n <= last);
  let end = -99;
  marksAt.forEach((n, i) => {
    const node = text(pad.l + (n - 1.5) * width, g.h - 6, i ? n : `${say("token")} ${n}`, width > 60 ? "middle" : i === 0 ? "start" : n === last ? "end" : "middle");
    g.add(node);
    const box = node.getBBox();
    if (box.x < end + 6) node.remove();
    else end = box.x + box.width;
  });
  const hit = el("rect", { x: pad.l, y: 0, width: g.w - pad.l - pad.r, height: g.h, class: "hit plain" });
  g.add(hit);
  hover(hit, (event) => {
    const i = Math.max(0, Math.min(gaps.length - 1, Math.floor((event.clientX - g.svg.getBoundingClientRect().left - pad.l) / width)));
    return say("gapTip", { n: i + 2, ms: num(gaps[i], 1) });
  });
}

function blocks(host) {
  const size = Number(host.dataset.size);
  const counts = ["cached", "computed", "generated"].map((kind) => [kind, Number(host.dataset[kind])]);
  const total = counts.reduce((sum, [, n]) => sum + n, 0);
  const cell = total > 3000 ? 6 : 10;
  const columns = Math.max(1, Math.floor((host.clientWidth + 2) / cell));
  const g = stage(host, Math.ceil(total / columns) * cell);
  let i = 0;
  for (const [kind, count] of counts) {
    for (let n = 0; n < count; n++, i++) {
      const x = (i % columns) * cell;
      const y = Math.floor(i / columns) * cell;
      const inset = kind === "cached" ? 0.5 : 0;
      g.add(el("rect", { x: x + inset, y: y + inset, width: cell - 2 - inset * 2, height: cell - 2 - inset * 2, rx: 1, class: { cached: "b-cached", computed: "l-prefill", generated: "l-decode" }[kind] }));
    }
  }
  hover(g.svg, (event) => {
    const box = g.svg.getBoundingClientRect();
    const n = Math.floor((event.clientY - box.top) / cell) * columns + Math.floor((event.clientX - box.left) / cell);
    if (n < 0 || n >= total) return "";
    const kind = n < counts[0][1] ? "cached" : n < counts[0][1] + counts[1][1] ? "computed" : "generated";
    return say("blockTip", { n: num(n + 1), total: num(total), kind: say(kind), from: num(n * size + 1), to: num((n + 1) * size) });
  });
}

const DRAW = { wf: waterfall, tokens, blocks };
for (const host of $$("[data-draw]")) {
  const draw = DRAW[host.dataset.draw];
  if (draw) keep(host, () => draw(host));
}
$("[data-wf-scale]")?.addEventListener("pick", (event) => {
  mode = event.detail;
  waterfall($("[data-draw=wf]"));
});
