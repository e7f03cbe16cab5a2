"use strict";
// Lists single requests and shows one of them as a timeline. All text of a run becomes text nodes:
// nothing here is ever read as markup.
(() => {
  const ROWS_AT_ONCE = 25;
  const DASH = "\u2013";
  const runs = JSON.parse(document.getElementById("requests").textContent);

  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  const count = (value) => (value === null ? DASH : digits(value));
  const amount = (value, unit) => `${count(value)} ${value === 1 ? unit : `${unit}s`}`;
  const time = (ms) => {
    if (ms === null) return DASH;
    if (Math.abs(ms) >= 1000) return `${digits(ms / 1000)} s`;
    return Math.abs(ms) >= 1 || ms === 0 ? `${digits(ms)} ms` : `${digits(ms * 1000)} µs`;
  };

  // When something happened in a request: in milliseconds, with more digits than a duration.
  const stamp = (ms) => `${ms.toLocaleString("en", { maximumFractionDigits: ms < 10 ? 3 : 1 })} ms`;

  // A cell of the row of request `i`: its text, and the key by which it is sorted.
  const column = (of, name) => (i) => of.columns[name][i];
  const words = (of, name) => {
    const value = column(of, name);
    return { text: (i) => String(value(i) ?? DASH).replaceAll("_", " "), key: (i) => value(i) ?? "" };
  };
  const figure = (value, shown) => ({ text: (i) => shown(value(i)), key: value, isNumber: true });
  const letGo = (of) => {
    const value = column(of, "let_go_ms");
    const text = (i) => (of.columns.censored[i] ? "> " : "") + time(value(i));
    return { text, key: value, isNumber: true };
  };
  // A lower bound where the server still held the request when the watching ended.
  const wasted = (of, i, shown) => {
    const value = of.columns.wasted_tokens[i];
    return (value !== null && of.columns.is_unfinished[i] ? "\u2265 " : "") + shown(value);
  };
  const wrong = (of) => {
    const text = (i) => of.columns.error[i] ?? (of.columns.ghost[i] ? "never stopped (a ghost)" : "");
    return { text, key: text };
  };
  const headings = (of) => ({
    request: { text: column(of, "request_id"), key: column(of, "request_id") },
    outcome: words(of, "outcome"),
    plan: words(of, "plan"),
    way: words(of, "way"),
    "tokens read": figure(column(of, "tokens_read"), count),
    "first token": figure((i) => of.stamps.first_token[i], time),
    "let go after": letGo(of),
    "tokens wasted": {
      text: (i) => wasted(of, i, count),
      key: column(of, "wasted_tokens"),
      isNumber: true,
    },
    "what was wrong": wrong(of),
  });
  const SEARCHED = ["request_id", "arm", "role", "outcome", "plan", "way", "error", "phase", "finish_reason"];

  // Moments in the life of a request: the side that saw it, and in words.
  const MOMENTS = {
    intended: ["client", "was to be sent"],
    arrived: ["server", "it reached the server"],
    admitted: ["server", "got a batch slot"],
    preempted: ["server", "preempted: its blocks were taken"],
    resumed: ["server", "resumed"],
    first_token: ["client", "first token read"],
    last_token: ["client", "last token read"],
    left: ["client", "the user left"],
    saw: ["server", "the server saw it"],
    heard: ["server", "the worker heard of it"],
    removed: ["server", "out of the batch"],
    freed: ["server", "blocks reclaimed"],
    ended: ["client", "over for the client"],
  };
  const KEY =
    "Striped: waiting for a slot. Blue: served, with a line for each token read (for many, some of them). Hatched: held after the " +
    "user left, up to an arrow where no end was seen. The numbers refer to the list below, which gives the time since the request was sent.";
  const momentsOf = (of, i) => {
    const found = [{ at: 0, side: "client", text: "sent" }];
    for (const [name, [side, text]] of Object.entries(MOMENTS)) {
      const at = of.stamps[name]?.[i] ?? null;
      if (at !== null && !(name === "intended" && Math.abs(at) < 1)) found.push({ at, side, text });
    }
    return found.sort((one, other) => one.at - other.at);
  };

  // A line of time from `from` to `to`. Marks that would cover each other share one: "5-8".
  const track = (moments, ticks, spans, from, to, label) => {
    const place = (at) => `${(100 * (at - from)) / (to - from || 1)}%`;
    const line = make("div", { className: "track" });
    line.setAttribute("role", "img");
    line.setAttribute("aria-label", label);
    for (const { kind, begin, end } of spans) {
      if (begin === null || end === null || end <= Math.max(begin, from) || begin >= to) continue;
      const span = line.appendChild(make("i", { className: `span ${kind}` }));
      span.style.left = place(Math.max(begin, from));
      span.style.right = `calc(100% - ${place(Math.min(end, to))})`;
    }
    for (const at of ticks) {
      if (at < from || at > to) continue;
      line.appendChild(make("i", { className: "tick" })).style.left = place(at);
    }
    let last = { at: -Infinity };
    moments.forEach(({ at, side }, n) => {
      if (at < from || at > to) return;
      if ((at - last.at) / (to - from || 1) < 0.08) {
        last.mark.textContent = `${last.number}\u2013${n + 1}`;
        return;
      }
      const mark = line.appendChild(make("b", { className: side }, String(n + 1)));
      mark.style.left = place(at);
      last = { at, mark, number: n + 1 };
    });
    return make("figure", {}, line, make("figcaption", {}, label));
  };
  const earliest = (...stamps) => {
    const known = stamps.filter((at) => at !== null);
    return known.length ? Math.min(...known) : null;
  };
  const tracksOf = (of, i, moments) => {
    const at = (name) => of.stamps[name]?.[i] ?? null;
    const [left, ended] = [at("left"), at("ended")];
    const begun = at("admitted") ?? at("first_token");
    const over = at("freed") ?? at("removed") ?? (left === null ? ended : null);
    const seen = Math.max(...moments.map((moment) => moment.at));
    const isOpen = left !== null && over === null && Boolean(of.columns.censored[i] || of.columns.ghost[i]);
    const watched = isOpen ? left + (of.columns.let_go_ms[i] ?? 1000 * of.watched_s) : seen;
    const last = Math.max(seen, watched);
    const spans = [
      { kind: "queued", begin: 0, end: earliest(begun, left) ?? ended },
      { kind: "served", begin: begun, end: left ?? over ?? ended },
      { kind: isOpen ? "held open" : "held", begin: left, end: isOpen ? last : over },
    ];
    const from = Math.min(0, moments[0].at);
    const more = isOpen ? "> " : "";
    const unseen = isOpen ? "; its end was never seen" : "";
    const length = `${more}${time(last - from)} in all${unseen}`;
    const drawn = [track(moments, of.ticks[i], spans, from, last, `The whole request, ${length}.`)];
    if (left !== null && last > left) {
      const zoomed = `From the user's leaving on: ${more}${time(last - left)}${unseen}.`;
      drawn.push(track(moments, of.ticks[i], spans, left, last, zoomed));
    }
    return drawn;
  };

  const letGoInWords = (of, i) => {
    const [ms, steps] = [of.columns.let_go_ms[i], of.columns.cancel_latency_steps[i]];
    if (ms === null) return DASH;
    if (of.columns.censored[i]) return `never while it was watched: counts as longer than ${time(ms)}`;
    return steps === null ? time(ms) : `${time(ms)}, ${amount(steps, "engine step")}`;
  };

  const factsOf = (of, i) => {
    const value = (name) => of.columns[name][i];
    const seen = value("outcome").replaceAll("_", " ");
    const facts = [
      ["outcome", value("ghost") ? `${seen}; a ghost: not stopped within ${of.watched_s} s` : seen],
      ["plan", value("plan") || DASH],
      ["left by", [value("way"), value("wire_close")].filter(Boolean).join(", on the wire ") || DASH],
      ["was", value("phase") === null ? DASH : `in ${value("phase")} when its user left`],
      ["prompt", amount(value("prompt_tokens"), "token")],
      ["read", `${count(value("tokens_read"))} of at most ${amount(value("max_tokens"), "token")}`],
      ["wasted", `${wasted(of, i, (tokens) => amount(tokens, "token"))} generated and never read`],
      ["let go after", letGoInWords(of, i)],
      ["server said", value("finish_reason") ?? DASH],
      ["arm, role", `${value("arm")}, ${value("role")}`],
      ["HTTP status", value("status_code") === null ? DASH : String(value("status_code"))],
      ["error", value("error") ?? "none"],
    ];
    return make("dl", {}, ...facts.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]));
  };
  const listOf = (of, i, moments) => {
    const left = of.stamps.left[i];
    const since = (at) => (left === null || at <= left ? "" : ` (${time(at - left)} after leaving)`);
    return make(
      "ol",
      { className: "moments" },
      ...moments.map(({ at, side, text }) =>
        make("li", {}, make("b", { className: side }, side), ` ${stamp(at)}: ${text}${since(at)}`),
      ),
    );
  };

  const setUp = (section) => {
    const anchor = section.dataset.run;
    const of = runs[anchor];
    const [find, found] = [section.querySelector("input"), section.querySelector("[role=status]")];
    const [head, body] = [section.querySelector("thead"), section.querySelector("tbody")];
    const [earlier, later] = section.querySelectorAll(".pager button");
    const panel = section.querySelector(".one");
    const level = `h${Number(section.querySelector("h2, h3").tagName[1]) + 1}`;
    const columns = headings(of);
    const sides = Object.values(columns).map((one) => (one.isNumber ? "n" : "")); // as in `tables.html.j2`
    const all = of.columns.request_id.map((_, i) => i);
    const texts = all.map((i) =>
      SEARCHED.map((name) => of.columns[name][i] ?? "").concat(of.columns.ghost[i] ? "ghost" : "").join(" ").toLowerCase(),
    );
    const state = { first: 0, sorted: null, falls: false, shown: all };
    const link = (i) => `#${anchor}-request-${encodeURIComponent(of.columns.request_id[i])}`;

    const fill = () => {
      const some = state.shown.slice(state.first, state.first + ROWS_AT_ONCE);
      body.replaceChildren(
        ...some.map((i) => {
          const [name, ...cells] = Object.values(columns).map((one) => one.text(i));
          const open = make("a", { href: link(i) }, name);
          const row = make("tr", {}, make("th", { scope: "row" }, open));
          row.append(...cells.map((text, place) => make("td", { className: sides[place + 1] }, text)));
          row.addEventListener("click", () => { location.hash = link(i); });
          return row;
        }),
      );
      const end = state.first + some.length;
      const which = some.length ? `${state.first + 1} to ${end} of ${state.shown.length}` : "none";
      found.textContent = `${which} shown; ${all.length} are listed.`;
      earlier.disabled = state.first === 0;
      later.disabled = end >= state.shown.length;
    };
    const choose = () => {
      const wanted = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      state.shown = all.filter((i) => wanted.every((word) => texts[i].includes(word)));
      const key = columns[state.sorted]?.key;
      if (key) {
        const isEmpty = (value) => value === null || value === "";
        const compare = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
        state.shown.sort((i, j) => {
          const [a, b] = [key(i), key(j)];
          if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
          return state.falls ? compare(b, a) : compare(a, b);
        });
      }
      state.first = 0;
      fill();
    };
    const title = (name) => {
      const button = make("button", { type: "button" }, name);
      const cell = make("th", { scope: "col", className: columns[name].isNumber ? "n" : "" }, button);
      button.addEventListener("click", () => {
        state.falls = state.sorted === name ? !state.falls : Boolean(columns[name].isNumber);
        state.sorted = name;
        for (const one of head.querySelectorAll("th")) one.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", state.falls ? "descending" : "ascending");
        choose();
      });
      return cell;
    };
    const turn = (by) => () => {
      state.first += by;
      fill();
    };
    const open = (i) => {
      const moments = momentsOf(of, i);
      const heading = make(level, { tabIndex: -1 }, "Request ", make("code", {}, of.columns.request_id[i]));
      const listed = i < of.worst ? `number ${i + 1} of the worst` : "one of the sample";
      const close = make("a", { href: `#${section.id}` }, "back to the list");
      panel.replaceChildren(
        heading,
        make("p", { className: "shows" }, `${KEY} In this list it is ${listed}. `, close),
        ...tracksOf(of, i, moments),
        make("div", { className: "columns" }, listOf(of, i, moments), factsOf(of, i)),
      );
      panel.hidden = false;
      heading.focus();
      panel.scrollIntoView();
    };
    const follow = () => {
      const before = `#${anchor}-request-`;
      if (!location.hash.startsWith(before)) {
        panel.hidden = true;
        return;
      }
      const i = all.findIndex((one) => link(one) === location.hash);
      if (i >= 0) {
        open(i);
      } else {
        found.textContent = "That request is not among the requests listed here.";
        section.scrollIntoView();
      }
    };

    head.append(make("tr", {}, ...Object.keys(columns).map(title)));
    find.addEventListener("input", choose);
    earlier.addEventListener("click", turn(-ROWS_AT_ONCE));
    later.addEventListener("click", turn(ROWS_AT_ONCE));
    addEventListener("hashchange", follow);
    section.querySelector(".listing").hidden = false;
    fill();
    follow();
  };
  document.querySelectorAll("section.requests").forEach(setUp);
})();
