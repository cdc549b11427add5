// Draws on canvases: the lanes of the last seconds, the map of all workers, and the steps of all workers.

import { count, seconds } from "./words.js";

const LEFT = 92;
const ROW = 35;
const BAR = 24;
const TEXT = '12.5px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
const BOLD = `600 ${TEXT}`;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 800;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = TEXT;
  pen.textBaseline = "middle";
  return [pen, width];
}

// Each kind of time has a pattern beside its colour.
const STRIPES = { data: 1, gc: -1, evaluation: 2, save: 2 };

export function fill(pen, colour, kind, x, y, width, height) {
  pen.fillStyle = colour(kind);
  pen.fillRect(x, y, width, height);
  const slant = STRIPES[kind];
  if (!slant || width < 5) return;
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = colour("card");
  pen.globalAlpha = 0.45;
  pen.lineWidth = 1;
  pen.beginPath();
  if (slant === 2) for (let at = y + 3; at < y + height; at += 4) pen.moveTo(x, at), pen.lineTo(x + width, at);
  else for (let at = x - height; at < x + width; at += 6) pen.moveTo(at, slant > 0 ? y + height : y), pen.lineTo(at + height, slant > 0 ? y : y + height);
  pen.stroke();
  pen.restore();
}

function hatched(pen, colour, x, y, width, height) {
  pen.save();
  pen.strokeStyle = colour("dead");
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, Math.max(1, width - 1), height - 1);
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 7) pen.moveTo(at, y + height), pen.lineTo(at + height, y);
  pen.stroke();
  pen.restore();
}

function label(pen, colour, text, x, y, width) {
  pen.font = BOLD;
  const needed = pen.measureText(text).width + 12;
  if (needed < width) {
    pen.fillStyle = colour("card");
    pen.fillRect(x + 6, y - 9, needed - 4, 18);
    pen.fillStyle = colour("ink");
    pen.textAlign = "left";
    pen.fillText(text, x + 10, y);
  }
  pen.font = TEXT;
}

// Returns what is where, for the pointer: a function from (x, y) to a sentence or null.
export function drawLanes(canvas, state, workers, culprits, clock) {
  const colour = colours();
  const top = 22;
  const [pen, width] = prepared(canvas, top + ROW * workers.length + 22);
  const now = state.now(clock);
  const begin = now - state.window;
  const right = width - 8;
  const at = (t) => LEFT + ((Math.min(now, Math.max(begin, t)) - begin) / state.window) * (right - LEFT);
  const seen = new Map();
  const see = (kind, time) => seen.set(kind, (seen.get(kind) || 0) + time);

  pen.fillStyle = colour("mute");
  pen.textAlign = "right";
  pen.fillText("new version", LEFT - 12, 10);
  pen.strokeStyle = colour("mute");
  pen.beginPath();
  for (const t of state.folds) if (t >= begin) pen.moveTo(Math.round(at(t)) + 0.5, 5), pen.lineTo(Math.round(at(t)) + 0.5, 15);
  pen.stroke();

  workers.forEach((worker, row) => {
    const middle = top + ROW * row + ROW / 2;
    const high = middle - BAR / 2;
    const hit = culprits.has(worker);
    pen.font = hit ? BOLD : TEXT;
    pen.fillStyle = colour(hit ? "bad" : worker === state.chosen ? "accent" : "ink");
    pen.textAlign = "right";
    pen.fillText(`${hit ? "▸ " : ""}worker ${worker}`, LEFT - 12, middle);
    pen.font = TEXT;
    const [entries, tail] = laneOf(state, worker);
    for (const [start, stop, parts] of entries) {
      if (stop < begin) continue;
      let t = start;
      for (const [place, time] of parts) {
        const kind = state.order[place];
        const x = at(t);
        const wide = at(t + time) - x;
        t += time;
        if (t < begin) continue;
        see(kind, time);
        stretch(pen, colour, kind, x, wide, high, middle, time);
      }
    }
    tail.forEach(([since, what], place) => {
      const until = place + 1 < tail.length ? tail[place + 1][0] : now;
      if (until < begin || until <= since) return;
      see(what, until - since);
      stretch(pen, colour, what, at(since), at(until) - at(since), high, middle, until - since);
    });
  });

  pen.fillStyle = colour("mute");
  pen.textAlign = "center";
  for (let back = 0; back <= state.window; back += 3) {
    const x = at(now - back);
    pen.textAlign = back === 0 ? "right" : back === state.window ? "left" : "center";
    pen.fillText(back ? `-${back} s` : state.live ? "now" : state.over ? "end" : `${seconds(now)}`, x, top + ROW * workers.length + 13);
  }
  const find = (x, y) => {
    const row = Math.floor((y - top) / ROW);
    const t = begin + ((x - LEFT) / (right - LEFT)) * state.window;
    if (row < 0 || row >= workers.length || x < LEFT || x > right) return null;
    return told(state, workers[row], t, now);
  };
  return { find, seen, rowOf: (y) => workers[Math.floor((y - top) / ROW)] };
}

