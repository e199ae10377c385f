/* The list of requests: adding conditions, choosing on the histogram, the two scales of the small waterfalls. */
import { $, $$, num, say, showTip, hideTip } from "./app.js";
import { el, keep, stage, text } from "./charts.js";

const list = document.getElementById("list");
let scale = "ttft";

/* What is typed is added to the filter as it stands; a filter that could not be read is typed over. */
list.addEventListener("submit", join, true);
function join(event) {
  const form = event.target.closest("[data-filter]");
  if (!form) return;
  const add = $("[data-add]", form);
  const hidden = $("[name=q]", form);
  const whole = add.getAttribute("aria-invalid") ? add.value : `${hidden.value} ${add.value}`;
  hidden.value = whole.trim();
}

list.addEventListener("keydown", (event) => {
  if (event.target.matches("[data-add]") && event.key === "Backspace" && !event.target.value) $$(".tok a", list).pop()?.click();
});

list.addEventListener("pick", (event) => {
  if (!event.target.matches("[data-mw-scale]")) return;
  scale = event.detail;
  $(".reqs", list)?.setAttribute("data-scale", scale);
});

list.addEventListener("click", (event) => {
  if (event.target.closest("[data-hist-clear]")) {
    event.preventDefault();
    narrow(null, null);
  }
});

/** Go to the list with another condition on TTFT. */
function narrow(low, high) {
  const url = new URL(location.href);
  const rest = (url.searchParams.get("q") ?? "").split(/\s+/).filter((word) => word && !/^ttft[<>=]/.test(word));
  if (low !== null) rest.push(`ttft>=${low}`);
  if (high !== null) rest.push(`ttft<=${high}`);
  if (rest.length) url.searchParams.set("q", rest.join(" "));
  else url.searchParams.delete("q");
  url.searchParams.delete("before");
  url.searchParams.delete("after");
  location.href = url;
}

function duration(ms) {
  if (ms >= 1000) return `${num(ms / 1000, ms % 1000 ? 1 : 0)} s`;
  return `${num(ms, ms < 10 ? 1 : 0)} ms`;
}

function histogram(host) {
  const counts = JSON.parse(host.dataset.counts);
  const [from, to] = JSON.parse(host.dataset.selected);
  const low = Math.log(host.dataset.low / 1000);
  const high = Math.log(host.dataset.high / 1000);
  const g = stage(host, Number(host.dataset.h));
  const pad = { l: 4, r: 4, t: 6, b: 20 };
  const width = (g.w - pad.l - pad.r) / counts.length;
  const X = (ms) => pad.l + ((Math.log(ms) - low) / (high - low)) * (g.w - pad.l - pad.r);
  const ms = (x) => Math.exp(low + ((x - pad.l) / (g.w - pad.l - pad.r)) * (high - low));
  const clamp = (x) => Math.max(pad.l, Math.min(g.w - pad.r, x));
  const largest = Math.max(...counts);
  const chosen = from !== null || to !== null;
  const left = clamp(from === null ? pad.l : X(from));
  const right = clamp(to === null ? g.w - pad.r : X(to));
  const wash = el("rect", { x: left, y: 0, width: Math.max(0, right - left), height: g.h - pad.b, class: chosen ? "wash" : "wash shut" });
  g.add(wash);
  counts.forEach((count, i) => {
    const x = pad.l + i * width;
    const height = count ? Math.max(1.5, Math.sqrt(count / largest) * (g.h - pad.t - pad.b)) : 0;
    const inside = !chosen || (x + width / 2 >= left && x + width / 2 <= right);
    g.add(el("rect", { x: x.toFixed(1), y: (g.h - pad.b - height).toFixed(1), width: Math.max(1, width - 1.2).toFixed(1), height: height.toFixed(1), class: inside ? (chosen ? "m-weights" : "m-kv") : "m-kvfree" }));
  });
  g.add(el("line", { x1: pad.l, x2: g.w - pad.r, y1: g.h - pad.b, y2: g.h - pad.b, class: "ax" }));
  if (chosen) for (const x of [left, right]) g.add(el("line", { x1: x, x2: x, y1: 0, y2: g.h - pad.b, class: "brush" }), el("rect", { x: x - 3, y: 26, width: 6, height: 18, rx: 2, class: "grip" }));
  let last = -99;
  for (let power = -1; power < 7; power++) {
    for (const lead of [1, 2, 5]) {
      const tick = lead * 10 ** power;
      const x = X(tick);
      if (x < pad.l + 8 || x > g.w - pad.r - 12 || x - last < 54) continue;
      last = x;
      g.add(text(x, g.h - 5, duration(tick), "middle"));
    }
  }
  const hit = el("rect", { x: pad.l, y: 0, width: g.w - pad.l - pad.r, height: g.h - pad.b, class: "hit brushable" });
  g.add(hit);
  const at = (event) => clamp(event.clientX - g.svg.getBoundingClientRect().left);
  let began = null;
  hit.addEventListener("pointerdown", (event) => {
    began = at(event);
    hit.setPointerCapture(event.pointerId);
  });
  hit.addEventListener("pointermove", (event) => {
    const x = at(event);
    if (began !== null) {
      wash.classList.remove("shut");
      wash.setAttribute("x", Math.min(began, x));
      wash.setAttribute("width", Math.abs(x - began));
    }
    const i = Math.min(counts.length - 1, Math.floor((x - pad.l) / width));
    showTip(event, say("histTip", { from: duration(ms(pad.l + i * width)), to: duration(ms(pad.l + (i + 1) * width)), n: num(counts[i]) }));
  });
  hit.addEventListener("pointerleave", hideTip);
  hit.addEventListener("pointerup", (event) => {
    if (began === null) return;
    const ends = [began, at(event)].sort((a, b) => a - b);
    began = null;
    if (ends[1] - ends[0] < 4) return histogram(host);
    const edge = (x) => `${Math.round(ms(x) * 1000)}us`;
    narrow(ends[0] <= pad.l + 1 ? null : edge(ends[0]), ends[1] >= g.w - pad.r - 1 ? null : edge(ends[1]));
  });
}

function prepare() {
  const host = $("[data-draw=hist]", list);
  if (host) keep(host, () => histogram(host));
  if (scale !== "ttft") {
    $(".reqs", list)?.setAttribute("data-scale", scale);
    for (const button of $$("[data-mw-scale] button", list)) button.setAttribute("aria-pressed", String(button.value === scale));
  }
}
prepare();
list.addEventListener("htmx:afterSwap", prepare);
