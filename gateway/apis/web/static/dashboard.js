// The dashboard: pools, nodes, tenants, times and events, drawn anew with each state.

import { BlockMap, LineChart } from "./charts.js";
import { byId, duration, el, number } from "./dom.js";
import { PoolHistory, WINDOW_MS, states } from "./feed.js";

const MAX_EVENTS = 40;
const LATE_MS = 5_000; // A node sends a heartbeat every 2 s.
const REASONS = {
  lost: "its node was lost",
  drain: "its node was draining",
  pressure: "its node was full",
  lacking: "its node lacks the adapter",
  unlisted: "its node did not know it",
  repaired: "an audit repaired it",
};
const pools = new Map(); // name → PoolView
let controller;

/** Read the feed until `stopDashboard`. */
export async function startDashboard() {
  if (controller) return;
  controller = new AbortController();
  const { signal } = controller;
  say("Connecting…");
  for await (const { state, problem } of states(signal)) {
    if (signal.aborted) return;
    if (problem) say(problem, "bad");
    else tryShow(state);
  }
}

export function stopDashboard() {
  controller?.abort();
  controller = undefined;
}

function say(text, kind = "") {
  const status = byId("feed-status");
  // A screen reader announces a changed text only.
  if (status.textContent !== text) status.textContent = text;
  status.className = `feed ${kind}`;
}

function tryShow(state) {
  try {
    show(state);
  } catch (error) {
    say(`This page cannot show the gateway's state. Reload it. (${error.message})`, "bad");
  }
}

function show(state) {
  if (!state.redis_up) say("Redis does not answer: what is shown is the last known state.", "bad");
  else if (state.away) say(`The Redis of these pools does not answer: ${state.away.join(", ")}.`, "bad");
  else if (!state.pools.length) say("No model is served yet. Start a node.", "bad");
  else say(`Live · from the gateway ${state.gateway.name}` +
    (state.folded ? ` · without a node for an hour or more: ${state.folded.join(", ")}` : ""));
  showTimes(state.gateway);
  if (!state.redis_up) return;
  removeOthers(pools, state.pools.map(({ pool }) => pool));
  for (const pool of state.pools) {
    const view = pools.get(pool.pool) ?? new PoolView(pool);
    view.show(pool, state.at_ms);
    // A new view is filled before it is added, so that a screen reader does not read its old events as new ones.
    if (!pools.has(pool.pool)) byId("pools").append(view.element);
    pools.set(pool.pool, view);
  }
}

/** Remove the views of what is not listed any more. */
function removeOthers(views, listed) {
  for (const [name, view] of views) {
    if (listed.includes(name)) continue;
    view.element.remove();
    views.delete(name);
  }
}

function showTimes({ name, window_s: seconds, first_token: first, per_token: each }) {
  const section = byId("times");
  section.hidden = false;
  section.replaceChildren(
    el("h2", {}, "Latency of streams at this gateway"),
    table(["", "p50", "p90", "p99"], [
      ["Time to first token", ...percentilesOf(first)],
      ["Time between tokens", ...percentilesOf(each)],
    ]),
    el("p", { className: "hint" }, `Streams of the last ${seconds / 60} minutes through the gateway ${name}: ` +
      `${number(first.count)}. Other gateways measure their own. The time between tokens is a mean for each stream.`),
  );
}

/** One pool: its sums, charts, nodes, classes, tenants and events. */
class PoolView {
  constructor({ pool, model }) {
    this.history = new PoolHistory();
    this.nodes = new Map(); // node → NodeView
    this.tiles = el("div", { className: "tiles" });
    this.charts = {
      out: new LineChart("Tokens out/s", WINDOW_MS),
      in: new LineChart("Tokens in/s", WINDOW_MS),
      running: new LineChart("Running jobs", WINDOW_MS),
      queued: new LineChart("Queued jobs", WINDOW_MS),
    };
    this.paused = el("p", { className: "badge warn", hidden: true });
    this.nodeList = el("div", { className: "nodes" });
    this.more = el("p", { className: "hint" });
    this.times = el("div");
    this.classes = el("div");
    this.waits = el("div");
    this.tenants = el("div");
    this.events = new EventList();
    this.element = el("section", { className: "pool" },
      el("h2", {}, model, " ", el("span", { className: "hint" }, pool === model ? "" : `pool ${pool}`)), this.paused, this.tiles,
      el("div", { className: "charts" }, ...Object.values(this.charts).map((chart) => chart.element)),
      el("h3", {}, "Nodes and their KV blocks"), legend(), this.nodeList, this.more,
      el("div", { className: "columns" },
        el("div", { className: "panel" }, el("h3", {}, "Times of the last hour"), this.times),
        el("div", { className: "panel" }, el("h3", {}, "Jobs by class"), this.classes,
          el("p", { className: "hint" }, el("a", { href: "#jobs" }, "All jobs"))),
        el("div", { className: "panel" }, el("h3", {}, "Waits and engine time"), this.waits, meaningOfStates()),
        el("div", { className: "panel" }, el("h3", {}, "Jobs by tenant"), this.tenants),
        el("div", { className: "panel" }, el("h3", {}, "Events"), this.events.element)));
  }

