"use strict";
// Read the page's data: the description in #head, and the columns in #data, which pack.py has packed.
const $ = id => document.getElementById(id);
const D = JSON.parse($("head").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const FONT = '12px system-ui,"Liberation Sans",sans-serif';

async function unpack() {
  const text = atob($("data").textContent), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  $("data").textContent = "";
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const c of D.columns) {
    const values = new Uint32Array(c.count);
    for (let b = 0; b < c.bytes; b++, at += c.count)
      for (let i = 0, shift = 8 * b; i < c.count; i++) values[i] |= raw[at + i] << shift;
    if (c.float) { columns[c.name] = new Float32Array(values.buffer); continue; }
    let out = values;
    if (c.signed) { out = new Int32Array(c.count); for (let i = 0; i < c.count; i++) out[i] = (values[i] >>> 1) ^ -(values[i] & 1); }
    if (c.grows) for (let i = 1; i < c.count; i++) out[i] += out[i - 1];
    columns[c.name] = out;
  }
  return columns;
}

// The pushes, and where each worker's are. Times are seconds of the journal.
class Pushes {
  constructor(columns) {
    this.c = columns; this.count = columns.number.length;
    const starts = new Int32Array(D.workers + 1);
    for (let i = 0; i < this.count; i++) starts[columns.worker[i] + 1]++;
    for (let w = 0; w < D.workers; w++) starts[w + 1] += starts[w];
    this.starts = starts; this.of = new Int32Array(this.count); this.place = new Int32Array(this.count);
    const next = starts.slice();
    for (let i = 0; i < this.count; i++) { const p = next[columns.worker[i]]++; this.of[p] = i; this.place[i] = p; }
    this.phases = D.order.filter(name => columns["phase " + name]).map(name => ({ name, kind: D.kind_of[name], values: columns["phase " + name] }));
    this.stretches = D.stretches.map((doing, i) => ({
      doing, worker: columns["stretch worker"][i], start: columns["stretch start"][i] * D.tick, stop: (columns["stretch start"][i] + columns["stretch length"][i]) * D.tick }));
    this.stretchesOf = Array.from({ length: D.workers }, () => []);
    for (const s of this.stretches) this.stretchesOf[s.worker].push(s);
  }
  arrived(i) { return this.c.arrived[i] * D.tick; }
  begun(i) { return (this.c.arrived[i] - this.c.busy[i]) * D.tick; }
  waited(i) { return this.c.waited[i] * D.tick; }
  clock(i) { return this.c.clock[i] + this.c.version[i]; }
  // The first place among a worker's pushes whose arrival is not before a time.
  from(worker, t) {
    let low = this.starts[worker], high = this.starts[worker + 1];
    while (low < high) { const mid = (low + high) >> 1; if (this.arrived(this.of[mid]) < t) low = mid + 1; else high = mid; }
    return low;
  }
  // The row of a push by its number in the job; -1: it is not in this page.
  byNumber(number) {
    const n = this.c.number;
    let low = 0, high = this.count;
    while (low < high) { const mid = (low + high) >> 1; if (n[mid] < number) low = mid + 1; else high = mid; }
    return low < this.count && n[low] === number ? low : -1;
  }
  find(worker, clock) {
    if (!(worker >= 0 && worker < D.workers)) return -1;
    for (let p = this.starts[worker]; p < this.starts[worker + 1]; p++) if (this.clock(this.of[p]) === clock) return this.of[p];
    return -1;
  }
  opener(i) { return this.c.opener[i] ? this.byNumber(this.c.number[i] - this.c.opener[i]) : -1; }
  // What a push consists of: [kind, start, stop, phase], the wait first, then messages, then the phases in the order of a step.
  parts(i) {
    const begun = this.begun(i), arrived = this.arrived(i), busy = arrived - begun, found = [];
    if (this.c.waited[i]) found.push(["wait", begun - this.waited(i), begun, "wait"]);
    let sum = 0;
    for (const p of this.phases) sum += p.values[i];
    sum *= D.tick;
    const scale = sum > busy && sum > 0 ? busy / sum : 1;
    let t = begun + busy - sum * scale;
    if (t - begun > D.tick) found.push(["exchange", begun, t, "link"]);
    for (const p of this.phases) if (p.values[i]) { const stop = t + p.values[i] * D.tick * scale; found.push([p.kind, t, stop, p.name]); t = stop; }
    return found;
  }
  // Whether the pushes that arrive at a time are in this page: of a long job, every so many windows of time.
  kept(t) { return !D.window || Math.floor(t / D.window) % D.stride === 0; }
}

function brief(seconds) {
  const s = Math.abs(seconds);
  return s >= 1 ? seconds.toFixed(s >= 100 ? 0 : s >= 10 ? 1 : 2) + " s" : (seconds * 1e3).toFixed(s >= 0.1 ? 0 : s >= 1e-3 ? 1 : 3) + " ms";
}
function fit(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  const x = canvas.getContext("2d");
  x.scale(ratio, ratio); x.font = FONT; x.textBaseline = "middle";
  return [x, width];
}
function hatch(x) {
  const p = document.createElement("canvas"); p.width = p.height = 8;
  const y = p.getContext("2d"); y.strokeStyle = css("dead"); y.lineWidth = 1.3; y.beginPath();
  for (const o of [-8, 0, 8]) { y.moveTo(o, 8); y.lineTo(o + 8, 0); }
  y.stroke();
  return x.createPattern(p, "repeat");
}
function tip(event, text) {
  const box = $("tip");
  if (!text) { box.hidden = true; return; }
  box.textContent = text; box.hidden = false;
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = Math.min(event.clientX + 14, innerWidth - w - 8) + "px";
  box.style.top = (event.clientY + 18 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 16) + "px";
}
function steps(from, to, most) {
  const span = to - from, unit = 10 ** Math.floor(Math.log10(span / most)), step = [1, 2, 5, 10].map(m => m * unit).find(m => span / m <= most) || 10 * unit, found = [];
  for (let t = Math.ceil(from / step - 1e-9) * step; t <= to + step * 1e-6; t += step) found.push(t);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}
