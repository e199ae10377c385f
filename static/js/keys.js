/* Keys and docs: which key is to be revoked, hiding ended ones, copying the example that is open. */
import { $, $$, copy } from "./app.js";
import "./charts.js";

const dialog = document.getElementById("revoke");
dialog?.addEventListener("open-by", (event) => {
  $("form", dialog).action = event.detail.dataset.action;
  $("[data-name]", dialog).textContent = event.detail.dataset.name;
});

$("[data-show-ended]")?.addEventListener("change", (event) => {
  for (const row of $$("tr.ended")) row.classList.toggle("shut", !event.target.checked);
});

document.getElementById("made-done")?.addEventListener("click", (event) => {
  if (event.currentTarget.getAttribute("aria-disabled") === "true") event.preventDefault();
});

$("[data-copy-tab]")?.addEventListener("click", (event) => copy($("[role=tabpanel]:not([hidden])").textContent, event.currentTarget));
