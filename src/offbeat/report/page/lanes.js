// Draw one worker's lane, as shares of time while steps are dense, as single steps once they are wide enough.
const STACK = ["backward", "forward", "computing", "own", "queued", "exchange", "evaluation", "data", "gc"];
const COLUMN = 4, DENSE = 10, MARKS = { 3: "dropped", 4: "rejected", 5: "abandoned", 6: "undone" };

class Painter {
  constructor(pushes) {
    this.p = pushes;
    this.levels = {};
    for (const kind of D.kinds) if (pushes.c["level " + kind]) this.levels[kind] = pushes.c["level " + kind];
  }
  colours(x) {
    const found = {};
    for (const kind of D.kinds) found[kind] = css(kind);
    found.hatch = hatch(x);
    return found;
  }
  // Draw worker w at height y; X maps seconds to pixels. Returns true if single steps are drawn.
  lane(x, w, y, height, view, left, width, X, colour) {
    const p = this.p, [from, to] = view, scale = width / (to - from);
    let first = p.from(w, from), last = p.from(w, to);
    if (last < p.starts[w + 1]) last++;
    const whole = p.kept(from) && p.kept(to) && (!D.window || to - from < D.window * 1.5);
    const dense = (last - first) * DENSE > width || !whole;
    x.save(); x.beginPath(); x.rect(left, y - 8, width, height + 16); x.clip();
    if (dense) this.shares(x, w, y, height, view, left, width, whole ? [first, last] : null, colour);
    else for (let k = first; k < last; k++) this.push(x, p.of[k], y, height, X, colour);
    for (const s of p.stretchesOf[w]) {
      if (s.stop < from || s.start > to) continue;
      const a = X(s.start), b = X(s.stop);
      if (s.doing === "dead") {
        x.fillStyle = css("card"); x.fillRect(a, y, b - a, height); x.fillStyle = colour.hatch; x.fillRect(a, y, b - a, height);
      } else if (!dense && s.doing === "computing") {
        x.strokeStyle = colour.computing; x.setLineDash([3, 3]); x.strokeRect(a + .5, y + .5, Math.max(1, b - a - 1), height - 1); x.setLineDash([]);
      } else if (!dense) { x.fillStyle = s.doing === "idle" ? css("line") : colour.wait; x.fillRect(a, y + height / 2 - 1.5, Math.max(1, b - a), 3); }
    }
    if (!dense || last - first < width / 2) this.marks(x, first, last, y, X);
    this.deaths(x, w, y, height, view, X, scale);
    x.restore();
    return !dense;
  }
  push(x, i, y, height, X, colour) {
    for (const [kind, start, stop] of this.p.parts(i)) {
      const a = X(start), b = X(stop);
      if (kind === "wait") {
        x.fillStyle = colour.wait; x.fillRect(a, y + height / 2 - 2, b - a, 4);
        const other = this.p.c.other[i] - 1;
        if (b - a > 96 && other >= 0) {
          const text = "for worker " + other, m = x.measureText(text).width;
          x.fillStyle = css("card"); x.fillRect((a + b - m) / 2 - 4, y + height / 2 - 7, m + 8, 14);
          x.fillStyle = css("mute"); x.textAlign = "center"; x.fillText(text, (a + b) / 2, y + height / 2);
        }
      } else {
        const h = kind === "exchange" ? height * .45 : height;
        x.fillStyle = colour[kind]; x.fillRect(a, y + (height - h) / 2, Math.max(.6, b - a - (b - a > 4 ? .7 : 0)), h);
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
      for (let k = rows[0]; k < rows[1]; k++) for (const [kind, start, stop] of this.p.parts(this.p.of[k])) add(kind, start, stop);
      for (const s of this.p.stretchesOf[w]) add(s.doing === "waiting" ? "wait" : s.doing, s.start, s.stop);
    } else {
      const low = Math.max(0, Math.floor(view[0] / D.width)), high = Math.min(D.parts - 1, Math.floor(view[1] / D.width));
      for (const kind in sums) {
        const level = this.levels[kind];
        if (level) for (let k = low; k <= high; k++) { const v = level[w * D.parts + k]; if (v) add2(sums[kind], v / 255, k); }
      }
    }
    function add2(sum, part, k) {  // a level's part of the time may be wider or narrower than a column
      const start = k * D.width, stop = start + D.width;
      for (let j = Math.max(0, Math.floor((start - view[0]) / dt)); j < n && view[0] + j * dt < stop; j++)
        sum[j] += part * Math.max(0, Math.min(stop, view[0] + (j + 1) * dt) - Math.max(start, view[0] + j * dt));
    }
    for (let j = 0; j < n; j++) {
      let z = y + height, whole = 0;
      for (const kind in sums) whole += sums[kind][j];
      if (whole > dt * .01) { x.fillStyle = colour.wait; x.fillRect(left + j * COLUMN, y, COLUMN, height); }
      const idle = sums.idle[j] / dt;
      if (idle > .02) { x.fillStyle = css("card"); x.fillRect(left + j * COLUMN, y, COLUMN, Math.min(1, idle) * height); }
      for (const kind of STACK) {
        const h = Math.min(z - y, sums[kind][j] / dt * height);
        if (h < .25) continue;
        x.fillStyle = colour[kind]; x.fillRect(left + j * COLUMN, z - h, COLUMN - .5, h); z -= h;
      }
    }
  }
  marks(x, first, last, y, X) {
    x.fillStyle = css("ink");
    for (let k = first; k < last; k++) {
      const i = this.p.of[k], what = MARKS[this.p.c.fate[i]];
      if (!what) continue;
      const a = X(this.p.arrived(i));
      x.beginPath();
      if (what === "dropped") { x.moveTo(a - 4, y - 6); x.lineTo(a + 4, y - 6); x.lineTo(a, y); }
      else if (what === "rejected") { x.moveTo(a, y - 7); x.lineTo(a + 4, y - 3); x.lineTo(a, y + 1); x.lineTo(a - 4, y - 3); }
      else x.rect(a - 3, y - 6, 6, 6);
      x.fill();
    }
  }
  deaths(x, w, y, height, view, X, scale) {
    for (const [worker, at, back] of D.deaths) {
      if (worker !== w || at > view[1] || (back ?? D.end) < view[0]) continue;
      const text = back === null ? "dead, not back" : "dead for " + brief(back - at), m = x.measureText(text).width;
      const a = X(at), b = X(back ?? D.end), c = b - a > m + 12 ? (Math.max(a, X(view[0])) + Math.min(b, X(view[1]))) / 2 : a + m / 2 + 8;
      x.font = "600 " + FONT; x.textAlign = "center";
      if (b - a > 26 || scale * (D.end - D.began) < 2500) {
        x.fillStyle = css("card"); x.fillRect(c - m / 2 - 5, y + height / 2 - 8, m + 10, 16);
        x.fillStyle = css("ink"); x.fillText(text, c, y + height / 2);
      }
      x.strokeStyle = css("ink"); x.lineWidth = 1.6; x.beginPath(); x.moveTo(a, y - 3); x.lineTo(a, y + height + 3); x.stroke(); x.lineWidth = 1;
      x.font = FONT;
    }
  }
}
