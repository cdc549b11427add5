// Bring the page together: messages of a server, or the one that a file holds; the figures, the sections, the pointer and the keys.
const SILENT_MS = 6000, root = document.documentElement, pushes = new Pushes(), story = new Story(pushes), cards = new Map();
let timeline = null, heat = null, curve = null, heardAt = performance.now();

// Take a message. Sections come as markup in which the template has escaped every text; the policy lets none of it run.
async function take(message, text) {
  const columns = message.packed ? await unpack(message.packed, text ?? message.packed.text) : null;
  heardAt = performance.now();
  if (message.whole) { Object.assign(pushes, new Pushes()); D.recent = message.recent; }
  const { html, packed, samples, recent, ...state } = message;
  if (state.t !== D.t) D.movedAt = heardAt - 1000 * (state.age || 0);
  if (message.whole) D.tails = {};
  Object.assign(D, state, { tails: { ...D.tails, ...state.tails } });
  if (columns) pushes.take(columns, packed);
  for (const name in html || {}) section(name, html[name]);
  for (const [t, ...values] of samples || []) values.forEach((value, at) => {
    if (value === null) return;
    const list = (D.recent[FIGURES[at]] ||= []);
    list.push([t, value]);
    if (list.length > RECENT) list.shift();
  });
}
function section(name, html) {
  const box = $(name), focus = box.contains(document.activeElement) ? document.activeElement.dataset : null;
  box.replaceChildren(document.createRange().createContextualFragment(html));
  box.hidden = !html;
  lengths(box);
  const again = focus && (focus.worker ? `[data-worker="${focus.worker}"]` : focus.curve ? `[data-curve="${focus.curve}"]` : "");
  if (again) box.querySelector(again)?.focus();
}
function lengths(box) {
  for (const what of ["width", "height"]) for (const e of box.querySelectorAll(`[data-${what}]`)) e.style[what] = e.dataset[what];
}

// The five figures, and their curves over the whole job.
function figures() {
  $("kpis").hidden = !(D.figures || []).length;
  for (const [name, label, number, sub] of D.figures || []) {
    if (!cards.has(name)) {
      const card = made("button", "", "card kpi"), parts = { number: made("span", "", "number"), sub: made("span", "", "sub"), spark: made("span", "", "spark") };
      card.append(made("span", label, "label"), parts.number, parts.sub, parts.spark);
      card.type = "button"; card.dataset.curve = name; card.dataset.label = label;
      $("kpis").append(card);
      cards.set(name, { ...parts, card, curve: new Spark(parts.spark) });
    }
    const one = cards.get(name), list = D.recent[name] || [];
    one.number.textContent = number; one.sub.textContent = sub;
    one.curve.draw([list.map(pair => pair[0]), list.map(pair => pair[1])], { zero: name !== "loss" && name !== "version" });
  }
}
function mark() { for (const [name, { card }] of cards) card.setAttribute("aria-expanded", String(curve?.name === name)); }
async function openCurve(name, label, scroll = true) {
  curve = { name, label };
  $("curve").hidden = false; $("curve-name").textContent = label;
  mark();
  await drawCurve();
  if (scroll) $("curve").scrollIntoView({ block: "nearest" });
}
async function drawCurve() {
  if (!curve) return;
  const wanted = curve;
  let levels = D.curves?.[wanted.name];
  if (!D.curves) {
    const answer = await fetch(`levels?name=${encodeURIComponent(wanted.name)}`).catch(() => null);
    levels = answer?.ok ? await answer.json() : null;
  }
  if (curve !== wanted) return;
  $("curve-width").textContent = levels ? brief(levels.width) : "";
  if (levels) large($("curve-plot"), levels, wanted.label); else $("curve-plot").replaceChildren("Nothing has come of it yet.");
}
function closeCurve() { curve = null; $("curve").hidden = true; mark(); }

