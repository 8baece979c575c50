// The feed of the dashboard: states from GET /dashboard, and what they say together.

import { LostError, eventsOf, request, sleep, wordsOf } from "./api.js";

export const WINDOW_MS = 300_000;
const RATE_MS = 4_000; // Nodes report every 2 s, so a rate over less would jump.
const MAX_OWN_EVENTS = 50;
const FIRST_PAUSE_MS = 500;
const MAX_PAUSE_MS = 10_000;

/** Yield {state} and {problem} until the signal aborts. A lost connection is opened again. */
export async function* states(signal) {
  let pauseMs = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    try {
      const response = await request("dashboard", { headers: { Accept: "text/event-stream" }, signal });
      for await (const { data } of eventsOf(response, signal)) {
        pauseMs = FIRST_PAUSE_MS;
        yield { state: JSON.parse(data) };
      }
    } catch (error) {
      if (signal.aborted) return;
      yield { problem: error instanceof LostError ? "The gateway cannot be reached. Trying again…" : wordsOf(error) };
      pauseMs = Math.max(pauseMs, error.retryAfterMs ?? 0);
    }
    await sleep(pauseMs, signal).catch(() => {});
    pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
  }
}

/** What this page has seen of one pool: sums of the nodes' counters over time, and preemptions. */
export class PoolHistory {
  constructor() {
    this.points = [];
    this.counters = new Map(); // node → its counters in the last state
    this.tokensIn = 0;
    this.tokensOut = 0;
    this.preemptions = []; // events that this page derived from counters
  }

  /** Add a state of the pool. */
  add(pool, at) {
    const counters = new Map();
    for (const node of pool.nodes) {
      const before = this.counters.get(node.node_id) ?? node;
      // A counter that fell is that of a node that was started again.
      this.tokensIn += Math.max(0, node.prefill_tokens - before.prefill_tokens);
      this.tokensOut += Math.max(0, node.decode_tokens - before.decode_tokens);
      this.notePreemptions(node, node.num_preemptions - before.num_preemptions, at);
      counters.set(node.node_id, node);
    }
    this.counters = counters;
    const [queued, running] = ["queued", "running"].map((name) => pool.classes.reduce((sum, one) => sum + one[name], 0));
    this.points.push({ at, tokensIn: this.tokensIn, tokensOut: this.tokensOut, queued, running });
    while (this.points[0].at < at - WINDOW_MS) this.points.shift();
  }

  notePreemptions(node, count, at) {
    if (count <= 0) return;
    this.preemptions.push({ at_ms: at, kind: "preempted", node: node.node_id, count });
    this.preemptions = this.preemptions.slice(-MAX_OWN_EVENTS);
  }

  /** Return the values of a field, as points for a chart. */
  values(name) {
    return this.points.map((point) => ({ at: point.at, value: point[name] }));
  }

  /** Return the growth of a field per second, each over the last seconds before its point. */
  rates(name) {
    let from = 0;
    return this.points.map((point, i) => {
      while (from < i && this.points[from + 1].at <= point.at - RATE_MS) from += 1;
      const { at, [name]: before } = this.points[from];
      return { at: point.at, value: point.at > at ? (1000 * (point[name] - before)) / (point.at - at) : 0 };
    });
  }
}
