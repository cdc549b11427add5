"use strict";
// What the page knows of the job: D, the newest state that a message has brought, and the pushes in columns, which columns.py has packed.
const $ = id => document.getElementById(id);
const D = { live: false, over: false, t: 0, tails: {}, recent: {}, curves: null, workers: 0, stretches: [], movedAt: 0 };
const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const FONT = '12px system-ui,"Liberation Sans","DejaVu Sans",sans-serif';
const FIGURES = ["samples_per_s", "version", "waiting", "loss", "alive"], RECENT = 300;
const GROWS = 1, SIGNED = 2, REAL = 4;

// Unpack columns. Those that grow, and floats, come as floats; all others as whole numbers.
async function unpack(packed, text) {
  const letters = atob(text), bytes = Uint8Array.from(letters, letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer()), columns = {};
  let at = 0;
  for (const [name, count, width, how] of packed.columns) {
    const values = new Uint32Array(count);
    for (let b = 0; b < width; b++, at += count) for (let i = 0, shift = 8 * b; i < count; i++) values[i] |= raw[at + i] << shift;
    let out = how & REAL ? new Float32Array(values.buffer) : values;
    if (how & SIGNED) { out = new Int32Array(count); for (let i = 0; i < count; i++) out[i] = (values[i] >>> 1) ^ -(values[i] & 1); }
    if (how & GROWS) { out = Float64Array.from(out); for (let i = 1; i < count; i++) out[i] += out[i - 1]; }
    columns[name] = out;
  }
  return columns;
}

// The pushes, in the order of their numbers, and where each worker's are. Times are seconds of the journal.
const WHOLE = ["version", "clock", "into", "staleness", "worker", "samples", "fate", "reason", "ended_by", "opener", "other"], TIMES = ["busy", "waited"];
class Pushes {
  constructor() {
    this.count = 0; this.room = 0; this.c = {}; this.of = []; this.phases = []; this.shares = {}; this.parts_ = 0; this.stretchesOf = []; this.used = new Set();
    for (const name of WHOLE) this.c[name] = new Int32Array(0);
    for (const name of ["number", "arrived"]) this.c[name] = new Float64Array(0);
    for (const name of [...TIMES, "settled", "loss"]) this.c[name] = new Float32Array(0);
  }
  grow(count) {
    if (count <= this.room) return;
    this.room = Math.max(1024, count, this.room && 2 * this.room);
    const larger = values => { const found = new values.constructor(this.room); found.set(values); return found; };
    for (const name in this.c) this.c[name] = larger(this.c[name]);
    for (const phase of this.phases) phase.values = larger(phase.values);
  }
  // Take the columns of a message: new pushes, and those that have another fate now.
  take(columns, packed) {
    const tick = packed.tick, number = columns.number || [];
    for (const name of Object.keys(columns)) if (name.startsWith("phase ") && !this.phases.some(phase => phase.name === name.slice(6)))
      this.phases.push({ name: name.slice(6), kind: D.kind_of[name.slice(6)], values: new Float32Array(this.room) });
    this.phases.sort((a, b) => D.order.indexOf(a.name) - D.order.indexOf(b.name));
    this.grow(this.count + number.length);
    const at = new Int32Array(number.length), c = this.c;
    for (let k = 0; k < number.length; k++) {
      let i = this.byNumber(number[k]);
      if (i < 0 && !(this.count && number[k] < c.number[this.count - 1])) {
        i = this.count++;
        const w = columns.worker[k];
        while (this.of.length <= w) this.of.push([]);
        this.of[w].push(i);
        c.number[i] = number[k];
      }
      at[k] = i;  // -1: an old one that is not in this page
    }
    const put = (target, of) => { for (let k = 0; k < at.length; k++) if (at[k] >= 0) target[at[k]] = of(k); };
    for (const name of WHOLE) { const values = columns[name]; put(c[name], k => values[k]); }
    put(c.clock, k => columns.clock[k] + columns.version[k]);
    put(c.into, k => columns.into[k] + columns.version[k]);
    put(c.arrived, k => columns.arrived[k] * tick);
    for (const name of TIMES) { const values = columns[name]; put(c[name], k => values[k] * tick); }
    put(c.settled, k => columns.settled[k] ? (columns.settled[k] - 1) * tick : -1);
    put(c.loss, columns.loss ? k => columns.loss[k] : () => NaN);
    for (const phase of this.phases) { const values = columns["phase " + phase.name]; put(phase.values, values ? k => values[k] * tick : () => 0); }
    if (packed.part >= 0) this.takeShares(columns, packed);
    packed.doing.forEach((doing, i) => {
      const worker = columns["stretch worker"][i], start = columns["stretch start"][i] * tick, stop = start + columns["stretch length"][i] * tick;
      while (this.stretchesOf.length <= worker) this.stretchesOf.push([]);
      this.stretchesOf[worker].push({ doing, worker, start, stop });
      this.used.add(doing === "waiting" ? "wait" : doing);
    });
  }
  // Shares of time from a part of the time on; what is before it stays.
  takeShares(columns, packed) {
    const part = packed.part, W = D.workers, count = D.parts, more = count - part, before = this.parts_;
    if (!W || more <= 0) return;
    const names = new Set([...Object.keys(this.shares), ...Object.keys(columns).filter(name => name.startsWith("share ") || name === "longest")]);
    for (const name of names) {
      const old = this.shares[name], fresh = columns[name], values = new Float32Array(W * count), scale = name === "longest" ? packed.tick : 1 / 255;
      for (let w = 0; w < W; w++) {
        if (old && part) values.set(old.subarray(w * before, w * before + Math.min(part, before)), w * count);
        if (fresh && w < packed.rows) for (let k = 0; k < more; k++) values[w * count + part + k] = fresh[w * more + k] * scale;
      }
      this.shares[name] = values;
      if (name !== "longest") this.used.add(name.slice(6));
    }
    this.parts_ = count;
  }
  rows(w) { return this.of[w] || []; }
  stretches(w) { return this.stretchesOf[w] || []; }
  arrived(i) { return this.c.arrived[i]; }
  begun(i) { return this.c.arrived[i] - this.c.busy[i]; }
  waited(i) { return this.c.waited[i]; }
  clock(i) { return this.c.clock[i]; }
  // The first place among a worker's pushes whose arrival is not before a time.
  from(w, t) {
    const rows = this.rows(w);
    let low = 0, high = rows.length;
    while (low < high) { const mid = (low + high) >> 1; if (this.arrived(rows[mid]) < t) low = mid + 1; else high = mid; }
    return low;
  }
  // The row of a push by its number in the job; -1: it is not in this page.
  byNumber(number) {
    const n = this.c.number;
    let low = 0, high = this.count;
    if (!high || n[high - 1] < number) return -1;
    while (low < high) { const mid = (low + high) >> 1; if (n[mid] < number) low = mid + 1; else high = mid; }
    return low < this.count && n[low] === number ? low : -1;
  }
  find(w, clock) { return this.rows(w).find(i => this.clock(i) === clock) ?? -1; }
  opener(i) { return this.c.opener[i] ? this.byNumber(this.c.number[i] - this.c.opener[i]) : -1; }
  // What a push consists of: [kind, start, stop, phase], the wait first, then messages, then the phases in the order of a step.
  parts(i) {
    const begun = this.begun(i), arrived = this.arrived(i), busy = arrived - begun, found = [];
    if (this.c.waited[i]) found.push(["wait", begun - this.waited(i), begun, "wait"]);
    let sum = 0;
    for (const p of this.phases) sum += p.values[i];
    const scale = sum > busy && sum > 0 ? busy / sum : 1;
    let t = begun + busy - sum * scale;
    if (t - begun > Math.max(2e-6, D.end / 2e7)) found.push(["exchange", begun, t, "link"]); else t = begun;
    for (const p of this.phases) if (p.values[i]) { const stop = t + p.values[i] * scale; found.push([p.kind, t, stop, p.name]); t = stop; }
    return found;
  }
  // Whether the pushes that arrive at a time are in this page: of a long job, every so many windows of time, or the newest ones.
  kept(t) { return t >= D.since && (!D.window || Math.floor(t / D.window) % D.stride === 0); }
}

