// Brings the page together: the event stream, the parts of the document, the pointer and the keys. Texts are set as text, never as markup.

import { drawHeat, drawLanes, drawSteps, swatch } from "./canvas.js";
import { Spark, large } from "./curves.js";
import { State, entryOf } from "./state.js";
import { count, duration, figure, percent, seconds } from "./words.js";

const SILENT_MS = 6000;
const state = new State();
const byId = (id) => document.getElementById(id);
const made = (tag, text, name) => Object.assign(document.createElement(tag), { textContent: text ?? "", className: name ?? "" });
const words = { computing: "working", waiting: "waiting", idle: "without samples", joining: "joining", absent: "away", dead: "dead", awaited: "not come yet" };
let heardAt = performance.now();
let cursor = null;
let lanes = null;
let heat = null;
let curve = null;

// The figures.

const FIGURES = [
  ["samples_per_s", "samples/s"],
  ["version", "version"],
  ["waiting", "waiting"],
  ["loss", "loss"],
  ["alive", "workers alive"],
];
const cards = new Map();
for (const [name, label] of FIGURES) {
  const card = made("button", "", "card kpi");
  const [number, sub, spark] = [made("span", "–", "number"), made("span", "", "sub"), made("span", "", "spark")];
  card.append(made("span", label, "label"), number, sub, spark);
  card.setAttribute("aria-expanded", "false");
  card.addEventListener("click", () => openCurve(name, label));
  byId("kpis").append(card);
  cards.set(name, { card, number, sub, spark: new Spark(spark) });
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function showFigures() {
  const last = (name, most = 1) => mean((state.recent[name]?.[1] ?? []).slice(-most));
  const set = (name, number, sub) => {
    cards.get(name).number.textContent = number;
    cards.get(name).sub.textContent = sub;
    if (state.recent[name]) cards.get(name).spark.draw(state.recent[name], { zero: name !== "loss" && name !== "version" });
  };
  const { job } = state;
  const all = job?.workers.all ?? 0;
  const [times, versions] = state.recent.version ?? [[], []];
  const span = times.length > 1 ? times.at(-1) - times.at(-Math.min(times.length, 6)) : 0;
  const rate = span > 0 ? (versions.at(-1) - versions.at(-Math.min(times.length, 6))) / span : null;
  set("samples_per_s", figure(last("samples_per_s", 5)), state.recent.samples_per_s ? "over the last seconds" : "the script does not say samples");
  set("version", versions.length ? count(versions.at(-1)) : "–", rate === null ? "" : `${figure(rate)} a second`);
  set("waiting", percent(last("waiting", 5)), "of the workers' time");
  set("loss", figure(last("loss")), state.recent.loss ? "mean over workers" : "not logged");
  set("alive", `${count(last("alive") ?? 0)} of ${count(all)}`, job?.died ? `${count(job.died)} death${job.died > 1 ? "s" : ""} so far` : "no deaths");
}

async function openCurve(name, label) {
  curve = { name, label };
  byId("curve").hidden = false;
  byId("curve-name").textContent = label;
  for (const [other, { card }] of cards) card.setAttribute("aria-expanded", String(other === name));
  await drawCurve();
}

async function drawCurve() {
  if (!curve) return;
  const wanted = curve;
  const answer = await fetch(`levels?name=${encodeURIComponent(wanted.name)}`).catch(() => null);
  if (!answer?.ok || curve !== wanted) return;
  const levels = await answer.json();
  byId("curve-width").textContent = seconds(levels.width);
  large(byId("curve-plot"), levels, wanted.label);
}

function closeCurve() {
  curve = null;
  byId("curve").hidden = true;
  for (const { card } of cards.values()) card.setAttribute("aria-expanded", "false");
}

// The verdict, the workers and what is said in words.

function culprits() {
  return new Set((state.job?.verdicts ?? []).filter((one) => one.kind === "slow").flatMap((one) => one.workers));
}

function showVerdict() {
  const { job } = state;
  const [first, ...others] = job.verdicts;
  const failed = job.ok === false;
  byId("verdict").classList.toggle("calm", !first && !failed);
  const lines = [];
  if (failed) lines.push(made("p", `The job failed: ${job.reason}.`));
  if (first) {
    const since = first.since_s === null ? "" : `, since ${duration(first.since_s)} after the start`;
    byId("what").textContent = first.what;
    lines.push(made("p", `${sentence(first.evidence)} In all ${seconds(first.cost_s)} of ${seconds(job.seconds)}${since}.`));
    if (first.remedy) lines.push(made("p", `Remedy: ${first.remedy}${first.worth >= job.least ? `, worth up to ${percent(first.worth)}` : ""}.`));
  } else if (job.folds < 5) {
    byId("what").textContent = job.folds ? "Too few versions for a verdict yet" : "The job has made no version yet";
  } else {
    byId("what").textContent = `Nothing costs this job ${percent(job.least)} of its time`;
    lines.push(made("p", `No worker is late enough that the others lose ${percent(job.least)}, in ${count(job.folds)} versions.`, "mute"));
  }
  for (const text of [...others.map((one) => one.sentence), ...job.deaths]) lines.push(made("p", text, "mute"));
  byId("why").replaceChildren(...lines);
  byId("notes").replaceChildren(...job.notes.map((text) => made("p", text, "note")));
}

function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}

