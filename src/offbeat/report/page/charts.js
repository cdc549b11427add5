// Curves, the heat map of many workers, the theme, and the beginning of everything.
function joined(points, columns) {  // fewer points than there are: least, mean and greatest of each column
  const from = points[0][0], width = (points[points.length - 1][0] - from) / columns || 1, found = [];
  let last = -1;
  for (const [t, least, mean, most] of points) {
    const at = Math.floor((t - from) / width), q = found[found.length - 1];
    if (at !== last) { found.push([t, least, mean, most, 1]); last = at; continue; }
    q[1] = Math.min(q[1], least); q[2] += (mean - q[2]) / ++q[4]; q[3] = Math.max(q[3], most);
  }
  return found;
}
function chart(curve) {
  const [x, width] = fit($("chart"), 190), left = 56, right = 58, bottom = 22, top = 8;
  const p = joined(curve.points, Math.max(20, Math.floor(width / 5)));
  const from = D.began, to = Math.max(D.end, from + 1e-6), values = p.flatMap(q => [q[1], q[3]]);
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && low < high * .4) low = 0;
  if (low === high) { low -= Math.abs(low) * .1 || 1; high += Math.abs(high) * .1 || 1; }
  const X = t => left + (t - from) / (to - from) * (width - left - right), Y = v => top + (high - v) / (high - low) * (190 - top - bottom);
  x.textAlign = "right"; x.strokeStyle = css("line");
  const [ticks, digits] = steps(low, high, 4);
  for (const v of ticks) { x.beginPath(); x.moveTo(left, Y(v)); x.lineTo(width - right, Y(v)); x.stroke(); x.fillStyle = css("mute"); x.fillText(Math.abs(v) >= 1e5 ? v.toExponential(1) : v.toFixed(digits), left - 7, Y(v)); }
  const [times, timeDigits] = steps(from, to, Math.max(2, Math.floor(width / 130)));
  x.textAlign = "center";
  for (const t of times) x.fillText(t.toFixed(timeDigits) + " s", X(t), 190 - 8);
  x.fillStyle = css("forward"); x.globalAlpha = .45; x.beginPath();
  p.forEach((q, i) => x[i ? "lineTo" : "moveTo"](X(q[0]), Y(q[3])));
  p.slice().reverse().forEach(q => x.lineTo(X(q[0]), Y(q[1])));
  x.closePath(); x.fill(); x.globalAlpha = 1;
  x.strokeStyle = css("backward"); x.lineWidth = 1.8; x.beginPath();
  p.forEach((q, i) => x[i ? "lineTo" : "moveTo"](X(q[0]), Y(q[2]))); x.stroke(); x.lineWidth = 1;
  const end = p[p.length - 1];
  x.fillStyle = css("ink"); x.font = "600 " + FONT; x.textAlign = "left"; x.fillText(String(+end[2].toPrecision(3)), Math.min(X(end[0]) + 6, width - right + 6), Math.max(8, Y(end[2])));
}