function life() {
  const silent = performance.now() - heardAt > SILENT_MS && !D.curves;
  const [text, kind] = D.ok === false ? ["✗ failed", "bad"] : D.over ? ["✓ ended", "good"] : silent ? ["no answer", "bad"] : D.live ? ["● live", "good"] : ["○ not live", "open"];
  if ($("life").textContent !== text) { $("life").textContent = text; $("life").className = "pill " + kind; }
  $("life").title = silent && !D.over ? "The page's server does not answer. Training does not depend on it." : "";
}
function ask() {
  const button = $("advice-ask");
  button.hidden = !D.advisable || (D.advised && D.over); button.disabled = D.advisable === "asked";
  button.textContent = D.advisable === "asked" ? "simulating…" : D.advised ? "simulate again" : "simulate the run so far";
  $("advice-card").hidden = !D.advised && !D.advisable;
}
function draw(everything = true) {
  if (!timeline) return;
  if (everything) { figures(); ask(); heat.draw(); }
  life();
  timeline.draw();
  for (const e of document.querySelectorAll("tr:has([data-worker])")) e.classList.toggle("chosen", timeline.added.includes(+e.querySelector("button").dataset.worker));
  root.dataset.drawn = 1 + +(root.dataset.drawn || 0);
}
function begin() {
  timeline = new Timeline(pushes, new Painter(pushes), i => story.tell(i)); heat = new Heat(pushes, timeline);
  story.go = i => timeline.choose(i);
  const asked = new URLSearchParams(location.hash.slice(1)), time = /^([\d.]+)-([\d.]+)$/.exec(asked.get("t") || "");
  draw();
  if (time) timeline.show(+time[1], +time[2]);
  find(asked.get("push"));
  root.dataset.ready = Math.round(performance.now());
}
function find(text) {
  const found = /^\s*(\d+)\s*@\s*(\d+)\s*$/.exec(text || ""), i = found ? pushes.find(+found[1], +found[2]) : -1;
  if (i >= 0) timeline.choose(i);
  return i >= 0;
}

// Light and dark.
function setTheme(theme) {
  root.dataset.theme = theme;
  try { localStorage.setItem("offbeat-theme", theme); } catch { /* a browser that keeps nothing */ }
  draw(); drawCurve();
}
function turn() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
}
try {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("theme") || localStorage.getItem("offbeat-theme");
  if (["light", "dark"].includes(wanted)) root.dataset.theme = wanted;
} catch { /* as above */ }
$("theme").onclick = turn;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

// Pointer and keys.
$("find").onchange = e => { e.target.setCustomValidity(!e.target.value || find(e.target.value) ? "" : "No such push in this page: WORKER@CLOCK, for instance 2@17"); e.target.reportValidity(); };
$("add").onchange = e => { timeline.add(parseInt(e.target.value, 10)); e.target.value = ""; };
$("advice-ask").onclick = () => fetch("advice", { method: "POST" }).catch(() => null);
$("curve-close").onclick = closeCurve;
addEventListener("click", e => {
  const { worker, curve: name, label } = e.target.closest("[data-worker],[data-curve]")?.dataset || {};
  if (name) openCurve(name, label || (name === "staleness" ? "staleness of folds (versions)" : e.target.closest("button").firstChild.textContent));
  else if (worker) choose(+worker);
});
// Show a worker's lane, or no longer if it has been asked for.
function choose(worker) {
  if (timeline.added.includes(worker)) timeline.added = timeline.added.filter(w => w !== worker);
  else { timeline.added = [...timeline.added, worker].slice(-28); timeline.current = timeline.workers.indexOf(worker); }
  draw();
  $("timeline").scrollIntoView({ block: "nearest" });
}
addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input")) return;
  if (e.key === "t") turn();
  else if (e.key === "Escape") { closeCurve(); timeline?.choose(-1); }
});
addEventListener("resize", () => { draw(); drawCurve(); });

// A file has its data inside; a server sends messages, each of which waits for the one before it.
async function main() {
  if ($("message")) {
    const text = $("data").textContent;
    $("data").textContent = "";
    await take(JSON.parse($("message").textContent), text);
    begin();
    if (D.curves.loss) openCurve("loss", "loss", false);
    return;
  }
  const stream = new EventSource("events");
  let last = Promise.resolve();
  stream.addEventListener("message", event => {
    const message = JSON.parse(event.data);
    last = last.then(() => take(message)).then(() => { if (timeline) draw(Boolean(message.figures || message.samples)); else if (message.figures) begin(); });
  });
  stream.addEventListener("error", () => { if (D.over) stream.close(); life(); });  // the job has ended, and its server with it: the page stays
  setInterval(() => { if (!document.hidden) life(); }, 1000);
  setInterval(() => { if (timeline?.follow && D.live && !document.hidden) timeline.draw(); }, 100);  // a wait is seen to grow
  setInterval(() => { if (!D.over) drawCurve(); }, 3000);
}
main();