// The job's time now: it goes on while no record comes, so that a wait is seen to grow.
function now() { return D.live ? D.t + Math.max(0, performance.now() - D.movedAt) / 1000 : D.end; }

// Numbers as a person would say them; the same words as in offbeat's tables.
function brief(seconds) {
  const s = Math.abs(seconds);
  return s >= 1 ? seconds.toFixed(s >= 100 ? 0 : s >= 10 ? 1 : 2) + " s" : (seconds * 1e3).toFixed(s >= 0.1 ? 0 : s >= 1e-3 ? 1 : 3) + " ms";
}
function figure(value) {
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return size && size < 0.001 ? value.toExponential(2) : Number.isInteger(value) ? String(value) : value.toPrecision(3);
}
function made(tag, text, name) { return Object.assign(document.createElement(tag), { textContent: text ?? "", className: name ?? "" }); }

function fit(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  }
  const x = canvas.getContext("2d");
  x.setTransform(ratio, 0, 0, ratio, 0, 0); x.clearRect(0, 0, width, height); x.font = FONT; x.textBaseline = "middle";
  return [x, width];
}
function hatch(x, colour, size, lean = 1) {
  const p = document.createElement("canvas"); p.width = p.height = size;
  const y = p.getContext("2d"); y.strokeStyle = colour; y.lineWidth = 1.3; y.beginPath();
  for (const o of [-size, 0, size]) { y.moveTo(o, lean > 0 ? size : 0); y.lineTo(o + size, lean > 0 ? 0 : size); }
  y.stroke();
  return x.createPattern(p, "repeat");
}
function tip(event, text) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const w = box.offsetWidth, h = box.offsetHeight;
  box.style.left = Math.min(event.clientX + 14, innerWidth - w - 8) + "px";
  box.style.top = (event.clientY + 18 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 16) + "px";
}
function ticks(from, to, most) {
  const span = to - from, unit = 10 ** Math.floor(Math.log10(span / most)), step = [1, 2, 5, 10].map(m => m * unit).find(m => span / m <= most) || 10 * unit, found = [];
  for (let t = Math.ceil(from / step - 1e-9) * step; t <= to + step * 1e-6; t += step) found.push(t);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}