function laneOf(state, worker) {
  if (state.lanes.has(worker)) return [state.lanes.get(worker), state.tails[worker] || []];
  return state.extra && state.extra.worker === worker ? [state.extra.entries, state.extra.tail] : [[], []];
}

function stretch(pen, colour, kind, x, wide, high, middle, time) {
  if (kind === "wait") {
    pen.fillStyle = colour("wait");
    pen.fillRect(x, middle - 1.5, Math.max(wide, 0.5), 3);
  } else if (kind === "dead" || kind === "awaited") {
    hatched(pen, colour, x, high, wide, BAR);
    label(pen, colour, `${kind === "dead" ? "dead" : "not come yet,"} for ${seconds(time)}`, x, middle, wide);
  } else if (kind === "work") {
    pen.fillStyle = colour("work");
    pen.globalAlpha = 0.55;
    pen.fillRect(x, high + 4, Math.max(wide, 0.5), BAR - 8);
    pen.globalAlpha = 1;
    label(pen, colour, `in its step for ${seconds(time)}`, x, middle, time > 2 ? wide : 0);
  } else {
    fill(pen, colour, kind, x, high, Math.max(wide, 0.7), BAR);
  }
}

function told(state, worker, t, now) {
  const [entries, tail] = laneOf(state, worker);
  const entry = entries.find(([start, stop]) => start <= t && t < stop);
  if (entry) {
    const parts = entry[2].filter(([, time]) => time >= 0.0005).map(([place, time]) => `${state.order[place]} ${seconds(time)}`);
    return `worker ${worker} at ${t.toFixed(1)} s\n${parts.join("\n")}`;
  }
  for (let place = tail.length - 1; place >= 0; place -= 1) {
    const words = { wait: "waiting for the job", work: "in a step that has not ended", dead: "dead", awaited: "has not come yet" };
    if (tail[place][0] <= t && t <= now) return `worker ${worker}: ${words[tail[place][1]]}, since ${tail[place][0].toFixed(1)} s`;
  }
  return `worker ${worker} at ${t.toFixed(1)} s`;
}

function mixed(from, to, share) {
  return [0, 1, 2].map((at) => Math.round(from[at] + (to[at] - from[at]) * share));
}

function rgb(text) {
  return [1, 3, 5].map((at) => parseInt(text.length === 4 ? text[(at + 1) / 2].repeat(2) : text.slice(at, at + 2), 16));
}

// The map of all workers. `marked` is a list of [worker, words, more words].
export function drawHeat(canvas, state, marked, cursor) {
  const colour = colours();
  const rows = state.heat.rows.length;
  const each = Math.max(1, Math.floor(340 / rows));
  const height = rows * each;
  const top = 6;
  const [pen, width] = prepared(canvas, top + height + 24);
  const right = width - 300;
  const columns = Math.max(1, ...[...state.heat.columns.keys()].map((at) => at + 1));
  const [cold, hot, hotter, dead, card] = ["cold", "hot", "hotter", "dead", "card"].map((name) => rgb(colour(name)));
  const picture = new ImageData(columns, rows);
  const { scale } = state.heat;
  const usual = scale.first + Math.round((Math.log(1 / scale.least) / Math.log(scale.most / scale.least)) * (scale.last - scale.first));
  const palette = Array.from({ length: 256 }, (_, level) => {
    if (level === scale.dead) return dead;
    if (level < scale.first) return card;
    const ratio = scale.least * (scale.most / scale.least) ** ((level - scale.first) / (scale.last - scale.first));
    if (ratio <= 1.15 || level <= usual) return cold;
    return ratio < 2 ? mixed(cold, hot, Math.min(1, (ratio - 1) / 0.9)) : mixed(hot, hotter, Math.min(1, (ratio - 2) / 4));
  });
  for (let column = 0; column < columns; column += 1) {
    const levels = state.heat.columns.get(column);
    for (let row = 0; row < rows; row += 1) {
      picture.data.set([...palette[levels?.[row] ?? 0], 255], 4 * (row * columns + column));
    }
  }
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d").putImageData(picture, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 58, top, right - 58, height);
  for (const [worker, , , hit] of marked) {  // who costs most is seen from afar
    const row = state.heat.rowOf.get(worker);
    const thick = hit ? 4 : 2;
    if (row !== undefined && each < thick) pen.drawImage(small, 0, row, columns, 1, 58, top + (row + 0.5) * each - thick / 2, right - 58, thick);
  }
  pen.strokeStyle = colour("line");
  pen.strokeRect(57.5, top - 0.5, right - 57, height + 1);

  pen.fillStyle = colour("mute");
  pen.textAlign = "right";
  const step = niceStep(state.heat.rows.flat().length / 4);
  for (const [row, workers] of state.heat.rows.entries()) {
    if (workers.some((worker) => worker % step === 0)) pen.fillText(count(workers.find((worker) => worker % step === 0)), 50, Math.max(8, top + row * each));
  }
  const whole = columns * state.heat.width;
  const tick = niceStep(whole / 5);
  for (let t = 0; t <= whole; t += tick) {
    const x = 58 + (t / whole) * (right - 58);
    pen.textAlign = t === 0 ? "left" : x > right - 20 ? "right" : "center";
    pen.fillText(`${count(t)} s`, x, top + height + 14);
  }
  names(pen, colour, state, marked, right, top, each, height);
  if (cursor !== null && cursor !== undefined) {
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 1.5;
    pen.strokeRect(56, top + cursor * each - 1.5, right - 54, each + 3);
  }
  return {
    rowAt: (y) => Math.min(rows - 1, Math.max(0, Math.floor((y - top) / each))),
    columnAt: (x) => Math.min(columns - 1, Math.max(0, Math.floor(((x - 58) / (right - 58)) * columns))),
    inside: (x, y) => x >= 58 && x <= right && y >= top && y <= top + height,
  };
}

