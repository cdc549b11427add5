// The story of one push: its phases, its fate, who waited for it, and what led to it, as `offbeat report --why` tells it.
class Story {
  constructor(pushes) { this.p = pushes; this.box = $("story"); this.go = () => {}; }
  words(phase) { return phase === "link" ? "messages under way" : phase === "compute" ? "computing" : D.words[phase] || phase; }
  line(list, t, ...content) {
    const li = document.createElement("li"), time = document.createElement("time"), text = document.createElement("span");
    time.textContent = t.toFixed(3) + " s"; text.append(...content); li.append(time, text); list.append(li);
  }
  link(i) {
    const b = document.createElement("button");
    b.type = "button"; b.className = "link"; b.textContent = `push ${this.p.c.worker[i]}@${this.p.clock(i)}`; b.onclick = () => this.go(i);
    return b;
  }
  // Name the push that ended the wait before push i, and follow the chain.
  opened(i) {
    const other = this.p.c.other[i] - 1, by = D.enders[this.p.c.ended_by[i]];
    if (other < 0) return ["it was released"];
    const row = this.p.opener(i);
    if (row >= 0 && other === this.p.c.worker[i]) return ["it went on at once after its own push (", this.link(row), ")"];
    if (row >= 0) return [`it was released when worker ${other} had pushed (`, this.link(row), ")"];
    return [`it was released by ${by || "an event"} of worker ${other}`];
  }
  fate(i) {
    const c = this.p.c, fate = D.fates[c.fate[i]], reason = D.reasons[c.reason[i]], into = c.into[i];
    if (fate === "none yet") return D.live ? "it has no fate yet, or was not folded" : "no fate is known of it: the journal ends before";
    if (fate === "abandoned") return "the computation was abandoned: it is no push and has no fate";
    const stale = c.staleness[i] >= 0 ? `, with a staleness of ${c.staleness[i]} version${c.staleness[i] === 1 ? "" : "s"}` : "";
    return fate === "folded" ? `folded into version ${into}${stale}${reason ? ": " + reason : ""}` : `${fate} at version ${into}: ${reason}`;
  }
  tell(i) {
    this.box.hidden = i < 0;
    this.box.replaceChildren();
    if (i < 0) return;
    const p = this.p, c = p.c, w = c.worker[i], clock = p.clock(i), head = document.createElement("h3"), list = document.createElement("ol");
    head.textContent = `Push of worker ${w}, clock ${clock}: ${D.fates[c.fate[i]]}`;
    const begun = p.begun(i), arrived = p.arrived(i), waited = p.waited(i);
    if (waited > 0) this.line(list, begun - waited, `worker ${w} began to wait`);
    this.line(list, begun, waited > 0 ? `after ${brief(waited)}, ` : "", ...this.opened(i), ` with version ${c.version[i]}`);
    const parts = p.parts(i).filter(part => part[0] !== "wait");
    const bar = document.createElement("div");
    bar.className = "bar";
    for (const [kind, start, stop, phase] of parts) {
      const s = document.createElement("span"), name = this.words(phase), share = (stop - start) / (arrived - begun);
      s.className = kind + (share < .1 ? " thin" : ""); s.style.width = 100 * share + "%"; s.textContent = s.title = `${name} ${brief(stop - start)}`; bar.append(s);
    }
    const told = parts.slice().sort((a, b) => (b[2] - b[1]) - (a[2] - a[1])).slice(0, 4).map(part => `${this.words(part[3])} ${brief(part[2] - part[1])}`).join(", ");
    this.line(list, arrived, `it pushed ${c.samples[i] ? c.samples[i] + " samples " : ""}after ${brief(arrived - begun)}: ${told}` + (!Number.isNaN(c.loss[i]) ? `; loss ${c.loss[i].toPrecision(4)}` : ""));
    this.line(list, arrived + Math.max(0, c.settled[i]), this.fate(i));
    const waits = this.waits(i);
    if (waits.count) this.line(list, arrived, `it ended ${waits.count} wait${waits.count === 1 ? "" : "s"} of ${brief(waits.seconds)} together, the longest of worker ${waits.longest}`);
    const why = document.createElement("ol"), chain = this.chain(i);
    for (const [row, text] of chain) this.line(why, p.arrived(row), "because ", this.link(row), text);
    const note = made("p", "The same in a terminal: ", "note");
    note.append(made("code", `offbeat report ${D.name || "JOURNAL"} --why push=${w}@${clock}`));
    this.box.append(head, bar, list);
    if (chain.length) { const h = document.createElement("h3"); h.textContent = "What led to it"; h.style.marginTop = "8px"; this.box.append(h, why); }
    this.box.append(note);
  }
  // The waits that a push has ended: those of pushes that come later and name it as what opened the way.
  waits(i) {
    const c = this.p.c, found = { count: 0, seconds: 0, longest: -1 };
    let most = 0;
    for (let k = i + 1; k < this.p.count && k < i + 20 * D.workers + 2000; k++)
      if (c.opener[k] && c.number[k] - c.opener[k] === c.number[i] && c.waited[k]) {
        const s = this.p.waited(k);
        found.count++; found.seconds += s;
        if (s > most) { most = s; found.longest = c.worker[k]; }
      }
    return found;
  }
  // From push to push: the one that ended the wait before it, and so on. What each took says where the time went.
  chain(i) {
    const found = [];
    for (let row = this.p.opener(i); row >= 0 && found.length < 8; row = this.p.opener(row)) {
      const largest = this.p.parts(row).filter(part => part[0] !== "wait").sort((a, b) => (b[2] - b[1]) - (a[2] - a[1]))[0];
      found.push([row, ` of worker ${this.p.c.worker[row]} came then, after ${brief(this.p.arrived(row) - this.p.begun(row))}` + (largest ? `, most of it ${this.words(largest[3])} (${brief(largest[2] - largest[1])})` : "")]);
    }
    return found;
  }
}
