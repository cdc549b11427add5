// The timeline: which stretch of time is shown, the lanes below each other, and what mouse and keys do.
const LEFT = 104, RIGHT = 10, LANE = 28, GAP = 10, TOP = 24;

class Timeline {
  constructor(pushes, painter, tell) {
    this.p = pushes; this.painter = painter; this.tell = tell;
    this.canvas = $("lanes"); this.added = []; this.current = 0; this.chosen = -1; this.drag = null; this.others = [];
    this.follow = D.live ? D.live_s : 0;  // how long the newest stretch is that is shown as time goes on; 0: none
    this.everything = true; this.view = this.whole;
    const c = this.canvas;
    c.addEventListener("mousemove", e => this.moved(e));
    c.addEventListener("mouseleave", e => { tip(e, ""); });
    c.addEventListener("mousedown", e => { if (e.button === 0) this.drag = [e.clientX, this.at(e), this.at(e)]; });
    addEventListener("mouseup", e => this.released(e));
    c.addEventListener("wheel", e => { if (document.activeElement === c || e.ctrlKey) { e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.25 : .8, this.at(e)); } }, { passive: false });
    c.addEventListener("dblclick", () => this.all());
    c.addEventListener("keydown", e => this.key(e));
    c.addEventListener("focus", () => this.draw()); c.addEventListener("blur", () => this.draw());
    $("closer").onclick = () => this.zoom(.5); $("farther").onclick = () => this.zoom(2); $("all").onclick = () => this.all();
    $("now").onclick = () => { this.follow = D.live_s; this.show(...this.newest, true); };
    $("earlier").onclick = () => this.pan(-.4); $("later").onclick = () => this.pan(.4);
  }
  get whole() { return [D.began, Math.max(D.began + 1e-6, D.end, now())]; }
  get newest() { const end = this.whole[1]; return [Math.max(D.began, end - this.follow), end]; }
  get least() { return Math.max(1e-5, (D.end - D.began) / 2e6); }
  get workers() { return [...new Set([...D.lanes, ...this.added])].filter(w => w < D.workers).sort((a, b) => a - b); }
  all() { this.show(...this.whole); this.everything = true; }
  get width() { return (this.canvas.clientWidth || 600) - LEFT - RIGHT; }
  x(t) { return LEFT + (t - this.view[0]) / (this.view[1] - this.view[0]) * this.width; }
  at(e) { return this.view[0] + (e.clientX - this.canvas.getBoundingClientRect().left - LEFT) / this.width * (this.view[1] - this.view[0]); }
  row(e) { return Math.floor((e.clientY - this.canvas.getBoundingClientRect().top - TOP) / (LANE + GAP)); }
  show(from, to, follow = false) {
    if (!follow) this.follow = 0;
    this.everything = false;
    const [a, b] = this.whole, span = Math.min(b - a, Math.max(this.least, to - from));
    from = Math.max(a, Math.min(from, b - span));
    this.view = [from, from + span];
    this.draw();
    for (const draw of this.others) draw();
  }
  zoom(factor, t) {
    const [a, b] = this.view, i = this.chosen;
    if (t === undefined) t = i >= 0 && this.p.arrived(i) >= a && this.p.begun(i) <= b ? (this.p.begun(i) + this.p.arrived(i)) / 2 : (a + b) / 2;
    this.show(t - (t - a) * factor, t + (b - t) * factor);
  }
  pan(part) { const d = (this.view[1] - this.view[0]) * part; this.show(this.view[0] + d, this.view[1] + d); }
  draw() {
    if (this.follow && !D.live && D.over) { this.follow = 0; this.everything = true; }
    if (this.follow) this.view = this.newest; else if (this.everything) this.view = this.whole;
    const workers = this.workers, height = TOP + workers.length * (LANE + GAP) + 22, [x, width] = fit(this.canvas, height), colour = this.painter.colours(x), X = t => this.x(t);
    const active = document.activeElement === this.canvas;
    this.folds(x, X);
    let single = false;
    workers.forEach((w, i) => {
      const y = TOP + i * (LANE + GAP), slow = D.slow.includes(w);
      if (active && i === this.current) { x.fillStyle = css("code"); x.fillRect(0, y - GAP / 2, width, LANE + GAP); }
      x.textAlign = "right"; x.fillStyle = slow ? css("bad") : css("ink"); x.font = (slow ? "600 " : "") + FONT;
      x.fillText((slow || active && i === this.current ? "▸ " : "") + "worker " + w, LEFT - 9, y + LANE / 2); x.font = FONT;
      single = this.painter.lane(x, w, y, LANE, this.view, LEFT, this.width, X, colour) || single;
      if (this.chosen >= 0 && this.p.c.worker[this.chosen] === w) {
        const a = X(this.p.begun(this.chosen)), b = X(this.p.arrived(this.chosen));
        if (b >= LEFT && a <= width) { x.strokeStyle = css("ink"); x.lineWidth = 2; x.strokeRect(a - 2, y - 2, Math.max(3, b - a + 4), LANE + 4); x.lineWidth = 1; }
      }
    });
    this.axis(x, TOP + workers.length * (LANE + GAP) + 6);
    if (this.drag && Math.abs(this.x(this.drag[1]) - this.x(this.drag[2])) > 4) {
      const [a, b] = [X(this.drag[1]), X(this.drag[2])].sort((p, q) => p - q);
      x.fillStyle = css("focus"); x.globalAlpha = .16; x.fillRect(a, 0, b - a, height); x.globalAlpha = 1;
    }
    const span = this.view[1] - this.view[0], kept = this.p.kept(this.view[0]) && this.p.kept(this.view[1]) ? "" : "; single steps of this stretch are not in the page, only shares";
    this.legend();
    $("now").hidden = !D.live; $("now").disabled = this.follow > 0;
    $("span").textContent = this.follow ? `the last ${Math.round(this.follow)} s` : `${this.view.map(t => t.toFixed(span < .1 ? 4 : span < 10 ? 3 : 1)).join(" to ")} s, ${single ? "single steps" : "shares of time"}${kept}`;
  }
  folds(x, X) {
    x.textAlign = "right"; x.fillStyle = css("mute"); x.fillText("new version", LEFT - 9, 9);
    const c = this.p.c, [from, to] = this.view;
    let low = 0, high = this.p.count;
    while (low < high) { const m = (low + high) >> 1; if (this.p.arrived(m) < from) low = m + 1; else high = m; }
    const seen = new Set();
    x.strokeStyle = css("mute"); x.beginPath();
    const step = Math.max(1, Math.floor((to - from) / (D.end - D.began) * this.p.count / 60000));
    for (let i = low; i < this.p.count && this.p.arrived(i) <= to; i += step) {
      if (c.fate[i] !== 1) continue;
      const a = Math.round(X(this.p.arrived(i) + c.settled[i])) + .5;
      if (seen.has(a) || a < LEFT || a > LEFT + this.width) continue;
      seen.add(a); x.moveTo(a, 4); x.lineTo(a, 14);
    }
    x.globalAlpha = seen.size > this.width / 3 ? .3 : 1; x.stroke(); x.globalAlpha = 1;
  }
  axis(x, y) {
    const [found, digits] = ticks(this.view[0], this.view[1], Math.max(2, Math.floor(this.width / 110)));
    x.fillStyle = css("mute"); x.textAlign = "center";
    for (const t of found) { const a = this.x(t); x.fillText(t.toFixed(digits) + " s", Math.min(a, LEFT + this.width - 16), y + 5); x.fillRect(Math.round(a), y - 5, 1, 4); }
  }
  legend() {
    const fates = new Set(this.p.c.fate.subarray(0, this.p.count)), key = [...this.p.used].join() + this.p.phases.length + [...fates].join() + D.live + D.over;
    if (this.legendOf === key) return;
    this.legendOf = key;
    const kinds = new Set([...this.p.used, ...this.p.phases.map(phase => phase.kind)]), found = [];
    const add = (name, text) => { const li = made("li"); if (name) li.append(made("i", "", name)); li.append(text); found.push(li); };
    for (const kind of D.kinds) if (kinds.has(kind)) add(kind, D.words[kind]);
    if (D.live) add("work", "in a step, not divided yet");
    for (const [fate, text] of [[3, "▼ dropped"], [4, "◆ rejected"], [5, "■ abandoned"]]) if (fates.has(fate)) add("", text);
    $("legend").replaceChildren(...found);
  }
  // The push of a worker at a time, or the next one; -1: there is none.
  near(w, t) {
    const rows = this.p.rows(w), k = this.p.from(w, t);
    return rows[k] ?? rows[k - 1] ?? -1;
  }
  moved(e) {
    if (this.drag) { this.drag[2] = this.at(e); this.draw(); return; }
    const w = this.workers[this.row(e)], t = this.at(e);
    if (w === undefined || t < this.view[0] || t > this.view[1]) { tip(e, ""); return; }
    const tail = this.painter.tail(w), s = [...this.p.stretches(w), tail].find(s => s && s.start <= t && t <= s.stop);
    const words = { computing: s === tail ? "in a step that has not ended" : "computing; no push came of it", awaited: "has not come yet" };
    if (s) { tip(e, `worker ${w}  ${words[s.doing] || D.words[s.doing] || s.doing}  ${brief(s.stop - s.start)}\nfrom ${s.start.toFixed(3)} s`); return; }
    const i = this.near(w, t);
    if (i < 0 || !this.p.kept(t)) { tip(e, `worker ${w} at ${t.toFixed(3)} s`); return; }
    const part = this.p.parts(i).find(part => part[1] <= t && t <= part[2]), other = this.p.c.other[i] - 1;
    if (!part) { tip(e, `worker ${w} at ${t.toFixed(3)} s`); return; }
    const whom = part[0] === "wait" && other >= 0 ? ` for worker ${other}` : "";
    tip(e, `worker ${w}  ${part[3] === "link" ? "messages under way" : D.words[part[0]]}${whom}  ${brief(part[2] - part[1])}\nat ${part[1].toFixed(3)} s, push ${w}@${this.p.clock(i)}, ${D.fates[this.p.c.fate[i]]}`);
  }
  released(e) {
    if (!this.drag) return;
    const [x, a, b] = this.drag;
    this.drag = null;
    if (Math.abs(e.clientX - x) > 4) { this.show(Math.min(a, b), Math.max(a, b)); return; }
    const w = this.workers[this.row(e)];
    if (w === undefined) return;
    this.current = this.row(e);
    this.choose(this.near(w, a), false);
  }
  choose(i, move = true) {
    this.chosen = i;
    if (i >= 0) {
      const w = this.p.c.worker[i], [a, b] = [this.p.begun(i) - this.p.waited(i), this.p.arrived(i)], span = this.view[1] - this.view[0];
      if (!this.workers.includes(w)) this.add(w);
      this.current = this.workers.indexOf(w);
      if (move && (a < this.view[0] || b > this.view[1] || (b - a) / span * this.width < 12)) {
        const size = Math.min(span, Math.max((b - a) * 12, this.least));
        this.show((a + b - size) / 2, (a + b + size) / 2);
      }
    }
    this.tell(i);
    this.draw();
  }
  add(w) {
    if (!(Number.isInteger(w) && w >= 0 && w < D.workers) || this.workers.includes(w)) return;
    this.added = [...this.added, w].slice(-28);
    this.draw();
  }
  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const w = this.workers[this.current], step = by => {
      const i = this.chosen >= 0 && this.p.c.worker[this.chosen] === w ? this.chosen : this.near(w, (this.view[0] + this.view[1]) / 2);
      if (i < 0) return;
      const rows = this.p.rows(w), k = rows.indexOf(i) + (this.chosen === i ? by : 0);
      if (k >= 0 && k < rows.length) this.choose(rows[k]);
    };
    const does = {
      "+": () => this.zoom(.5), "=": () => this.zoom(.5), "-": () => this.zoom(2), "0": () => this.all(), Home: () => this.all(),
      ArrowLeft: () => this.pan(-.2), ArrowRight: () => this.pan(.2), n: () => step(1), p: () => step(-1), Enter: () => step(0),
      ArrowUp: () => { this.current = Math.max(0, this.current - 1); this.draw(); }, ArrowDown: () => { this.current = Math.min(this.workers.length - 1, this.current + 1); this.draw(); },
      Escape: () => this.choose(-1),
    }[e.key];
    if (does) { e.preventDefault(); does(); }
  }
}
