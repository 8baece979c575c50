// Webhook endpoints and their deliveries, below the batches.

import { request, sleep, wordsOf } from "./api.js";
import { byId, button, el, number } from "./dom.js";

const POLL_MS = 5_000;
const SHOWN = 10;
const STATES = ["dead", "pending", "delivered"];
const KINDS = { enabled: "good", disabled: "bad" };
const views = new Map(); // endpoint id → EndpointView
let controller;

/** Read the endpoints until `stopWebhooks`. */
export async function startWebhooks() {
  if (controller) return;
  controller = new AbortController();
  const { signal } = controller;
  while (!signal.aborted) {
    try {
      const { data } = await (await request("v1/webhook_endpoints?limit=64", { signal })).json();
      byId("webhooks").hidden = data.length === 0;
      removeOthers(data.map((one) => one.id));
      for (const endpoint of data) await viewOf(endpoint).load(endpoint, signal);
    } catch {
      // The list of batches says what is wrong.
      if (signal.aborted) return;
    }
    await sleep(POLL_MS, signal).catch(() => {});
  }
}

export function stopWebhooks() {
  controller?.abort();
  controller = undefined;
}

function removeOthers(listed) {
  for (const [id, view] of views) {
    if (listed.includes(id)) continue;
    view.element.remove();
    views.delete(id);
  }
}

function viewOf({ id }) {
  if (!views.has(id)) {
    views.set(id, new EndpointView(id));
    byId("webhook-list").append(views.get(id).element);
  }
  return views.get(id);
}

/** One endpoint, with the deliveries in one state. */
class EndpointView {
  constructor(id) {
    this.id = id;
    this.title = el("h3");
    this.badge = el("span", { className: "badge" });
    this.note = el("p", { className: "hint" });
    this.state = el("select", {}, ...STATES.map((one) => el("option", { value: one }, one)));
    this.state.setAttribute("aria-label", "State of the deliveries");
    this.isChosen = false;
    this.state.addEventListener("change", () => {
      this.isChosen = true;
      return this.tried(() => this.loadDeliveries());
    });
    this.deliveries = el("ol", { className: "deliveries" });
    this.again = button("Deliver all dead ones again", () => this.post("deliveries/redeliver", {}));
    this.enable = button("Enable", () => this.post("", { status: "enabled" }));
    this.problem = el("p", { className: "status error" });
    this.problem.setAttribute("role", "status");
    this.element = el("article", { className: "panel batch" }, this.title, this.note,
      el("div", { className: "row" }, this.state, this.again, this.enable), this.deliveries, this.problem);
  }

  async load(endpoint, signal) {
    this.title.replaceChildren(endpoint.name, " ", this.badge);
    this.badge.textContent = endpoint.status;
    this.badge.className = `badge ${KINDS[endpoint.status] ?? ""}`;
    const reason = endpoint.disabled_reason ? ` · ${endpoint.disabled_reason}` : "";
    this.note.textContent = `${endpoint.url} · ${endpoint.event_types.join(", ")}${reason}`;
    this.enable.hidden = endpoint.status === "enabled";
    await this.loadDeliveries(signal);
  }

  /** Return the newest deliveries in the chosen state; until one is chosen, in the first state that has any. */
  async newest(signal) {
    for (const state of this.isChosen ? [this.state.value] : STATES) {
      const path = `v1/webhook_endpoints/${this.id}/deliveries?status=${state}&limit=${SHOWN}`;
      const { data, has_more } = await (await request(path, { signal })).json();
      if (data.length || this.isChosen) return { state, data, has_more };
    }
    return { state: STATES[0], data: [], has_more: false };
  }

  async loadDeliveries(signal) {
    const { state, data, has_more: hasMore } = await this.newest(signal);
    this.state.value = state;
    this.again.hidden = state !== "dead" || !data.length;
    const entries = data.map((one) => el("li", {},
      el("time", {}, new Date(one.created_ms).toLocaleString()), ` ${one.event_type} of ${one.data.id}: `,
      `${number(one.attempts)} ${one.attempts === 1 ? "attempt" : "attempts"}${one.answer ? `, ${one.answer}` : ""}`,
      one.next_ms ? `, next ${new Date(one.next_ms).toLocaleTimeString()}` : ""));
    if (hasMore) entries.push(el("li", { className: "hint" }, "and more"));
    if (!data.length) entries.push(el("li", { className: "hint" }, `No ${state} deliveries.`));
    this.deliveries.replaceChildren(...entries);
  }

  async post(what, body) {
    await this.tried(async () => {
      const path = `v1/webhook_endpoints/${this.id}${what ? `/${what}` : ""}`;
      const headers = { "Content-Type": "application/json" };
      await request(path, { method: "POST", headers, body: JSON.stringify(body) });
      await this.loadDeliveries();
    });
  }

  async tried(action) {
    this.problem.textContent = "";
    try {
      await action();
    } catch (error) {
      this.problem.textContent = wordsOf(error);
    }
  }
}