function showWorkers() {
  const { rows, all, median } = state.job.workers;
  const hits = culprits();
  const body = byId("workers");
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.worker : null;
  const cell = (text, name) => made("td", text, name);
  body.replaceChildren(
    ...rows.map((row) => {
      const line = made("tr", "", `${hits.has(row.worker) ? "hit" : ""} ${row.worker === state.chosen ? "chosen" : ""}`);
      const button = made("button", `${hits.has(row.worker) ? "▸ " : ""}worker ${row.worker}`);
      button.dataset.worker = row.worker;
      button.title = row.host ? `on ${row.host}` : "";
      button.addEventListener("click", () => choose(row.worker));
      const first = cell("");
      first.append(button);
      line.append(
        first,
        cell(state.over && !["dead", "awaited"].includes(row.doing) ? "–" : words[row.doing] ?? row.doing, "left"),
        cell(seconds(row.step)),
        cell(row.ratio === null ? "–" : `${row.ratio.toFixed(1)}x`),
        cell(row.longest === null ? "–" : `${row.longest[0]} ${percent(row.longest[1])}`, "left"),
        cell(percent(row.waiting)),
        cell(count(row.folded)),
        cell(percent(row.cost)),
      );
      return line;
    }),
  );
  if (focused !== null) body.querySelector(`[data-worker="${Number(focused)}"]`)?.focus();
  const more = all - rows.length;
  byId("workers-about").textContent = more > 0 ? `those that cost most; ${count(more)} more cost less` : `those that cost most first; usual: ${seconds(median)}`;
}

function showEvents() {
  const list = byId("events");
  const lines = state.events.slice().reverse().map(([t, text]) => {
    const line = made("li");
    line.append(made("time", seconds(t)), made("span", text));
    return line;
  });
  list.replaceChildren(...(lines.length ? lines : [made("li", "Nothing out of the ordinary.", "mute")]));
}

function showMetrics() {
  const { values, more } = state.job.metrics;
  byId("metrics-card").hidden = values.length === 0;
  byId("metrics-more").textContent = more > 0 ? `the first ${values.length} names; ${count(more)} more are not shown` : "newest values; press one for its curve";
  byId("metrics").replaceChildren(
    ...values.map(([curve, name, value]) => {
      const line = made("li");
      const button = made("button");
      button.append(made("span", name), made("span", figure(value)));
      button.addEventListener("click", () => openCurve(curve, name));
      line.append(button);
      return line;
    }),
  );
}

