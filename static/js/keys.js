/* Keys and docs: hiding ended keys, copying the example that is open. */
import { $, $$, copy } from "./app.js";
import "./charts.js";

$("[data-show-ended]")?.addEventListener("change", (event) => {
  for (const row of $$("tr.ended")) row.classList.toggle("shut", !event.target.checked);
});

document.getElementById("made-done")?.addEventListener("click", (event) => {
  if (event.currentTarget.getAttribute("aria-disabled") === "true") event.preventDefault();
});

$("[data-copy-tab]")?.addEventListener("click", (event) => copy($("[role=tabpanel]:not([hidden])").textContent, event.currentTarget));