  show(pool, at) {
    this.history.add(pool, at);
    this.charts.out.draw(this.history.rates("tokensOut"));
    this.charts.in.draw(this.history.rates("tokensIn"));
    this.charts.running.draw(this.history.values("running"));
    this.charts.queued.draw(this.history.values("queued"));
    this.paused.hidden = !pool.paused.length;
    this.paused.textContent = `Paused: ${pool.paused.join(", ")}`;
    this.showTiles(pool);
    this.showNodes(pool);
    this.showTables(pool);
    this.events.show([...pool.events, ...this.history.preemptions]);
  }

  showTiles({ totals, num_nodes: numNodes, counts, classes, backlog_s: backlog }) {
    const used = totals.kv_blocks_total - totals.kv_blocks_free;
    const share = totals.kv_blocks_total ? Math.round((100 * used) / totals.kv_blocks_total) : 0;
    const tiles = [["Nodes", number(numNodes)], ["KV blocks used", `${share} %`],
      ["Jobs completed", number(counts.ended_succeeded)], ["Takeovers", number(counts.takeovers)],
      ["Nodes lost", number(counts.nodes_lost)], ["Preemptions", number(totals.num_preemptions)],
      ["Preemptions by swap", number(totals.num_swaps)],
      ["Prefix cache hits", shareOf(totals.prefix_hit_tokens, totals.prefix_lookup_tokens)],
      ["Foreground backlog", secondsOrUnknown(backlog.foreground)],
      ["Background backlog", secondsOrUnknown(backlog.background)],
      ["Jobs awaiting tokens", number(classes.reduce((sum, one) => sum + one.awaiting_tokens, 0))],
      ["Jobs awaiting their key", number(classes.reduce((sum, one) => sum + one.awaiting_key, 0))],
      ["Jobs expired", number(counts.ended_expired)]];
    this.tiles.replaceChildren(...tiles.map(([name, value]) => el("div", {}, el("span", {}, name), el("strong", {}, value))));
  }

  showNodes({ nodes, num_nodes: numNodes }) {
    removeOthers(this.nodes, nodes.map((node) => node.node_id));
    for (const node of nodes) {
      if (!this.nodes.has(node.node_id)) {
        this.nodes.set(node.node_id, new NodeView(node));
        this.nodeList.append(this.nodes.get(node.node_id).element);
      }
      this.nodes.get(node.node_id).show(node);
    }
    if (!numNodes) this.more.textContent = "No node is alive.";
    else this.more.textContent = numNodes > nodes.length ? `and ${numNodes - nodes.length} more nodes` : "";
  }

  showTables({ classes, tenants, last_hour: times }) {
    this.times.replaceChildren(
      table(["", "p50", "p90", "p99"], [
        ["Wait in the queue", ...percentilesOf(times.queue_s)],
        ["Time to first token (TTFT)", ...percentilesOf(times.first_token_s)],
        ["Time between tokens (ITL)", ...percentilesOf(times.inter_token_s)],
      ]),
      el("p", { className: "hint" }, `Of ${number(times.queue_s.count)} jobs that nodes took, as the nodes measured them. ` +
        "The first two begin with the submission."));
    this.classes.replaceChildren(table(["Class", "Running", "Queued", "Scheduled"],
      classes.map((one) => [one.class, number(one.running), number(one.queued), number(one.scheduled)])));
    this.waits.replaceChildren(table(["Class", "Oldest wait", "Expired", "Share"],
      classes.map((one) => [one.class, one.oldest_ms ? duration(one.oldest_ms) : "–", number(one.expired),
        one.engine_share === null ? "–" : `${number(100 * one.engine_share)} %`])));
    const rows = tenants.map((one) => [one.tenant ?? "all others", number(one.running), number(one.queued)]);
    this.tenants.replaceChildren(rows.length ? table(["Tenant", "Running", "Queued"], rows) : "No jobs now.");
  }
}

