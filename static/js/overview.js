/* The overview: the server sends whole snapshots, this puts them where they belong. */
import { $, $$, language, say, zone } from "./app.js";
import { keep, latency, spark, traffic } from "./charts.js";

let series = JSON.parse(document.getElementById("series").textContent);
let of = "ttft";

const SPARKS = {
  requests: () => [series.ok.map((v, i) => v + series.cancelled[i] + series.rejected[i] + series.failed[i])],
  ttft: () => [series.ttft.map((p) => p[1]), series.ttft.map((p) => p[0])],
  itl: () => [series.itl.map((p) => p[1])],
  queue: () => [series.queue.map((p) => p[1])],
  rejected: () => [series.rejected],
  hit: () => [series.hit],
  tokens: () => [series.output, series.input],
};

function drawSparks() {
  for (const host of $$("[data-draw=spark]")) if (SPARKS[host.dataset.of]) spark(host, SPARKS[host.dataset.of]());
}
const latencyHost = $("[data-draw=latency]");
const trafficHost = $("[data-draw=traffic]");
keep(latencyHost, () => latency(latencyHost, series, of));
keep(trafficHost, () => traffic(trafficHost, series));
keep($("[data-part=figures]"), drawSparks);

$("[data-latency]").addEventListener("pick", (event) => {
  of = event.detail;
  $("[data-latency-title]").textContent = $(`[data-latency] [value=${of}]`).dataset.title;
  latency(latencyHost, series, of);
});

/* Live: a socket; while it is away the page polls, and says which of the two it is. */
const state = $("[data-live-state]");
const address = $("[data-socket]").dataset.socket;
const shown = new Map();
let tries = 0;
let polling = 0;

function tell(kind) {
  state.textContent = say(kind);
  state.classList.toggle("off", kind !== "live");
}

function show(snapshot) {
  for (const [name, html] of Object.entries(snapshot.parts)) {
    const node = $(`[data-part=${name}]`);
    if (!node || shown.get(name) === html || node.matches(":focus-within")) continue;
    shown.set(name, html);
    node.innerHTML = html;
  }
  const had = series.ok.some(Boolean);
  series = snapshot.series;
  drawSparks();
  latency(latencyHost, series, of);
  traffic(trafficHost, series);
  const now = $("[data-now]");
  if (now) now.textContent = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23", timeZone: zone }).format(new Date(snapshot.at * 1000));
  if (!had && series.ok.some(Boolean)) $("[data-empty]")?.remove();
}

function connect() {
  const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${address}`);
  socket.addEventListener("open", () => {
    tries = 0;
    clearInterval(polling);
    polling = 0;
  });
  socket.addEventListener("message", (event) => {
    const message = JSON.parse(event.data);
    if (message.type === "snapshot") {
      tell("live");
      show(message);
    } else tell("reconnecting");
  });
  socket.addEventListener("close", (event) => {
    if (event.code === 4401) return location.reload();
    tell("reconnecting");
    if (!polling) polling = setInterval(poll, 10000);
    setTimeout(connect, Math.min(30000, 1000 * 2 ** tries++) * (0.7 + Math.random() * 0.6));
  });
}

async function poll() {
  if (document.visibilityState !== "visible") return;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const parts = Object.fromEntries($$("[data-part]", page).map((node) => [node.dataset.part, node.innerHTML]));
    show({ parts, series: JSON.parse(page.getElementById("series").textContent), at: Date.now() / 1000 });
    tell("polling");
  } catch {
    tell("reconnecting");
  }
}

connect();