// The longest step of each worker at each time against the median worker; of the workers of one pixel row the slowest is shown.
class Heat {
  constructor(pushes, timeline) {
    this.canvas = $("heat"); this.longest = pushes.c.longest; this.timeline = timeline; this.mark = [0, .5];
    this.order = Array.from({ length: D.workers }, (_, n) => n);
    if (D.hosts.length) this.order.sort((a, b) => D.hosts[a] < D.hosts[b] ? -1 : D.hosts[a] > D.hosts[b] ? 1 : a - b);
    this.place = new Int32Array(D.workers); this.order.forEach((n, i) => { this.place[n] = i; });
    this.height = Math.min(420, Math.max(160, D.workers));
    this.named = D.costs.map((cost, n) => [cost, n]).filter(([cost]) => cost > .01 * D.seconds).sort((a, b) => b[0] - a[0]).slice(0, 6).map(([, n]) => n);
    this.mark[0] = this.place[this.named[0] ?? 0];
    this.cycle = (D.end - D.began) * D.workers / Math.max(1, D.pushes);
    this.canvas.addEventListener("mousemove", e => this.moved(e)); this.canvas.addEventListener("mouseleave", e => tip(e, ""));
    this.canvas.addEventListener("click", e => { const [i, t] = this.under(e); if (i >= 0) { this.mark = [i, .5]; this.open(this.order[i], t); } });
    this.canvas.addEventListener("keydown", e => this.key(e));
    this.canvas.addEventListener("focus", () => this.draw()); this.canvas.addEventListener("blur", () => this.draw());
    timeline.others.push(() => this.draw());
  }
  open(w, t) {
    this.timeline.add(w); this.timeline.current = Math.max(0, this.timeline.workers.indexOf(w));
    const i = this.timeline.near(w, t);
    if (i >= 0) this.timeline.choose(i); else this.timeline.draw();
  }
  columns() {
    const [from, to] = this.timeline.view, low = Math.max(0, Math.floor(from / D.width)), high = Math.min(D.parts - 1, Math.ceil(to / D.width) - 1);
    const width = Math.max(100, (this.canvas.clientWidth || 600) - LEFT - 190), whole = Math.ceil((to - from) / (1.5 * this.cycle));
    const n = Math.max(1, Math.min(high - low + 1, Math.floor(width / 2), whole));  // a column has a step of nearly every worker
    return { low, high, n, width, count: high - low + 1 };
  }
  ratios() {
    const { low, n, count } = this.columns(), W = D.workers, found = new Float32Array(W * n), column = new Float32Array(W);
    for (let j = 0; j < n; j++) {
      const a = low + Math.floor(j * count / n), b = Math.max(a + 1, low + Math.floor((j + 1) * count / n));
      let some = 0;
      const values = [];
      for (let w = 0; w < W; w++) {
        let most = 0;
        for (let k = a; k < b; k++) most = Math.max(most, this.longest[w * D.parts + k]);
        column[w] = most;
        if (most) { values.push(most); some++; }
      }
      values.sort((p, q) => p - q);
      const median = some ? values[some >> 1] : 1;
      for (let w = 0; w < W; w++) found[this.place[w] * n + j] = column[w] / median;
    }
    return found;
  }
  draw() {
    const [x, whole] = fit(this.canvas, this.height + 26), { n, width } = this.columns(), ratios = this.ratios(), rows = Math.min(D.workers, this.height);
    const image = x.createImageData(n, rows), hex = name => { const v = css(name); return [1, 3, 5].map(i => parseInt(v.slice(i, i + 2), 16)); }, cold = hex("cold"), hot = hex("hot"), none = hex("card");
    for (let r = 0; r < rows; r++) {
      const a = Math.floor(r * D.workers / rows), b = Math.max(a + 1, Math.floor((r + 1) * D.workers / rows));
      for (let j = 0; j < n; j++) {
        let most = 0;
        for (let i = a; i < b; i++) most = Math.max(most, ratios[i * n + j]);
        const part = Math.min(1, Math.max(0, (most - 1.15) / 1.35)), c = most ? cold.map((v, k) => v + (hot[k] - v) * part) : none, at = 4 * (r * n + j);
        image.data[at] = c[0]; image.data[at + 1] = c[1]; image.data[at + 2] = c[2]; image.data[at + 3] = 255;
      }
    }
    const small = document.createElement("canvas"); small.width = n; small.height = rows; small.getContext("2d").putImageData(image, 0, 0);
    x.imageSmoothingEnabled = false; x.drawImage(small, LEFT, 0, width, this.height);
    x.strokeStyle = css("line"); x.strokeRect(LEFT + .5, .5, width - 1, this.height - 1);
    x.fillStyle = css("mute"); x.textAlign = "right";
    if (D.hosts.length) this.hosts(x); else { x.fillText("worker 0", LEFT - 9, 8); x.fillText("worker " + (D.workers - 1), LEFT - 9, this.height - 8); }
    this.labels(x, LEFT + width);
    x.textAlign = "left"; x.fillStyle = css("mute");
    x.fillText(`longest step against the median worker at that time: pale 1x, dark 2.5x and more${D.hosts.length ? "; by host" : ""}. Click, or Enter, adds a lane.`, LEFT, this.height + 14);
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
    const found = this.named.map(n => ({ n, y: (this.place[n] + .5) / D.workers * this.height })).sort((a, b) => a.y - b.y);
    let before = -10;
    for (const one of found) { one.at = Math.max(one.y, before + 16, 8); before = one.at; }
    for (let i = found.length - 1, next = this.height + 8; i >= 0; i--) { found[i].at = Math.min(found[i].at, next - 16); next = found[i].at; }
    x.textAlign = "left";
    for (const { n, y, at } of found) {
      x.strokeStyle = css("mute"); x.beginPath(); x.moveTo(left + 1, y); x.lineTo(left + 12, at); x.lineTo(left + 17, at); x.stroke();
      x.fillStyle = D.slow.includes(n) ? css("bad") : css("ink"); x.font = (D.slow.includes(n) ? "600 " : "") + FONT;
      x.fillText(`worker ${n}: ${brief(D.costs[n])}, ${D.seconds ? (100 * D.costs[n] / D.seconds).toFixed(0) : 0} %`, left + 21, at); x.font = FONT;
    }
  }
  under(e) {
    const box = this.canvas.getBoundingClientRect(), { width } = this.columns(), i = Math.floor((e.clientY - box.top) / this.height * D.workers), part = (e.clientX - box.left - LEFT) / width;
    return i < 0 || i >= D.workers || part < 0 || part > 1 ? [-1, 0] : [i, this.timeline.view[0] + part * (this.timeline.view[1] - this.timeline.view[0])];
  }
  moved(e) {
    const [i, t] = this.under(e);
    if (i < 0) { tip(e, ""); return; }
    const n = this.order[i], part = Math.min(D.parts - 1, Math.floor(t / D.width)), s = this.longest[n * D.parts + part] * D.tick;
    tip(e, `worker ${n}${D.hosts.length && D.hosts[n] ? " on " + D.hosts[n] : ""}\n${s ? "longest step " + brief(s) : "no step ends"} about ${t.toFixed(1)} s\ncosts the job ${brief(D.costs[n])}`);
  }
  key(e) {
    const by = e.shiftKey ? 20 : 1, does = { ArrowUp: () => { this.mark[0] = Math.max(0, this.mark[0] - by); }, ArrowDown: () => { this.mark[0] = Math.min(D.workers - 1, this.mark[0] + by); },
      ArrowLeft: () => { this.mark[1] = Math.max(0, this.mark[1] - .02); }, ArrowRight: () => { this.mark[1] = Math.min(1, this.mark[1] + .02); },
      Enter: () => this.open(this.order[this.mark[0]], this.timeline.view[0] + this.mark[1] * (this.timeline.view[1] - this.timeline.view[0])) }[e.key];
    if (does) { e.preventDefault(); does(); this.draw(); }
  }
}

