/* What every page does: theme, navigation sheet, keyboard, dialogs, copying, tooltips. No page needs it to be read. */

export const $ = (selector, from = document) => from.querySelector(selector);
export const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];

const root = document.documentElement;
const wordsNode = document.getElementById("words");
const words = wordsNode ? JSON.parse(wordsNode.textContent) : {};

/** A translated text with its {placeholders} filled. */
export function say(name, values = {}) {
  return (words[name] ?? name).replace(/\{(\w+)\}/g, (whole, key) => (key in values ? values[key] : whole));
}

/** 1234.5 as 1,234.5: the same in every language of the console. */
export function num(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/* Dates in English are written as the server writes them: day, month, year. */
export const language = root.lang.startsWith("zh") ? "zh-CN" : "en-GB";
export const zone = root.dataset.zone || "UTC";

/* ---- the browser's zone, for people who chose none ---- */
const zoneCookie = root.dataset.zoneCookie;
if (zoneCookie) {
  const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (own) document.cookie = `${zoneCookie}=${own}; path=/; max-age=31536000; samesite=lax`;
}

/* ---- theme ---- */
function isDark() {
  const chosen = root.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function post(url, values) {
  const body = new URLSearchParams(values);
  return fetch(url, {
    method: "POST",
    body,
    headers: { "X-CSRFToken": document.body.dataset.csrf, "HX-Request": "true" },
  });
}

document.addEventListener("click", (event) => {
  const target = event.target instanceof Element ? event.target : null;
  if (!target) return;
  if (target.closest("[data-theme-toggle]")) {
    const theme = isDark() ? "light" : "dark";
    root.dataset.theme = theme;
    post(document.body.dataset.preferences, { theme }).catch(() => {});
  }
  const opener = target.closest("[data-dialog]");
  if (opener) openDialog(opener);
  if (target.closest("[data-close]")) target.closest("dialog").close();
  const copier = target.closest("[data-copy]");
  if (copier) copy($(copier.dataset.copy)?.textContent ?? "", copier);
  const choice = target.closest(".seg[role=group] button");
  if (choice) choose(choice);
  for (const pop of $$("details[data-pop][open]")) if (!pop.contains(target)) pop.open = false;
});

function choose(button) {
  const group = button.parentElement;
  for (const other of $$("button", group)) other.setAttribute("aria-pressed", String(other === button));
  group.dispatchEvent(new CustomEvent("pick", { detail: button.value, bubbles: true }));
}

function openDialog(opener) {
  const dialog = document.getElementById(opener.dataset.dialog);
  if (!dialog) return;
  if (opener.dataset.action) {
    $("form", dialog).action = opener.dataset.action;
    $("[data-name]", dialog).textContent = opener.dataset.name;
  }
  for (const pop of $$("details[data-pop][open]")) pop.open = false;
  dialog.showModal();
}

for (const dialog of $$("dialog[data-open]")) {
  dialog.showModal();
  if ("keep" in dialog.dataset) dialog.addEventListener("cancel", (event) => event.preventDefault());
}

/** Copy a text and say so on the button, or where there is none, in a toast. */
export async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = byHand(text);
  }
  const message = say(done ? "copied" : "copyFailed");
  if (!button || button.classList.contains("icon-only") || button.closest(".links")) return toast(message);
  const was = [...button.childNodes];
  button.replaceChildren(message);
  setTimeout(() => button.replaceChildren(...was), 1200);
}

/* Without HTTPS there is no clipboard API off localhost. */
function byHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "sr";
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

let toastTimer = 0;
export function toast(message) {
  const node = document.getElementById("toast");
  if (!node) return;
  node.textContent = message;
  node.classList.remove("shut");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.add("shut"), 2600);
}

/* ---- navigation as a sheet on narrow screens ---- */
const nav = $("#nav");
const opener = $("[data-nav-open]");
function sheet(open) {
  nav.toggleAttribute("data-open", open);
  opener.setAttribute("aria-expanded", String(open));
  (open ? $("[data-nav-close]", nav) : opener).focus();
}
if (nav && opener) {
  opener.addEventListener("click", () => sheet(true));
  $("[data-nav-close]").addEventListener("click", () => sheet(false));
}

/* ---- forms that act on a change ---- */
document.addEventListener("change", (event) => {
  const field = event.target;
  if (field.matches("select[data-submit]")) field.form.submit();
  if (field.matches("[data-enables]")) {
    const target = $(field.dataset.enables);
    target.toggleAttribute("disabled", !field.checked);
    target.setAttribute("aria-disabled", String(!field.checked));
  }
});

/* ---- tabs ---- */
for (const list of $$("[role=tablist]")) {
  const tabs = $$("[role=tab]", list);
  const show = (tab) => {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", String(on));
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    }
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) show(tab);
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}

/* ---- keyboard: / search, g then a letter, ? help ---- */
const GO = { o: "/", r: "/requests/", p: "/playground/", k: "/keys/", m: "/models/", d: "/deployments/" };
let pending = false;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && nav?.hasAttribute("data-open")) sheet(false);
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, textarea, select, [contenteditable]")) return;
  if (event.key === "/") {
    const box = $("[data-search]");
    if (box) {
      box.focus();
      box.select();
      event.preventDefault();
    }
  } else if (event.key === "?") {
    document.getElementById("help")?.showModal();
  } else if (pending && GO[event.key] && $(`.nav a[href="${GO[event.key]}"]`)) {
    location.href = GO[event.key];
  }
  pending = event.key === "g";
});

/* ---- one tooltip for all drawings ---- */
const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

export function showTip(event, text) {
  tip.textContent = text;
  tip.classList.add("on");
  const x = Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 12));
  const below = event.clientY + 16;
  tip.style.left = `${x}px`;
  tip.style.top = `${below + tip.offsetHeight > innerHeight - 8 ? event.clientY - tip.offsetHeight - 10 : below}px`;
}

export function hideTip() {
  tip.classList.remove("on");
}

/** Show a text beside the pointer while it is over a node. */
export function hover(node, text) {
  node.addEventListener("pointermove", (event) => {
    const said = typeof text === "function" ? text(event) : text;
    if (said) showTip(event, said);
    else hideTip();
  });
  node.addEventListener("pointerleave", hideTip);
}

/* ---- htmx ---- */
document.addEventListener("htmx:responseError", () => toast(say("loadFailed")));
document.addEventListener("htmx:sendError", () => toast(say("loadFailed")));