function showAdvice() {
  const rows = state.job.advice;
  const { advisable } = state.job;
  byId("advice-card").hidden = rows.length === 0 && !advisable;
  byId("advice-ask").hidden = !advisable || (rows.length > 0 && state.over);
  byId("advice-ask").disabled = advisable === "asked";
  byId("advice-ask").textContent = advisable === "asked" ? "simulating…" : rows.length ? "simulate again" : "simulate the run so far";
  byId("advice-table").hidden = rows.length === 0;
  if (!rows.length) return;
  byId("advice").replaceChildren(
    ...rows.filter((row) => row.name).map((row) => {
      const line = made("tr");
      const cells = [row.rate, `${row.ratio.toFixed(2)}x`, row.waiting, row.dropped, row.staleness].map((text) => made("td", text));
      line.append(made("td", row.measured ? `${row.name}, measured` : row.name, "left"), ...cells);
      return line;
    }),
  );
  byId("advice-said").replaceChildren(...rows[0].notes.map((text) => made("p", text, "said")));
}

function showHead() {
  const { job } = state;
  const life = byId("life");
  const silent = performance.now() - heardAt > SILENT_MS;
  const said = job?.ok === false ? ["✗ failed", "bad"] : state.over ? ["✓ ended", "ok"] : silent ? ["no answer", "bad"] : state.live ? ["● live", "ok"] : ["○ not live", ""];
  if (life.textContent !== said[0]) [life.textContent, life.className] = [said[0], `pill ${said[1]}`];
  if (silent && !state.over) life.title = "The page's server does not answer. Training does not depend on it.";
  if (!job) return;
  byId("script").textContent = job.job.source || job.job.script;
  byId("rule").textContent = job.job.sync ?? "";
  byId("size").textContent = job.job.workers ? `${count(job.job.workers)} worker${job.job.workers > 1 ? "s" : ""}${job.job.started === "simulated" ? " (simulated)" : ""}` : "";
  byId("elapsed").textContent = `${duration(state.now(performance.now()))} since the start`;
  document.title = `${job.verdicts[0] ? "▸ " : ""}${job.job.script || job.job.source} – offbeat`;
}

// The pictures.

function showLanes() {
  const extra = state.chosen !== null && !state.shown.includes(state.chosen) ? [state.chosen] : [];
  lanes = drawLanes(byId("lanes"), state, [...extra, ...state.shown], culprits(), performance.now());
  const kinds = state.order.filter((kind) => lanes.seen.has(kind));
  const key = kinds.join() + document.documentElement.dataset.theme;
  if (byId("legend").dataset.key === key) return;
  byId("legend").dataset.key = key;
  const names = { wait: "waiting for the job", work: "in a step, not divided yet", gc: "garbage collection", own: "own code", data: "DataLoader", awaited: "not come yet" };
  byId("legend").replaceChildren(
    ...kinds.map((kind) => {
      const line = made("li");
      line.append(made("canvas"), made("span", names[kind] ?? kind));
      return line;
    }),
  );
  kinds.forEach((kind, at) => swatch(byId("legend").children[at].firstChild, kind));
}

function showHeat() {
  byId("heat-card").hidden = !state.heat;
  byId("steps-card").hidden = !state.job?.steps;
  if (state.job?.steps) drawSteps(byId("steps"), state.job.steps);
  if (!state.heat) return;
  const each = state.heat.rows[0].length;
  byId("heat-about").textContent = `a row ${each > 1 ? `for ${each} workers, the slowest counts` : "each"}; colour: slower than the median at that time; grey: dead`;
  byId("lanes-about").textContent = "of the workers that cost most; height: working, thin line: waiting";
  heat = drawHeat(byId("heat"), state, state.job.marks, cursor ?? (state.chosen === null ? null : state.heat.rowOf.get(state.chosen)));
}

