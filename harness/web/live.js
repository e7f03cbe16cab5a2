"use strict";
// Asks for what is known of the run and draws it. All text goes in as text, never as markup. In the
// tab of Locust's page stand the two charts that say most, above Locust's own table of the figures.

const EVERY_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220;
const FRAME = window.frameElement; // in the tab
const EDGE = { left: 52, right: 10, top: 22, bottom: 24 };

function element(name, attributes, text) {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text !== undefined) one.textContent = text;
  return one;
}

function short(value) {
  return value >= 1000 ? value.toLocaleString("en") : String(Number(value.toPrecision(3)));
}

// Round numbers between which `highest` lies: 1, 2 or 5 times a power of ten apart.
function ticksTo(highest) {
  const rough = highest / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let tick = 0; tick <= highest + step * 0.999; tick += step) ticks.push(tick);
  return ticks;
}

function powersAround(lowest, highest) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(lowest)); ; power += 1) {
    ticks.push(10 ** power);
    if (10 ** power >= highest && ticks.length > 1) return ticks;
  }
}

// An empty picture: axes, and where a point goes. `ticks` are marks of the vertical axis.
function canvas(place, { label, unit, seconds, ticks, isLog = false }) {
  const width = Math.max(280, place.clientWidth);
  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  const scale = isLog ? Math.log10 : Number;
  const [low, high] = [scale(ticks[0]), scale(ticks[ticks.length - 1])];
  const x = (t) => EDGE.left + (t / seconds) * (width - EDGE.left - EDGE.right);
  const y = (v) =>
    HEIGHT - EDGE.bottom - ((scale(v) - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  for (const tick of ticks) {
    const at = y(tick);
    svg.append(element("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: "grid" }));
    svg.append(element("text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticksTo(seconds).filter((t) => t <= seconds)) {
    const anchor = x(tick) > width - 2 * EDGE.right ? "end" : "middle"; // else the last is cut off
    svg.append(element("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": anchor }, `${short(tick)} s`));
  }
  svg.append(element("text", { x: EDGE.left, y: 13 }, unit));
  place.replaceChildren(svg);
  return { svg, x, y, edges: { start: EDGE.left, end: width - EDGE.right } };
}

// `isStepped`: what was seen holds until the next look, and is no slope.
function line({ svg, x, y }, points, key, look, { isStepped = false } = {}) {
  let path = "";
  let isDrawing = false;
  for (const point of points) {
    const value = point[key];
    if (value !== null && value !== undefined) {
      const [across, up] = [x(point.t).toFixed(1), y(value).toFixed(1)];
      if (isDrawing && isStepped) path += `H${across}V${up}`;
      else path += `${isDrawing ? "L" : "M"}${across} ${up}`;
    }
    isDrawing = value !== null && value !== undefined;
  }
  svg.append(element("path", { d: path, class: look }));
}

// A line across the picture with its name above it: `side` is "start" or "end".
function level({ svg, y, edges }, value, name, look, side) {
  const at = y(value);
  svg.append(element("line", { x1: edges.start, x2: edges.end, y1: at, y2: at, class: `level ${look}` }));
  svg.append(element("text", { x: edges[side], y: at - 4, "text-anchor": side }, name));
}

function nothing(place, why) {
  const text = document.createElement("p");
  text.textContent = why;
  place.replaceChildren(text);
}

function highest(points, ...keys) {
  return Math.max(1e-9, ...points.flatMap((point) => keys.map((key) => point[key] ?? 0)));
}

function drawSlots(live, seconds) {
  const place = document.getElementById("slots");
  const points = live.points.kept;
  if (!points.some((point) => point.running != null)) {
    return nothing(place, "This server’s metrics page shows no slots, or is not read.");
  }
  const label = `requests in slots and in the queue, and ${live.outcomes.abandoned} abandoned requests`;
  const ticks = ticksTo(Math.max(live.slots ?? 0, highest(points, "running", "waiting")));
  const picture = canvas(place, { label, unit: "requests", seconds, ticks });
  for (const t of live.leaves.kept) {
    const at = picture.x(t);
    const stroke = { x1: at, x2: at, y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom - 10 };
    picture.svg.append(element("line", { ...stroke, class: "mark vermilion" }));
  }
  if (live.slots) level(picture, live.slots, `${live.slots} slots`, "soft", "end");
  line(picture, points, "waiting", "orange dashed", { isStepped: true });
  line(picture, points, "running", "blue", { isStepped: true });
}

function drawLatency(live, seconds) {
  const place = document.getElementById("latency");
  if (!live.has_log) {
    return nothing(place, "This server does not show when it frees a request: the report estimates it.");
  }
  const latencies = live.latencies.kept;
  if (!latencies.length) return nothing(place, "No abandoned request has been freed yet.");
  const values = latencies.map(([, ms]) => Math.max(ms, 1e-3));
  const [step, lag] = [live.step_s * 1e3, live.lag_ms.p99];
  const hasBelow = lag !== null && lag > Math.min(...values);
  const marked = [...values, ...(step ? [step] : []), ...(hasBelow ? [lag] : [])];
  const ticks = powersAround(Math.min(...marked), Math.max(...marked));
  const label = `cancel latency of ${values.length} abandoned requests, ${values.at(-1).toPrecision(3)} ms the last`;
  const picture = canvas(place, { label, unit: "ms", seconds, ticks, isLog: true });
  latencies.forEach(([t], i) => {
    const look = hasBelow && values[i] < lag ? "blue hollow" : "blue";
    const point = { cx: picture.x(t), cy: picture.y(values[i]), r: 2.5, class: look };
    picture.svg.append(element("circle", point));
  });
  if (step) level(picture, step, `one step: ${short(step)} ms`, "soft", "start");
  if (hasBelow) level(picture, lag, `client lag, p99: ${short(lag)} ms`, "green", "end");
}

function drawLine(id, live, seconds, { key, unit, label, look, missing }) {
  const place = document.getElementById(id);
  const points = live.points.kept;
  if (!points.some((point) => point[key] != null)) return nothing(place, missing);
  const picture = canvas(place, { label, unit, seconds, ticks: ticksTo(highest(points, key)) });
  line(picture, points, key, look);
}

function draw(live) {
  const seconds = Math.max(1, live.elapsed_s);
  drawSlots(live, seconds);
  drawLatency(live, seconds);
  drawLine("wasted", live, seconds, {
    key: "wasted", unit: "tokens", label: "wasted tokens so far", look: "vermilion",
    missing: "This server does not count tokens by request: the report estimates them.",
  });
  drawLine("lag", live, seconds, {
    key: "lag_ms", unit: "ms", label: "client lag", look: "green", missing: "No tick was seen yet.",
  });
  document.getElementById("thinned").textContent =
    `Drawn: a point every ${short(live.points.every * 0.5)} s; of abandoned requests, a stroke for ` +
    `${oneIn(live.leaves.every)} and a latency for ${oneIn(live.latencies.every)}.`;
}

function oneIn(every) {
  return every === 1 ? "each" : `one in ${short(every)}`;
}

function clear() {
  for (const place of document.querySelectorAll(".plot")) nothing(place, "Nothing was seen yet.");
  document.getElementById("thinned").textContent = "";
}

function tabulate(rows) {
  const body = document.getElementById("rows");
  body.replaceChildren(
    ...rows.map((row) => {
      const line = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = row.figure;
      line.append(head);
      for (const text of [row.value, row.about]) {
        line.append(Object.assign(document.createElement("td"), { textContent: text }));
      }
      return line;
    }),
  );
}

// Only what has changed: a screen reader says it aloud.
function say(text, { isBad }) {
  const state = document.getElementById("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = isBad ? "bad" : "";
}

function show(shown) {
  say(shown.run ? `${shown.run}: ${shown.told}` : shown.told, { isBad: Boolean(shown.why || shown.refused || shown.not_started) });
  const isRunning = shown.live && shown.state === "running";
  document.getElementById("since").textContent =
    isRunning ? `(${short(Math.round(shown.live.elapsed_s))} s so far)` : "";
  for (const id of ["report", "download"]) document.getElementById(id).hidden = !shown.report;
  document.getElementById("figures-title").textContent =
    shown.state === "done" ? "The run’s figures" : "So far";
  tabulate(shown.rows ?? []);
  if (shown.live) draw(shown.live);
  else clear();
  if (FRAME) fit();
}

function fit() {
  document.documentElement.style.colorScheme = localStorage.theme ?? ""; // as Locust's page
  FRAME.style.height = `${document.documentElement.offsetHeight}px`;
}

async function ask() {
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
    show(await answer.json());
  } catch {
    const text = "The test’s page does not answer: has it ended, or do you need to log in?";
    say(text, { isBad: true });
  }
  setTimeout(ask, EVERY_MS);
}

if (FRAME) {
  document.body.classList.add("in-tab");
  for (const link of document.links) link.target = "_blank";
}
ask();
