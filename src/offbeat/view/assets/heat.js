// A heat map of many workers. The longest step of each worker at each time against the median worker; of the workers of one pixel row the slowest is shown.
class Heat {
  constructor(pushes, timeline) {
    this.canvas = $("heat"); this.p = pushes; this.timeline = timeline; this.mark = null;
    this.canvas.addEventListener("mousemove", e => this.moved(e)); this.canvas.addEventListener("mouseleave", e => tip(e, ""));
    this.canvas.addEventListener("click", e => { const [i, t] = this.under(e); if (i >= 0) { this.mark = [i, .5]; this.open(this.order[i], t); } });
    this.canvas.addEventListener("keydown", e => this.key(e));
    this.canvas.addEventListener("focus", () => this.draw()); this.canvas.addEventListener("blur", () => this.draw());
    timeline.others.push(() => this.draw());
  }
  get span() { return this.timeline.follow ? [D.began, Math.max(D.began + 1e-6, D.end)] : this.timeline.view; }  // while the lanes follow the job, this is all of it
  get longest() { return this.p.shares.longest; }
  // Take what has changed: how the workers stand, and which of them are named.
  lay() {
    this.order = Array.from({ length: D.workers }, (_, n) => n);
    if (D.hosts.length) this.order.sort((a, b) => D.hosts[a] < D.hosts[b] ? -1 : D.hosts[a] > D.hosts[b] ? 1 : a - b);
    this.place = new Int32Array(D.workers); this.order.forEach((n, i) => { this.place[n] = i; });
    this.height = Math.min(420, Math.max(160, D.workers));
    const words = new Map(), share = n => D.seconds ? D.costs[n] / D.seconds : 0;
    for (const n of D.costs.keys()) if (share(n) > .01) words.set(n, `worker ${n}: ${brief(D.costs[n])}, ${(100 * share(n)).toFixed(0)} %`);
    this.named = [...words].sort((a, b) => D.costs[b[0]] - D.costs[a[0]]).slice(0, 6);
    const away = this.p.stretchesOf.flat().filter(s => s.doing === "dead" && !words.has(s.worker)).sort((a, b) => (b.stop - b.start) - (a.stop - a.start));
    for (const s of away.slice(0, 4)) this.named.push([s.worker, `worker ${s.worker}: dead for ${brief(s.stop - s.start)}`]);
    this.mark = this.mark || [this.place[this.named[0]?.[0] ?? 0], .5];
    this.cycle = (D.end - D.began) * D.workers / Math.max(1, D.pushes);
  }
  open(w, t) {
    this.timeline.add(w); this.timeline.current = Math.max(0, this.timeline.workers.indexOf(w));
    const i = this.timeline.near(w, t);
    if (i >= 0) this.timeline.choose(i); else this.timeline.draw();
  }
  columns() {
    const [from, to] = this.span, low = Math.max(0, Math.floor(from / D.width)), high = Math.max(low, Math.ceil(to / D.width) - 1);
    const width = Math.max(100, (this.canvas.clientWidth || 600) - LEFT - 190), whole = Math.ceil((to - from) / (1.5 * this.cycle));
    const n = Math.max(1, Math.min(high - low + 1, Math.floor(width / 2), whole));  // a column has a step of nearly every worker
    const start = j => Math.min(this.p.parts_, low + Math.floor(j * (high - low + 1) / n));  // the first part of the time in a column
    return { n, width, start };
  }
  ratios() {
    const { n, start } = this.columns(), W = D.workers, n_ = this.p.parts_, longest = this.longest, dead = this.p.shares["share dead"], found = new Float32Array(W * n), column = new Float32Array(W);
    for (let j = 0; j < n; j++) {
      const a = start(j), b = start(j + 1);
      let some = 0;
      const values = [];
      for (let w = 0; w < W; w++) {
        let most = 0, away = 0;
        for (let k = a; k < b; k++) { most = Math.max(most, longest[w * n_ + k]); if (dead) away += dead[w * n_ + k]; }
        column[w] = most || (away > (b - a) / 2 ? -1 : 0);
        if (most) { values.push(most); some++; }
      }
      values.sort((p, q) => p - q);
      const median = some ? values[some >> 1] : 1;
      for (let w = 0; w < W; w++) found[this.place[w] * n + j] = column[w] < 0 ? -1 : column[w] / median;
    }
    return found;
  }
  draw() {
    this.canvas.hidden = $("heat-said").hidden = $("adding").hidden = D.workers <= 32 || !this.longest;
    if (this.canvas.hidden) return;
    $("lanes-about").textContent = "all workers, then those that cost most; click a push, or press Enter, for its story";
    this.lay();
    const [x, whole] = fit(this.canvas, this.height + 26), { n, width } = this.columns(), ratios = this.ratios(), rows = Math.min(D.workers, this.height);
    const image = x.createImageData(n, rows), hex = name => { const v = css(name); return [1, 3, 5].map(i => parseInt(v.slice(i, i + 2), 16)); }, cold = hex("cold"), hot = hex("hot"), none = hex("card"), dead = hex("dead");
    for (let r = 0; r < rows; r++) {
      const a = Math.floor(r * D.workers / rows), b = Math.max(a + 1, Math.floor((r + 1) * D.workers / rows));
      for (let j = 0; j < n; j++) {
        let most = 0, away = false;
        for (let i = a; i < b; i++) { most = Math.max(most, ratios[i * n + j]); away = away || ratios[i * n + j] < 0; }
        const part = Math.min(1, Math.max(0, (most - 1.15) / 1.35)), c = away && most < 1.5 ? dead : most ? cold.map((v, k) => v + (hot[k] - v) * part) : none, at = 4 * (r * n + j);
        image.data[at] = c[0]; image.data[at + 1] = c[1]; image.data[at + 2] = c[2]; image.data[at + 3] = 255;
      }
    }
    const small = document.createElement("canvas"); small.width = n; small.height = rows; small.getContext("2d").putImageData(image, 0, 0);
    x.imageSmoothingEnabled = false; x.drawImage(small, LEFT, 0, width, this.height);
    for (const [n] of this.named) if (D.slow.includes(n) && this.height < 4 * D.workers) {  // who costs most is seen from afar
      const row = Math.min(rows - 1, Math.floor(this.place[n] * rows / D.workers));
      x.drawImage(small, 0, row, small.width, 1, LEFT, (row + .5) * this.height / rows - 2, width, 4);
    }
    x.strokeStyle = css("line"); x.strokeRect(LEFT + .5, .5, width - 1, this.height - 1);
    x.fillStyle = css("mute"); x.textAlign = "right";
    if (D.hosts.length) this.hosts(x); else { x.fillText("worker 0", LEFT - 9, 8); x.fillText("worker " + (D.workers - 1), LEFT - 9, this.height - 8); }
    this.labels(x, LEFT + width);
    x.textAlign = "left"; x.fillStyle = css("mute");
    x.fillText(`longest step against the median worker at that time: pale 1x, dark 2.5x and more; grey: dead${D.hosts.length ? "; by host" : ""}. Click, or Enter, adds a lane.`, LEFT, this.height + 14);
    if (document.activeElement === this.canvas) {
      const y = (this.mark[0] + .5) / D.workers * this.height, a = LEFT + this.mark[1] * width;
      x.strokeStyle = css("focus"); x.lineWidth = 2; x.beginPath(); x.moveTo(LEFT, y); x.lineTo(LEFT + width, y); x.moveTo(a, 0); x.lineTo(a, this.height); x.stroke(); x.lineWidth = 1;
      x.fillStyle = css("ink"); x.textAlign = "right"; x.fillText("▸ worker " + this.order[this.mark[0]], LEFT - 9, Math.max(22, Math.min(this.height - 22, y)));
    }
  }
  hosts(x) {
    let last = "", shown = -20;
    this.order.forEach((n, i) => {
      const host = D.hosts[n], y = i / D.workers * this.height;
      if (host !== last && y - shown >= 14) { x.fillText(host.length > 12 ? host.slice(0, 11) + "…" : host, LEFT - 9, y + 7); shown = y; }
      last = host;
    });
  }
  labels(x, left) {
    const found = this.named.map(([n, text]) => ({ n, text, y: (this.place[n] + .5) / D.workers * this.height })).sort((a, b) => a.y - b.y);
    let before = -10;
    for (const one of found) { one.at = Math.max(one.y, before + 16, 8); before = one.at; }
    for (let i = found.length - 1, next = this.height + 8; i >= 0; i--) { found[i].at = Math.min(found[i].at, next - 16); next = found[i].at; }
    x.textAlign = "left";
    for (const { n, text, y, at } of found) {
      x.strokeStyle = css("mute"); x.beginPath(); x.moveTo(left + 1, y); x.lineTo(left + 12, at); x.lineTo(left + 17, at); x.stroke();
      x.fillStyle = D.slow.includes(n) ? css("bad") : css("ink"); x.font = (D.slow.includes(n) ? "600 " : "") + FONT;
      x.fillText(text, left + 21, at); x.font = FONT;
    }
  }
  at(part) { const [from, to] = this.span; return from + part * (to - from); }
  under(e) {
    const box = this.canvas.getBoundingClientRect(), { width } = this.columns(), i = Math.floor((e.clientY - box.top) / this.height * D.workers), part = (e.clientX - box.left - LEFT) / width;
    return i < 0 || i >= D.workers || part < 0 || part > 1 ? [-1, 0] : [i, this.at(part)];
  }
  moved(e) {
    const [i, t] = this.under(e);
    tip(e, i < 0 ? "" : this.say(i, t));
  }
  say(i, t) {
    const n = this.order[i], [from, to] = this.span, columns = this.columns(), j = Math.min(columns.n - 1, Math.floor((t - from) / (to - from) * columns.n)), count = this.p.parts_;
    const s = Math.max(0, ...this.longest.subarray(n * count + columns.start(j), n * count + columns.start(j + 1)));
    return `worker ${n}${D.hosts.length && D.hosts[n] ? " on " + D.hosts[n] : ""}\n${s ? "longest step " + brief(s) : "no step ends"} about ${t.toFixed(1)} s\ncosts the job ${brief(D.costs[n])}`;
  }
  key(e) {
    const by = e.shiftKey ? 20 : 1, does = { PageUp: () => { this.mark[0] = Math.max(0, this.mark[0] - 25); }, PageDown: () => { this.mark[0] = Math.min(D.workers - 1, this.mark[0] + 25); }, ArrowUp: () => { this.mark[0] = Math.max(0, this.mark[0] - by); }, ArrowDown: () => { this.mark[0] = Math.min(D.workers - 1, this.mark[0] + by); },
      ArrowLeft: () => { this.mark[1] = Math.max(0, this.mark[1] - .02); }, ArrowRight: () => { this.mark[1] = Math.min(1, this.mark[1] + .02); },
      Enter: () => this.open(this.order[this.mark[0]], this.at(this.mark[1])) }[e.key];
    if (does) {
      e.preventDefault(); does(); this.draw();
      $("heat-said").textContent = this.say(this.mark[0], this.at(this.mark[1])).replaceAll("\n", ", ");
    }
  }
}