function names(pen, colour, state, marked, right, top, each, height) {
  const gap = 40;
  const places = marked
    .filter(([worker]) => state.heat.rowOf.has(worker))
    .map(([worker, words, more, hit]) => ({ row: top + (state.heat.rowOf.get(worker) + 0.5) * each, words, more, hit }))
    .sort((one, other) => one.row - other.row);
  places.forEach((one, at) => (one.y = Math.max(one.row, at ? places[at - 1].y + gap : top + 10)));
  for (let at = places.length - 1; at >= 0; at -= 1) {
    places[at].y = Math.min(places[at].y, at + 1 < places.length ? places[at + 1].y - gap : top + height - 24);
  }
  for (const { row, y, words, more, hit } of places) {
    pen.strokeStyle = colour("mute");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(right + 3, row);
    pen.lineTo(right + 10, row);
    pen.lineTo(right + 16, y);
    pen.stroke();
    pen.textAlign = "left";
    pen.font = BOLD;
    pen.fillStyle = colour(hit ? "bad" : "ink");
    pen.fillText(words, right + 21, y, 276);
    pen.font = TEXT;
    pen.fillStyle = colour("mute");
    pen.fillText(more, right + 21, y + 16, 276);
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= least && Number.isInteger(one)) || 10 * power;
}

export function drawSteps(canvas, steps) {
  const colour = colours();
  const [pen, width] = prepared(canvas, 128);
  const { least, width: each, counts, slowest, rest } = steps;
  const base = 98;
  const at = (own) => 8 + ((own - least) / (each * counts.length)) * (width - 24);
  const most = Math.sqrt(Math.max(...counts));
  counts.forEach((number, place) => {
    const own = least + each * place;
    const high = (Math.sqrt(number) / most) * 80;
    pen.fillStyle = colour(slowest.some((one) => one[1] >= own && one[1] <= own + each * 1.001) ? "data" : "backward");
    if (number) pen.fillRect(at(own), base - Math.max(2, high), Math.max(2, at(own + each) - at(own) - 1), Math.max(2, high));
  });
  pen.strokeStyle = colour("line");
  pen.beginPath();
  pen.moveTo(0, base + 0.5);
  pen.lineTo(width, base + 0.5);
  pen.stroke();
  pen.fillStyle = colour("mute");
  pen.textAlign = "left";
  pen.fillText(seconds(least), 8, base + 14);
  pen.textAlign = "right";
  pen.fillText(seconds(least + each * counts.length), width - 4, base + 14);
  const words = slowest.length ? `the other ${count(rest[0])}: ${seconds(rest[1])} to ${seconds(rest[2])}` : `${count(rest[0])} workers`;
  pen.textAlign = "center";
  pen.fillText(words, width / 2, 12);
  pen.font = BOLD;
  pen.fillStyle = colour("bad");
  pen.textAlign = "right";
  slowest.slice().reverse().forEach(([worker, own], place) => pen.fillText(`worker ${worker}: ${seconds(own)}`, width - 4, base - 20 - 16 * place));
  canvas.setAttribute("aria-label", `${words}; ${slowest.map(([worker, own]) => `worker ${worker}: ${seconds(own)}`).join(", ")}`);
}

export function swatch(canvas, kind) {
  const [pen, width] = prepared(canvas, 11);
  if (kind === "wait") stretch(pen, colours(), kind, 0, width, 0, 5.5, 0);
  else if (kind === "dead" || kind === "awaited") hatched(pen, colours(), 0, 0, width, 11);
  else if (kind === "work") (pen.globalAlpha = 0.55), fill(pen, colours(), "work", 0, 2, width, 7);
  else fill(pen, colours(), kind, 0, 0, width, 11);
}
