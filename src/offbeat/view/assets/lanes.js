// Draw one worker's lane, as shares of time while steps are dense, as single steps once they are wide enough.
const STACK = ["backward", "forward", "computing", "own", "queued", "exchange", "evaluation", "data", "gc"];
const COLUMN = 4, DENSE = 10, MARKS = { 3: "dropped", 4: "rejected", 5: "abandoned", 6: "undone" };

class Painter {
  constructor(pushes) { this.p = pushes; }
  colours(x) {
    const found = { hatch: hatch(x, css("dead"), 8), slant: { data: hatch(x, css("card"), 6), gc: hatch(x, css("card"), 6, -1) } };
    for (const kind of [...D.kinds, "card", "mute", "ink", "line", "work"]) found[kind] = css(kind);
    return found;
  }
  // Fill a stretch: each of the kinds that matter most has a pattern beside its colour.
  fill(x, kind, a, y, width, height, colour) {
    x.fillStyle = colour[kind]; x.fillRect(a, y, width, height);
    if (colour.slant[kind] && width > 4) { x.globalAlpha = .4; x.fillStyle = colour.slant[kind]; x.fillRect(a, y, width, height); x.globalAlpha = 1; }
  }
  // Draw worker w at height y; X maps seconds to pixels. Returns true if single steps are drawn.
  lane(x, w, y, height, view, left, width, X, colour) {
    const p = this.p, [from, to] = view, rows = p.rows(w);
    let first = p.from(w, from), last = p.from(w, to);
    if (last < rows.length) last++;
    const whole = p.kept(from) && p.kept(to) && (!D.window || to - from < D.window * 1.5);
    const dense = (last - first) * DENSE > width || !whole, tail = this.tail(w);
    x.save(); x.beginPath(); x.rect(left, y - 8, width, height + 16); x.clip();
    if (dense) this.shares(x, w, y, height, view, left, width, whole ? [first, last] : null, colour);
    else for (let k = first; k < last; k++) this.push(x, rows[k], y, height, X, colour);
    for (const s of tail ? [...p.stretches(w), tail] : p.stretches(w)) {
      if (s.stop < from || s.start > to) continue;
      const a = X(s.start), b = X(s.stop);
      if (s.doing === "dead" || s.doing === "awaited") {
        x.fillStyle = colour.card; x.fillRect(a, y, b - a, height); x.fillStyle = colour.hatch; x.fillRect(a, y, b - a, height);
        this.absence(x, s, tail, y, height, view, X);
      } else if (s === tail && s.doing === "computing") {
        x.fillStyle = colour.wait; x.fillRect(X(s.start - s.waited), y + height / 2 - 2, a - X(s.start - s.waited), 4);
        x.fillStyle = colour.work; x.globalAlpha = .55; x.fillRect(a, y + 4, Math.max(.5, b - a), height - 8); x.globalAlpha = 1;
        if (s.stop - s.start > 2) this.label(x, `in its step for ${brief(s.stop - s.start)}`, a + 6, b, y + height / 2);
      } else if (!dense && s.doing === "computing") {
        x.strokeStyle = colour.computing; x.setLineDash([3, 3]); x.strokeRect(a + .5, y + .5, Math.max(1, b - a - 1), height - 1); x.setLineDash([]);
      } else if (!dense || s === tail) { x.fillStyle = s.doing === "idle" ? colour.line : colour.wait; x.fillRect(a, y + height / 2 - 1.5, Math.max(1, b - a), 3); }
    }
    if (!dense || last - first < width / 2) this.marks(x, rows, first, last, y, X);
    x.restore();
    return !dense;
  }
  // What a worker does that has not ended; null: it is not known.
  tail(w) {
    const [start, doing, waited] = D.tails[w] || [];
    return doing && !D.over ? { worker: w, doing, start, stop: now(), waited: waited || 0 } : null;
  }
  label(x, text, a, b, y) {
    const width = x.measureText(text).width;
    if (width + 8 > b - a) return;
    x.fillStyle = css("card"); x.fillRect(a, y - 8, width + 8, 16);
    x.fillStyle = css("ink"); x.textAlign = "left"; x.fillText(text, a + 4, y);
  }
  push(x, i, y, height, X, colour) {
    for (const [kind, start, stop] of this.p.parts(i)) {
      const a = X(start), b = X(stop);
      if (kind === "wait") {
        x.fillStyle = colour.wait; x.fillRect(a, y + height / 2 - 2, b - a, 4);
        const other = this.p.c.other[i] - 1;
        if (b - a > 96 && other >= 0) {
          const text = "for worker " + other, m = x.measureText(text).width;
          x.fillStyle = colour.card; x.fillRect((a + b - m) / 2 - 4, y + height / 2 - 7, m + 8, 14);
          x.fillStyle = colour.mute; x.textAlign = "center"; x.fillText(text, (a + b) / 2, y + height / 2);
        }
      } else {
        const h = kind === "exchange" ? height * .45 : height;
        this.fill(x, kind, a, y + (height - h) / 2, Math.max(.6, b - a - (b - a > 4 ? .7 : 0)), h, colour);
      }
    }
  }
  shares(x, w, y, height, view, left, width, rows, colour) {
    const n = Math.max(1, Math.floor(width / COLUMN)), dt = (view[1] - view[0]) / n, sums = {};
    for (const kind of STACK.concat("idle", "dead", "wait")) sums[kind] = new Float64Array(n);
    const fine = rows && (dt < D.width || rows[1] - rows[0] < 4000);
    const add = (kind, start, stop) => {
      if (!sums[kind]) return;
      for (let j = Math.max(0, Math.floor((start - view[0]) / dt)); j < n && view[0] + j * dt < stop; j++)
        sums[kind][j] += Math.max(0, Math.min(stop, view[0] + (j + 1) * dt) - Math.max(start, view[0] + j * dt));
    };
    if (fine) {
      for (let k = rows[0]; k < rows[1]; k++) for (const [kind, start, stop] of this.p.parts(this.p.rows(w)[k])) add(kind, start, stop);
      for (const s of this.p.stretches(w)) add(s.doing === "waiting" ? "wait" : s.doing, s.start, s.stop);
    } else {
      const n = this.p.parts_, low = Math.max(0, Math.floor(view[0] / D.width)), high = Math.min(n - 1, Math.floor(view[1] / D.width));
      for (const kind in sums) {
        const share = this.p.shares["share " + kind];
        if (share) for (let k = low; k <= high; k++) { const v = share[w * n + k]; if (v) add2(sums[kind], v, k); }
      }
    }
    function add2(sum, part, k) {  // a part of the time may be wider or narrower than a column
      const start = k * D.width, stop = start + D.width;
      for (let j = Math.max(0, Math.floor((start - view[0]) / dt)); j < n && view[0] + j * dt < stop; j++)
        sum[j] += part * Math.max(0, Math.min(stop, view[0] + (j + 1) * dt) - Math.max(start, view[0] + j * dt));
    }
    for (let j = 0; j < n; j++) {
      let z = y + height, whole = 0;
      for (const kind in sums) whole += sums[kind][j];
      if (whole > dt * .01) { x.fillStyle = colour.wait; x.fillRect(left + j * COLUMN, y, COLUMN, height); }
      const idle = sums.idle[j] / dt;
      if (idle > .02) { x.fillStyle = colour.card; x.fillRect(left + j * COLUMN, y, COLUMN, Math.min(1, idle) * height); }
      for (const kind of STACK) {
        const h = Math.min(z - y, sums[kind][j] / dt * height);
        if (h < .25) continue;
        this.fill(x, kind, left + j * COLUMN, z - h, COLUMN - .5, h, colour); z -= h;
      }
    }
  }
  marks(x, rows, first, last, y, X) {
    x.fillStyle = css("ink");
    for (let k = first; k < last; k++) {
      const i = rows[k], what = MARKS[this.p.c.fate[i]];
      if (!what) continue;
      const a = X(this.p.arrived(i));
      x.beginPath();
      if (what === "dropped") { x.moveTo(a - 4, y - 6); x.lineTo(a + 4, y - 6); x.lineTo(a, y); }
      else if (what === "rejected") { x.moveTo(a, y - 7); x.lineTo(a + 4, y - 3); x.lineTo(a, y + 1); x.lineTo(a - 4, y - 3); }
      else x.rect(a - 3, y - 6, 6, 6);
      x.fill();
    }
  }
  // Say how long a worker was away.
  absence(x, s, tail, y, height, view, X) {
    const known = (D.deaths || []).find(([worker, t]) => worker === s.worker && s.start <= t && t <= s.stop);  // from when the job knew
    const away = brief(known && known[2] !== null ? known[2] - known[1] : s.stop - s.start);
    const text = s.doing === "awaited" ? `not come yet, for ${away}` : s === tail || s.stop >= D.end ? `dead for ${away}, not back` : "dead for " + away;
    x.font = "600 " + FONT;
    const m = x.measureText(text).width, a = X(s.start), b = X(s.stop), c = b - a > m + 12 ? (Math.max(a, X(view[0])) + Math.min(b, X(view[1]))) / 2 : a + m / 2 + 8;
    if (b - a > 26) {
      x.textAlign = "center"; x.fillStyle = css("card"); x.fillRect(c - m / 2 - 5, y + height / 2 - 8, m + 10, 16);
      x.fillStyle = css("ink"); x.fillText(text, c, y + height / 2);
    }
    x.strokeStyle = css("ink"); x.lineWidth = 1.6; x.beginPath(); x.moveTo(a, y - 3); x.lineTo(a, y + height + 3); x.stroke(); x.lineWidth = 1;
    x.font = FONT;
  }
}
