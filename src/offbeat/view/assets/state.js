// What the page knows of the job: the messages of the event stream are applied here. Nothing here touches the document.

const EVENTS = 200;
const RECENT = 300;
const FIGURES = ["samples_per_s", "version", "waiting", "loss", "alive"]; // in the order of a sample, after its time

export class State {
  constructor() {
    this.order = [];
    this.window = 15;
    this.t = 0;
    this.movedAt = 0;
    this.over = this.live = false;
    this.shown = [];
    this.lanes = new Map(); // worker -> list of [start, stop, parts], parts a list of [place, seconds]
    this.tails = {};
    this.folds = [];
    this.events = [];
    this.recent = {}; // figure -> [times, values]
    this.heat = null;
    this.job = null; // the newest "state" of a message
    this.chosen = null;
    this.extra = null; // the lane of a chosen worker that is not among those shown
  }

  apply(message, now) {
    if (message.whole) {
      this.order = message.order;
      this.window = message.window;
      this.lanes.clear();
      this.folds = this.events = [];
      this.recent = {};
      for (const [name, pairs] of Object.entries(message.recent)) this.recent[name] = [pairs.map((one) => one[0]), pairs.map((one) => one[1])];
      this.heat = null;
      this.t = 0;
    }
    if (message.t !== this.t) {
      this.t = message.t;
      this.movedAt = now - 1000 * (message.age || 0);
    }
    this.over = message.over;
    this.live = message.live;
    this.shown = message.shown;
    this.tails = message.tails;
    for (const [worker, lane] of Object.entries(message.lanes)) this.#lane(Number(worker), lane);
    for (const worker of this.lanes.keys()) if (!this.shown.includes(worker)) this.lanes.delete(worker);
    const begin = this.t - this.window;
    if (message.folds) this.folds = [...this.folds, ...message.folds].filter((t) => t >= begin);
    if (message.events) this.events = [...this.events, ...message.events].slice(-EVENTS);
    for (const [t, ...values] of message.samples || []) {
      values.forEach((value, at) => {
        if (value === null) return;
        const series = (this.recent[FIGURES[at]] ||= [[], []]);
        series[0].push(t);
        series[1].push(value);
        if (series[0].length > RECENT) series.forEach((list) => list.shift());
      });
    }
    if (message.state) this.job = message.state;
    if (message.heat) this.#columns(message.heat);
  }

  // The job's time now: it goes on while no record comes, so that a wait is seen to grow.
  now(clock) {
    return this.live ? this.t + Math.max(0, clock - this.movedAt) / 1000 : this.t;
  }

  #lane(worker, { entries, all }) {
    const begin = this.t - this.window;
    const kept = all ? [] : (this.lanes.get(worker) || []).filter((entry) => entry[1] >= begin);
    this.lanes.set(worker, [...kept, ...entries.map(entryOf)]);
  }

  #columns(heat) {
    if (heat.all) {
      const rowOf = new Map();
      heat.rows.forEach((workers, row) => workers.forEach((worker) => rowOf.set(worker, row)));
      this.heat = { columns: new Map(), rows: heat.rows, rowOf, scale: heat.scale };
    }
    if (!this.heat) return;
    this.heat.width = heat.width;
    for (const [at, text] of Object.entries(heat.columns)) {
      this.heat.columns.set(Number(at), Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    }
  }

  // How slow a row was in a column: the ratio to the median, "dead", or null.
  ratio(row, column) {
    const { columns, scale } = this.heat;
    const level = columns.get(column)?.[row] ?? 0;
    if (level === scale.dead) return "dead";
    if (level < scale.first) return null;
    return scale.least * (scale.most / scale.least) ** ((level - scale.first) / (scale.last - scale.first));
  }
}

export function entryOf([start, ...flat]) {
  const parts = [];
  let stop = start;
  for (let at = 0; at < flat.length; at += 2) {
    parts.push([flat[at], flat[at + 1] / 1000]);
    stop += flat[at + 1] / 1000;
  }
  return [start, stop, parts];
}