function sayRow(row, column) {
  const workers = state.heat.rows[row];
  const ratio = state.ratio(row, column);
  const how = ratio === null ? "no step" : ratio === "dead" ? "dead" : `${ratio.toFixed(1)} times the median step`;
  return `worker${workers.length > 1 ? "s" : ""} ${workers.join(", ")} at ${seconds(column * state.heat.width)}: ${how}`;
}

let drawn = 0;
function draw(everything) {
  showHead();
  showLanes();
  if (!everything || !state.job) return;
  showVerdict();
  showFigures();
  showWorkers();
  showEvents();
  showMetrics();
  showAdvice();
  showHeat();
  drawn += 1;
  document.documentElement.dataset.drawn = drawn;
}

// A worker that is chosen has a lane; if the stream does not have it, it is asked for.

function choose(worker) {
  state.chosen = state.chosen === worker ? null : worker;
  state.extra = null;
  cursor = null;
  askLane();
  draw(true);
}

async function askLane() {
  const worker = state.chosen;
  if (worker === null || state.shown.includes(worker)) return;
  const answer = await fetch(`lane?worker=${worker}`).catch(() => null);
  if (!answer?.ok || state.chosen !== worker) return;
  const { entries, tail } = await answer.json();
  state.extra = { worker, entries: entries.map(entryOf), tail };
  showLanes();
}

// The stream.

const stream = new EventSource("events");
stream.addEventListener("message", (event) => {
  const message = JSON.parse(event.data);
  heardAt = performance.now();
  state.apply(message, heardAt);
  draw(Boolean(message.whole || message.state || message.events || message.samples || message.heat));
});
stream.addEventListener("error", () => {
  if (state.over) stream.close(); // the job has ended, and its server with it: the page stays as it is
  showHead();
});
setInterval(() => {
  if (!document.hidden) showHead();
  if (!state.over) askLane();
}, 1000);
setInterval(() => !state.over && drawCurve(), 3000);
addEventListener("resize", () => draw(true));

// Pointer, keys, light and dark.

const tip = byId("tip");
function point(event, text) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 16}px`;
}
byId("lanes").addEventListener("mousemove", (event) => point(event, lanes?.find(event.offsetX, event.offsetY)));
byId("lanes").addEventListener("mouseleave", (event) => point(event, null));
byId("heat").addEventListener("mousemove", (event) => {
  const inside = heat?.inside(event.offsetX, event.offsetY);
  point(event, inside ? sayRow(heat.rowAt(event.offsetY), heat.columnAt(event.offsetX)) : null);
});
byId("heat").addEventListener("mouseleave", (event) => point(event, null));
byId("heat").addEventListener("click", (event) => {
  if (heat?.inside(event.offsetX, event.offsetY)) choose(state.heat.rows[heat.rowAt(event.offsetY)][0]);
});
byId("heat").addEventListener("keydown", (event) => {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 25, PageUp: -25 };
  if (event.key === "Enter" && cursor !== null) choose(state.heat.rows[cursor][0]);
  else if (event.key in steps) cursor = Math.min(state.heat.rows.length - 1, Math.max(0, (cursor ?? -1) + steps[event.key]));
  else return;
  event.preventDefault();
  if (cursor !== null) byId("heat-said").textContent = sayRow(cursor, Math.max(0, ...state.heat.columns.keys()));
  showHeat();
});
byId("advice-ask").addEventListener("click", () => fetch("advice", { method: "POST" }).catch(() => null));
byId("curve-close").addEventListener("click", closeCurve);

function turnTheme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  setTheme(dark === "dark" ? "light" : "dark");
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("offbeat-theme", theme);
  } catch {
    // a browser that keeps nothing
  }
  draw(true);
  drawCurve();
}
byId("theme").addEventListener("click", turnTheme);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") turnTheme();
  else if (event.key === "Escape") {
    closeCurve();
    if (state.chosen !== null) choose(state.chosen);
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
try {
  const kept = localStorage.getItem("offbeat-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // as above
}