/** The newest events of a pool. An event that is shown stays where it is: a screen reader reads what is added. */
class EventList {
  constructor() {
    this.entries = new Map(); // event as JSON → its entry
    this.list = el("ol");
    this.none = el("p", { className: "hint" }, "None yet.");
    this.element = el("div", { className: "events" }, this.none, this.list);
    this.element.setAttribute("role", "log");
    this.element.setAttribute("aria-label", "Events");
  }

  show(events) {
    const newest = events.sort((one, other) => other.at_ms - one.at_ms).slice(0, MAX_EVENTS);
    const before = this.entries;
    this.entries = new Map(newest.map((event) => [JSON.stringify(event), event]));
    for (const [key, event] of this.entries) this.entries.set(key, before.get(key) ?? entryOf(event));
    for (const [key, entry] of before) if (!this.entries.has(key)) entry.remove();
    let next = this.list.firstChild;
    for (const entry of this.entries.values()) {
      if (entry === next) next = next.nextSibling;
      else this.list.insertBefore(entry, next);
    }
    this.none.hidden = this.entries.size > 0;
  }
}

function entryOf(event) {
  return el("li", { className: event.kind },
    el("time", {}, new Date(event.at_ms).toLocaleTimeString()), " ", wordsOfEvent(event));
}

/** One node: its KV blocks as a map, and its load. */
class NodeView {
  constructor(node) {
    const name = shortNode(node.node_id);
    this.device = new BlockMap(`KV blocks of ${name}`);
    this.host = new BlockMap(`Host blocks of ${name}`);
    this.badge = el("span", { className: "badge" });
    this.load = el("p", { className: "load" });
    this.hostTitle = el("p", { className: "hint" }, "On the host:");
    this.element = el("article", { className: "panel node" },
      el("h4", { title: node.node_id }, name, " ", this.badge), this.device.element, this.hostTitle, this.host.element, this.load);
  }

  show(node) {
    this.device.draw(node.kv_blocks_total, node.kv_blocks_total - node.kv_blocks_free, node.kv_blocks_cached);
    this.host.draw(node.swap_blocks_total, node.swap_blocks_total - node.swap_blocks_free, node.swap_blocks_cached);
    this.hostTitle.hidden = this.host.element.hidden = !node.swap_blocks_total;
    const [words, kind] = stateOf(node);
    this.badge.textContent = words;
    this.badge.className = `badge ${kind}`;
    this.load.textContent = [
      `${count(node.num_jobs, "job")} running`,
      `${number(node.num_running)} of ${count(node.max_num_seqs, "sequence")} in the batch, ${number(node.num_waiting)} waiting`,
      node.num_held_back ? `${number(node.num_held_back)} of them held back for chats` : "",
      `step ${duration(node.step_ms_p50)}`,
      node.state_slots_total ? `${number(node.state_slots_total - node.state_slots_free)} of ${count(node.state_slots_total, "state slot")} held, ${count(node.state_snapshots, "snapshot")}, ${count(node.state_hits, "hit")}, ${number(node.state_evictions)} evicted` : "",
      node.window_blocks_total ? `${number(node.window_blocks_total - node.window_blocks_free)} of ${count(node.window_blocks_total, "block")} of windows held, ${number(node.window_blocks_cached)} cached, ${number(node.window_evictions)} evicted` : "",
      node.prefix_hit_rate === null ? "" : `${percent(node.prefix_hit_rate)} of prompt tokens from the cache in the last minute`,
      node.page_utilization === null ? "" : `${percent(node.page_utilization)} of the held KV slots store a token, ` +
        `${percent(1 - node.page_utilization)} is fragmentation`,
      node.weight_bytes ? `model ${number(node.weight_bytes / 2 ** 20)} MiB` : "",
      `${count(node.num_preemptions, "preemption")}, ${number(node.num_swaps)} by swap`,
      ...(node.num_ranks > 1 ? ranksOf(node) : []),
      node.gpu_utilization === null ? "" : `GPU ${percent(node.gpu_utilization)} busy`,
      node.gpu_memory_total_bytes ? `${gib(node.gpu_memory_used_bytes)} of ${gib(node.gpu_memory_total_bytes)} GiB GPU memory` : "",
    ].filter(Boolean).join(" · ");
  }
}

