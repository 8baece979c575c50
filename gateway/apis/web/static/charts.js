// Drawings of the dashboard: a line chart, and a map of KV blocks. Colors come from the style sheet.

import { duration, el, number, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 64;
const SHORTEST_MS = 60_000; // the shortest time that a chart covers
const COLUMNS = 32;
const MAX_CELLS = 512;
const CELL = 0.82; // the side of a cell; the rest of the unit is a gap

/** A line chart of the last minutes. */
export class LineChart {
  constructor(title, windowMs) {
    this.windowMs = windowMs;
    this.title = title;
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.area, this.line);
    this.now = el("strong");
    this.highest = el("span", { className: "hint" });
    this.element = el("figure", { className: "chart" },
      el("figcaption", {}, el("span", {}, title), this.now), this.drawing, this.highest);
  }

  /** Draw points {at, value}, oldest first. */
  draw(points) {
    if (!points.length) return;
    const end = points.at(-1).at;
    const highest = Math.max(...points.map(({ value }) => value));
    const top = Math.max(1, highest);
    const span = Math.min(this.windowMs, Math.max(SHORTEST_MS, end - points[0].at));
    const places = points.map(({ at, value }) => {
      const x = WIDTH * (1 - (end - at) / span);
      return `${x.toFixed(1)},${(HEIGHT - 1 - (HEIGHT - 4) * (value / top)).toFixed(1)}`;
    });
    const path = `M${places.join("L")}`;
    const [first] = places[0].split(",");
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V${HEIGHT}H${first}Z`);
    const now = number(points.at(-1).value, top < 10 ? 1 : 0);
    const most = number(highest, top < 10 ? 1 : 0);
    this.now.textContent = now;
    this.highest.textContent = `highest ${most} in ${duration(span)}`;
    this.drawing.setAttribute("aria-label", `${this.title}: now ${now}, highest ${most}`);
  }
}

/** A map of a node's KV blocks, in the order used, cached, free. A cell may stand for several blocks. */
export class BlockMap {
  constructor(name) {
    this.name = name;
    this.paths = Object.fromEntries(["used", "cached", "free"].map((kind) => [kind, svg("path", { class: kind })]));
    this.drawing = svg("svg", { class: "blocks", role: "img" }, ...Object.values(this.paths));
    this.words = el("p", { className: "hint" });
    this.element = el("div", {}, this.drawing, this.words);
    this.drawn = "";
  }

  draw(total, used, cached) {
    const key = `${total} ${used} ${cached}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const perCell = Math.max(1, Math.ceil(total / MAX_CELLS));
    const numCells = Math.ceil(total / perCell);
    // A part of a cell counts as the whole, so that a single used block shows.
    const numUsed = Math.ceil(used / perCell);
    const numTaken = Math.max(numUsed, Math.ceil((used + cached) / perCell));
    const rows = Math.max(1, Math.ceil(numCells / COLUMNS));
    this.drawing.setAttribute("viewBox", `0 0 ${COLUMNS} ${rows}`);
    this.paths.used.setAttribute("d", cells(0, numUsed));
    this.paths.cached.setAttribute("d", cells(numUsed, numTaken));
    this.paths.free.setAttribute("d", cells(numTaken, numCells));
    const free = Math.max(0, total - used - cached);
    const scale = perCell > 1 ? `; a cell is ${number(perCell)} blocks` : "";
    const words = `${number(used)} used, ${number(cached)} cached, ${number(free)} free of ${number(total)}${scale}`;
    this.words.textContent = words;
    this.drawing.setAttribute("aria-label", `${this.name}: ${words}`);
  }
}

function cells(from, to) {
  let path = "";
  for (let i = from; i < to; i += 1) {
    path += `M${i % COLUMNS} ${Math.floor(i / COLUMNS)}h${CELL}v${CELL}h-${CELL}z`;
  }
  return path;
}
