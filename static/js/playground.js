/* The playground: one conversation a column over one socket. Text is only ever set as text. */
import { $, $$, copy, num, say } from "./app.js";

const setupNode = document.getElementById("setup");
if (setupNode) start(JSON.parse(setupNode.textContent));

function start(setup) {
  const form = document.getElementById("composer");
  const box = document.getElementById("message");
  const go = document.getElementById("go");
  const halt = document.getElementById("halt");
  const connection = document.getElementById("connection");
  const system = document.getElementById("system");
  const drawer = document.getElementById("drawer");
  const play = document.getElementById("play");
  const columns = [];
  let socket = null;
  const waiting = [];

  /* ---- the socket: opened when needed, opened again when lost ---- */
  function send(message) {
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
    else {
      waiting.push(message);
      if (!socket || socket.readyState > WebSocket.OPEN) connect();
    }
  }

  function connect() {
    socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${$("[data-socket]").dataset.socket}`);
    socket.addEventListener("open", () => {
      connection.textContent = "";
      for (const message of waiting.splice(0)) socket.send(JSON.stringify(message));
    });
    socket.addEventListener("message", (event) => {
      const frame = JSON.parse(event.data);
      columns[frame.column]?.take(frame);
    });
    socket.addEventListener("close", (event) => {
      if (event.code === 4401) return location.reload();
      waiting.length = 0;
      for (const column of columns) column.lost();
      refresh();
    });
  }

  /* ---- a column ---- */
  function makeColumn(index) {
    const node = document.getElementById("column").content.firstElementChild.cloneNode(true);
    const model = $(".model", node);
    const said = $(".say", node);
    const trace = $(".trace", node);
    const messages = [];
    let answer = null;
    let current = "";
    let running = false;
    let began = 0;
    let timer = 0;

    const put = (name, value) => ($(`[data-p=${name}]`, node).textContent = value);
    const state = (name, css) => {
      const tag = $("[data-p=state]", node);
      tag.textContent = name;
      tag.className = `tag ${css}`;
    };

    function about() {
      const route = setup.routes.find((r) => r.name === model.value);
      if (!route) return;
      $(".about", node).textContent = [route.quantisation, route.engine, route.context ? say("contextOf", { n: num(route.context) }) : ""].filter(Boolean).join(", ");
    }

    function add(who, words, css = "") {
      const name = document.createElement("div");
      name.className = "who small muted";
      name.textContent = who;
      const body = document.createElement("div");
      body.className = `answer ${css}`;
      body.textContent = words;
      said.append(name, body);
      said.scrollTop = said.scrollHeight;
      return body;
    }

    function fail(frame) {
      const note = document.createElement("div");
      note.className = "note bad";
      note.setAttribute("role", "alert");
      const mark = document.createElement("span");
      mark.className = "st only bad";
      const words = document.createElement("div");
      const line = document.createElement("p");
      line.textContent = frame.message || frame.code || say("failed");
      words.append(line);
      const facts = [frame.status ? `HTTP ${frame.status}` : "", frame.code].filter(Boolean).join(", ");
      if (facts) {
        const small = document.createElement("p");
        small.className = "small muted";
        small.textContent = facts;
        words.append(small);
      }
      note.append(mark, words);
      said.append(note);
      said.scrollTop = said.scrollHeight;
    }

    function figures(frame) {
      if (frame.ttft_ms !== null && frame.ttft_ms !== undefined) put("ttft", num(frame.ttft_ms, frame.ttft_ms < 100 ? 1 : 0));
      if (frame.prompt_tokens) {
        put("in", num(frame.prompt_tokens));
        put("hit", ((frame.cached_tokens / frame.prompt_tokens) * 100).toFixed(1));
      }
      if (frame.completion_tokens) put("out", num(frame.completion_tokens));
      const after = (frame.elapsed_ms - (frame.ttft_ms ?? 0)) / 1000;
      if (frame.completion_tokens > 1 && after > 0) put("rate", ((frame.completion_tokens - 1) / after).toFixed(1));
    }

    function finish(name, css) {
      running = false;
      clearInterval(timer);
      node.classList.remove("run");
      state(name, css);
      if (current) messages.push({ role: "assistant", content: current });
      else if (messages.at(-1)?.role === "user") messages.pop();
      refresh();
    }

    const column = {
      node,
      get running() {
        return running;
      },
      get model() {
        return model.value;
      },
      set model(name) {
        if ([...model.options].some((option) => option.value === name)) model.value = name;
        about();
      },
      body(next) {
        const history = next ? [...messages, { role: "user", content: next }] : messages.length ? messages : [{ role: "user", content: "Hello" }];
        const prompt = system.value.trim();
        return { model: model.value, messages: prompt ? [{ role: "system", content: prompt }, ...history] : history };
      },
      ask(words) {
        const body = column.body(words);
        messages.push({ role: "user", content: words });
        add(say("you"), words);
        answer = add(model.value, "", "now");
        current = "";
        running = true;
        began = performance.now();
        for (const name of ["ttft", "rate", "in", "out", "hit", "time"]) put(name, "–");
        put("id", "");
        trace.classList.add("shut");
        node.classList.add("run");
        state(say("waiting"), "");
        timer = setInterval(() => put("time", ((performance.now() - began) / 1000).toFixed(1)), 100);
        send({ type: "send", column: index, ...body, params: params() });
      },
      take(frame) {
        if (frame.type === "error" && !running) return fail(frame);
        if (!running) return;
        if (frame.request_id) {
          put("id", frame.request_id);
          trace.href = `/requests/${frame.request_id}/`;
          trace.classList.remove("shut");
        }
        if (frame.type === "starting") state(say("starting", { seconds: num(Math.ceil(frame.eta_s)) }), "warn");
        if (frame.type === "queued") state(say("queued", { place: num(frame.position), of: num(frame.depth) }), "warn");
        if (frame.type === "started") state(say("waiting"), "");
        if (frame.text) {
          const stick = said.scrollHeight - said.scrollTop - said.clientHeight < 40;
          current += frame.text;
          answer.textContent = current;
          state(say("streaming"), "lamp");
          if (stick) said.scrollTop = said.scrollHeight;
        }
        if (frame.type === "delta" || frame.type === "done") figures(frame);
        if (frame.type === "done") {
          if (frame.elapsed_ms) put("time", (frame.elapsed_ms / 1000).toFixed(2));
          if (!current) answer.textContent = say("noAnswer");
          finish(frame.finish_reason || "ok", "good");
        } else if (frame.type === "stopped") finish(say("stopped"), "warn");
        else if (frame.type === "error") {
          if (!current) answer.previousElementSibling.remove(), answer.remove();
          fail(frame);
          finish(say("failed"), "bad");
        }
      },
      stop() {
        if (running) send({ type: "stop", column: index });
      },
      lost() {
        if (!running) return;
        fail({ message: say("disconnected") });
        finish(say("failed"), "bad");
      },
      clear() {
        messages.length = 0;
        said.replaceChildren();
        for (const name of ["ttft", "rate", "in", "out", "hit", "time"]) put(name, "–");
        put("id", "");
        trace.classList.add("shut");
        state(say("idle"), "");
      },
    };
    model.addEventListener("change", about);
    state(say("idle"), "");
    about();
    return column;
  }

  function layout(count) {
    const host = document.getElementById("cols");
    while (columns.length < count) {
      const column = makeColumn(columns.length);
      columns.push(column);
      host.append(column.node);
      const other = setup.routes.find((route) => !columns.some((c) => c !== column && c.model === route.name));
      column.model = columns.length === 1 ? setup.model || setup.routes.find((r) => r.ready)?.name || setup.routes[0].name : other?.name;
    }
    while (columns.length > count) {
      const gone = columns.pop();
      gone.stop();
      gone.node.remove();
    }
    host.classList.toggle("g2", count > 1);
  }

  function refresh() {
    const busy = columns.some((column) => column.running);
    halt.classList.toggle("shut", !busy);
    go.disabled = busy;
  }

  /* ---- parameters ---- */
  const fields = $$("[name]", drawer);
  function params() {
    const found = {};
    for (const field of fields) {
      const value = field.value.trim();
      if (value === "" || (value === field.dataset.default && field.type === "range" && field.name === "top_p")) continue;
      if (field.name === "stop") found.stop = value.split(",").map((part) => part.replaceAll("\\n", "\n").replaceAll("\\t", "\t")).filter(Boolean);
      else found[field.name] = Number(value);
    }
    return found;
  }
  /* A value out of range is shown where it stands, never left out in silence. */
  function sound() {
    const wrong = fields.find((field) => !field.checkValidity());
    if (wrong) {
      drawn(true);
      wrong.reportValidity();
    }
    return !wrong;
  }
  function paint(field) {
    if (field.type !== "range") return;
    field.style.setProperty("--p", `${((field.value - field.min) / (field.max - field.min)) * 100}%`);
    $("output", field.parentElement).textContent = Number(field.value).toFixed(field.step === "0.1" ? 1 : 2);
  }
  for (const field of fields) {
    if (setup.params[field.name] !== undefined) field.value = setup.params[field.name];
    field.addEventListener("input", () => paint(field));
    paint(field);
  }
  document.getElementById("reset").addEventListener("click", () => {
    for (const field of fields) {
      field.value = field.dataset.default;
      paint(field);
    }
  });
  function drawn(open) {
    drawer.classList.toggle("shut", !open);
    play.classList.toggle("drawn", open);
    document.getElementById("params").setAttribute("aria-expanded", String(open));
  }
  document.getElementById("params").addEventListener("click", () => drawn(drawer.classList.contains("shut")));
  if (Object.keys(setup.params).length) drawn(true);

  /* ---- composer ---- */
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const words = box.value.trim();
    if (!words || columns.some((column) => column.running) || !sound()) return;
    box.value = "";
    for (const column of columns) column.ask(words);
    refresh();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  halt.addEventListener("click", () => columns.forEach((column) => column.stop()));
  document.getElementById("clear").addEventListener("click", () => {
    for (const column of columns) {
      column.stop();
      column.clear();
    }
    box.focus();
  });
  system.addEventListener("input", () => {
    const says = document.getElementById("system-says");
    says.textContent = system.value.trim().slice(0, 90) || says.dataset.none;
  });
  document.getElementById("compare")?.addEventListener("click", (event) => {
    const two = columns.length === 1;
    event.currentTarget.setAttribute("aria-pressed", String(two));
    layout(two ? 2 : 1);
    refresh();
  });
  $("[data-go]")?.addEventListener("change", (event) => (location.href = `?tenant=${encodeURIComponent(event.target.value)}`));
  for (const button of $$("[data-code]")) {
    button.addEventListener("click", () => sound() && copy(code(button.dataset.code, { ...columns[0].body(box.value.trim()), ...params(), stream: true }, setup.base_url), button));
  }

  layout(1);
  refresh();
  connect();
  box.focus();
}

/** The request as a person would write it, without a key. */
function code(kind, body, base) {
  if (kind === "curl") {
    const json = JSON.stringify(body).replaceAll("'", "'\\''");
    return `curl ${base}/chat/completions \\\n  -H "Authorization: Bearer $FANLIGHT_KEY" -H "Content-Type: application/json" \\\n  -d '${json}'`;
  }
  const { model, messages, stream, top_k, min_p, ...known } = body;
  const extra = Object.fromEntries(Object.entries({ top_k, min_p }).filter(([, v]) => v !== undefined));
  const lines = [`model=${JSON.stringify(model)}`, `messages=${JSON.stringify(messages)}`, ...Object.entries(known).map(([k, v]) => `${k}=${JSON.stringify(v)}`)];
  if (Object.keys(extra).length) lines.push(`extra_body=${JSON.stringify(extra)}`);
  lines.push("stream=True");
  return `import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key=os.environ["FANLIGHT_KEY"])\nstream = client.chat.completions.create(\n${lines.map((line) => `    ${line},\n`).join("")})\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="")`;
}