/** What the ranks of a node spent in the last minute, and what they hold. */
function ranksOf(node) {
  const held = [["weights", node.rank_weight_bytes], ["KV blocks", node.rank_kv_bytes]].filter(([, sizes]) => sizes.length);
  return [
    `${count(node.num_ranks, "rank")}, lost ${count(node.num_rank_losses, "time")}`,
    node.stage_idle.length ? `stages idle ${node.stage_idle.map(percent).join(", ")}` : "",
    node.rank_exchange_ms === null ? "" : `a step exchanges for ${duration(node.rank_exchange_ms)} and waits for ${duration(node.rank_wait_ms)}`,
    ...held.map(([name, sizes]) => `${name} by rank: ${sizes.map((size) => number(size / 2 ** 20)).join(" + ")} MiB`),
  ];
}

function percentilesOf(times) {
  return ["p50_ms", "p90_ms", "p99_ms"].map((key) => (times.count ? duration(times[key]) : "–"));
}

function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

const percent = (share) => `${number(100 * share)} %`;
const shareOf = (part, whole) => (whole ? percent(part / whole) : "–");
const gib = (bytes) => number(bytes / 2 ** 30, 1);

function stateOf(node) {
  if (node.silent_ms > LATE_MS) return [`silent for ${duration(node.silent_ms)}`, "bad"];
  const [trouble] = Object.entries(node.troubles);
  if (trouble) return [trouble.join(": "), "bad"];
  if (node.draining) return ["draining", "warn"];
  const [past] = Object.entries(node.past_troubles);
  return past ? [`healthy; was: ${past.join(": ")}`, "good"] : ["healthy", "good"];
}

function wordsOfEvent({ kind, node: nodeId, job, from, reason, count }) {
  const node = shortNode(nodeId);
  switch (kind) {
    case "node_joined": return `${node} joined`;
    case "node_left": return `${node} left`;
    case "node_lost": return `${node} was lost`;
    case "takeover": return `Job ${shortId(job)} moved from ${shortNode(from) || "another node"} to ${node}: ${REASONS[reason] ?? reason}`;
    case "dead_letter": return `Job ${shortId(job)} lost too many nodes and was given up`;
    case "preempted": return `${node} preempted ${number(count)} ${count === 1 ? "sequence" : "sequences"}`;
    default: return `${kind} ${node} ${job}`;
  }
}

/** A node's id is its name and 16 digits, of which four tell it apart. */
function shortNode(id) {
  return id.replace(/(-[0-9a-f]{4})[0-9a-f]{12}$/, "$1");
}

function shortId(job) {
  return `…${job.slice(-6)}`;
}

function legend() {
  const entry = (kind, text) => el("span", {}, el("i", { className: kind }), text);
  return el("p", { className: "legend" }, entry("used", "used by sequences"), entry("cached", "cached prefixes"), entry("free", "free"));
}

function secondsOrUnknown(seconds) {
  return seconds === null ? "unknown" : seconds ? duration(1000 * seconds) : "0 s";
}

/** What the states and shares mean, in short. docs/QUEUE.md has the whole text. */
function meaningOfStates() {
  const entry = (term, meaning) => [el("dt", {}, term), el("dd", {}, meaning)];
  return el("details", {}, el("summary", {}, "What these numbers mean"), el("dl", {},
    ...entry("Queued", "waits for a node with free capacity"),
    ...entry("Scheduled", "waits for its time, or is due and follows its tenant's jobs that are queued"),
    ...entry("Awaiting tokens", "waits for its tenant's tokens per minute"),
    ...entry("Running", "a node has it"),
    ...entry("Oldest wait", "the longest wait now, for whatever reason; a scheduled job waits from its time on"),
    ...entry("Expired", "passed its deadline, since the pool began"),
    ...entry("Share", "part of the engines' time in the last minute"),
    ...entry("Backlog", "time in which the nodes complete the queued jobs at their present pace"),
  ), el("p", { className: "hint" }, "The page docs/QUEUE.md says more."));
}

function table(head, rows) {
  const cells = (tag, row) => row.map((text, i) => el(i ? tag : "th", i ? {} : { scope: "row" }, text));
  return el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row)))));
}
