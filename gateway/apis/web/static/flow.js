// The graph of a flow: its rows in columns by what they wait for, with lines from each parent.

import { request } from "./api.js";
import { el, number, svg } from "./dom.js";

const SHOWN = 60;
const BOX = { width: 168, height: 40, gapX: 56, gapY: 14 };
const NAME_CHARS = 22;
const KINDS = { succeeded: "good", failed: "bad", skipped: "warn", cancelled: "warn", expired: "bad", running: "run" };

/** Shows the rows of one flow while it is open. */
export class FlowGraph {
  constructor(path) {
    this.path = path;
    this.counts = el("p", { className: "load" });
    this.drawing = svg("svg", { role: "img" });
    this.element = el("div", { className: "flow", hidden: true }, this.counts,
      el("div", { className: "flow-scroll", tabIndex: 0, role: "region", ariaLabel: "Graph of the rows" }, this.drawing));
  }

  async refresh() {
    if (this.element.hidden) return;
    const { data, counts } = await (await request(`${this.path}/rows?limit=1000`)).json();
    const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
    // A row that has made others stands for them.
    const rows = data.filter((row) => !row.made_by).slice(0, SHOWN);
    const states = Object.entries(counts).map(([state, count]) => `${number(count)} ${state}`);
    if (rows.length < total) states.push(`${number(rows.length)} boxes for ${number(total)} rows`);
    this.counts.textContent = states.join(" · ");
    this.draw(rows, data);
  }

  draw(rows, data) {
    const places = placesOf(rows);
    const width = Math.max(0, ...[...places.values()].map((at) => at.x + BOX.width)) + 2;
    const height = Math.max(0, ...[...places.values()].map((at) => at.y + BOX.height)) + 2;
    this.drawing.setAttribute("width", width);
    this.drawing.setAttribute("height", height);
    this.drawing.setAttribute("aria-label", rows.map((row) => `${row.custom_id}: ${row.state}`).join("; "));
    this.drawing.replaceChildren(
      ...rows.flatMap((row) => parentsOf(row).filter((name) => places.has(name))
        .map((name) => edge(places.get(name), places.get(row.custom_id)))),
      ...rows.map((row) => box(row, places.get(row.custom_id), data)));
  }
}

function parentsOf(row) {
  return row.after.filter((parent) => typeof parent === "string");
}

/** Return where each row stands: right of all its parents, below the earlier rows of its column. */
function placesOf(rows) {
  const byName = new Map(rows.map((row) => [row.custom_id, row]));
  const depths = new Map();
  const depthOf = (row) => {
    if (!depths.has(row.custom_id)) {
      const above = parentsOf(row).filter((name) => byName.has(name)).map((name) => depthOf(byName.get(name)));
      depths.set(row.custom_id, above.length ? 1 + Math.max(...above) : 0);
    }
    return depths.get(row.custom_id);
  };
  const used = new Map();
  const places = new Map();
  for (const row of rows) {
    const column = depthOf(row);
    const at = used.get(column) ?? 0;
    used.set(column, at + 1);
    places.set(row.custom_id, { x: 1 + column * (BOX.width + BOX.gapX), y: 1 + at * (BOX.height + BOX.gapY) });
  }
  return places;
}

function edge(from, to) {
  const [x1, y1, x2, y2] = [from.x + BOX.width, from.y + BOX.height / 2, to.x, to.y + BOX.height / 2];
  const bend = (x2 - x1) / 2;
  return svg("path", { class: "flow-edge", d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` });
}

function box(row, at, data) {
  const made = data.filter((one) => one.made_by === row.custom_id);
  const ended = made.filter((one) => !["waiting", "ready", "queued", "running"].includes(one.state)).length;
  const state = row.num_made === null ? row.state : `${number(ended)} of ${number(row.num_made)} rows`;
  const name = row.custom_id.length > NAME_CHARS ? `${row.custom_id.slice(0, NAME_CHARS - 1)}…` : row.custom_id;
  const told = [row.custom_id, state];
  if (row.waits_for.length) told.push(`waits for ${row.waits_for.join(", ")}`);
  if (row.error) told.push(row.error.message);
  return svg("g", { class: `flow-row ${KINDS[row.state] ?? ""}`, transform: `translate(${at.x},${at.y})` },
    svg("title", {}, told.join("\n")),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 6 }),
    svg("text", { x: 10, y: 17 }, name),
    svg("text", { x: 10, y: 32, class: "flow-state" }, state));
}
