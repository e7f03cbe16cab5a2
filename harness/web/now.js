"use strict";
// On each page of Locust: what walkaway does now, and the report of the last run.

const EVERY_MS = 1000;
const LONGEST_MS = 3000; // until the server knows of a form that was sent
const [said, report] = document.querySelectorAll("#walkaway-now [role=status], #walkaway-now a");
let shown = "";
let sentAt = -Infinity;

// Only what has changed: a screen reader says it aloud.
function say(text) {
  if (said.textContent !== text) said.textContent = text;
}

async function ask() {
  try {
    const answer = await fetch("./walkaway/now.json", { cache: "no-store" });
    if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
    const now = await answer.json();
    const isOld = now.told === shown && performance.now() - sentAt < LONGEST_MS;
    if (!isOld) {
      shown = now.told;
      say(shown);
    }
    report.hidden = !now.has_report;
  } catch {
    say("This page is no longer served: has walkaway ended, or do you need to log in?");
  }
  setTimeout(ask, EVERY_MS);
}

// Locust's form waits for its answer without a word.
document.addEventListener("submit", () => {
  sentAt = performance.now();
  say("starting …");
}, true);
ask();