function curves() {
  const select = $("curve");
  $("nocurve").hidden = D.curves.length > 0 && !D.curves[0].name.startsWith("staleness");
  select.hidden = $("chart").hidden = !D.curves.length;
  D.curves.forEach((curve, i) => { const o = document.createElement("option"); o.value = i; o.textContent = curve.name; select.append(o); });
  const draw = () => { if (D.curves.length) chart(D.curves[+select.value || 0]); };
  select.onchange = draw;
  return draw;
}

async function main() {
  const asked = new URLSearchParams(location.hash.slice(1)), root = document.documentElement;
  if (["light", "dark"].includes(asked.get("theme"))) root.dataset.theme = asked.get("theme");
  const pushes = new Pushes(await unpack()), story = new Story(pushes), painter = new Painter(pushes);
  const timeline = new Timeline(pushes, painter, i => story.tell(i)), draws = [() => timeline.draw(), curves()];
  story.go = i => timeline.choose(i);
  const ask = text => { const found = /^\s*(\d+)\s*@\s*(\d+)\s*$/.exec(text || ""), i = found ? pushes.find(+found[1], +found[2]) : -1; if (i >= 0) timeline.choose(i); return i >= 0; };
  $("find").onchange = e => { e.target.setCustomValidity(!e.target.value || ask(e.target.value) ? "" : "No such push in this page: WORKER@CLOCK, for instance 2@17"); e.target.reportValidity(); };
  if ($("add")) $("add").onchange = e => { timeline.add(parseInt(e.target.value, 10)); e.target.value = ""; };
  if ($("heat")) { const heat = new Heat(pushes, timeline); draws.push(() => heat.draw()); }
  const draw = () => draws.forEach(one => one());
  $("theme").onclick = () => { const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; root.dataset.theme = dark ? "light" : "dark"; draw(); };
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const time = /^([\d.]+)-([\d.]+)$/.exec(asked.get("t") || "");
  if (time) timeline.show(+time[1], +time[2]);
  draw();
  ask(asked.get("push"));
  root.dataset.ready = Math.round(performance.now());
}
main();
