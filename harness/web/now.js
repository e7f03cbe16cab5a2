"use strict";
// On each page of Locust: what walkaway does now, and the report of the last run. In the start form:
// groups, a hint under each field, and an error next to its field. In our tab: the charts.

const EVERY_MS = 1000;
const TAB = "walkaway";
const LOCUSTS = { "Number of users": "userCount", "Ramp up": "spawnRate", "Run time": "runTime", Host: "host" };
const FIELDS = JSON.parse(document.getElementById("walkaway-fields").textContent);
const box = document.getElementById("walkaway-now");
const said = box.querySelector("[role=status]");
const report = document.getElementById("walkaway-report");
let asked = null; // starts that the server had been asked for when the form was last sent
let latest = null;
let opensTab = false;
let wrong = null; // a refusal that names a field which is not there yet
const charts = Object.assign(document.createElement("iframe"), {
  id: "walkaway-run", title: "walkaway: the run and its charts", src: "./walkaway/live",
});

function paragraph(look, text, id) {
  return Object.assign(document.createElement("p"), { className: look, textContent: text, id });
}

// Only what has changed: a screen reader says it aloud.
function say(text) {
  if (said.textContent !== text) said.textContent = text;
}

// The fields of this name: in the form, and in the dialog that lies over the tabs.
function inputs(label) {
  return document.querySelectorAll(`[name="${CSS.escape(LOCUSTS[label] ?? label)}"]`);
}

// What Locust draws of a field: our texts stand inside of it, and go with it.
function frameOf(input) {
  return input.closest(".MuiFormControl-root") ?? input.parentElement;
}

function describe({ label, group, hint }, number) {
  inputs(label).forEach((input, copy) => {
    const frame = frameOf(input);
    const grid = frame.parentElement;
    grid.classList.add("walkaway-form"); // again, after Locust has given it other classes
    if (frame.querySelector(".walkaway-hint")) return;
    const id = `walkaway-hint-${number}-${copy}`;
    frame.append(paragraph("walkaway-hint", hint, id));
    input.setAttribute("aria-describedby", id);
    if (group) grid.insertBefore(Object.assign(document.createElement("h3"), { textContent: group }), frame);
  });
}

function clearErrors() {
  for (const one of document.querySelectorAll(".walkaway-error")) one.remove();
  for (const one of document.querySelectorAll(".walkaway-wrong")) {
    one.classList.remove("walkaway-wrong");
    one.querySelector("[name]")?.removeAttribute("aria-invalid");
  }
}

function showError() {
  const input = wrong === null ? null : [...inputs(wrong.field)].at(-1); // the dialog's, if it is open
  if (!input) return;
  const { why } = wrong;
  wrong = null;
  const frame = frameOf(input);
  frame.classList.add("walkaway-wrong");
  const error = Object.assign(paragraph("walkaway-error", why, "walkaway-error"), { role: "alert" });
  frame.insertBefore(error, frame.querySelector(".walkaway-hint"));
  input.setAttribute("aria-invalid", "true");
  frame.closest(".MuiAccordion-root")?.querySelector("[aria-expanded=false]")?.click();
  input.focus();
  frame.scrollIntoView({ block: "center" });
}

function show(now) {
  extend();
  if (now.asked === asked) return; // of an earlier form
  const isNew = latest !== null && (now.asked !== latest.asked || now.why !== latest.why);
  latest = now;
  asked = null;
  say(now.told);
  box.classList.toggle("busy", now.is_busy);
  report.hidden = !now.has_report;
  if (!isNew) return;
  opensTab &&= now.why === null;
  wrong = now.field === null ? null : now;
  showError();
}

// The tab belongs to Locust: the charts stand between its tabs and its table.
function placeCharts() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const ours = tabs.find((tab) => tab.textContent === TAB);
  if (!ours) return;
  if (opensTab) ours.click();
  opensTab = false;
  let place = ours.closest("[role=tablist]");
  while (!place.parentElement.matches(".MuiContainer-root, main")) place = place.parentElement;
  if (charts.previousElementSibling !== place) place.after(charts);
  charts.hidden = ours.getAttribute("aria-selected") !== "true";
}

function extend() {
  FIELDS.forEach(describe);
  placeCharts();
  showError();
}

async function ask() {
  try {
    const answer = await fetch("./walkaway/now.json", { cache: "no-store" });
    if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
    show(await answer.json());
  } catch {
    say("This page is no longer served: has walkaway ended, or do you need to log in?");
    box.classList.remove("busy");
    asked = null;
  }
  setTimeout(ask, EVERY_MS);
}

// Locust's form waits for its answer without a word, and would send itself twice.
document.addEventListener("submit", (event) => {
  if (asked !== null) {
    event.preventDefault();
    event.stopPropagation();
    return;
  }
  asked = latest?.asked ?? 0;
  opensTab = true;
  wrong = null;
  clearErrors();
  say("starting …");
  box.classList.add("busy");
}, true);
document.addEventListener("input", clearErrors, true);
new MutationObserver(extend).observe(document.getElementById("root"), {
  childList: true, subtree: true, attributes: true, attributeFilter: ["aria-selected"],
});
extend();
ask();
