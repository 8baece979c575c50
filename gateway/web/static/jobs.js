// The view of jobs: a filtered list, newest first, and each job with its times, its outcome and its result.

import { request, sleep, wordsOf } from "./api.js";
import { byId, button, copyButton, duration, el, number } from "./dom.js";

const POLL_MS = 2_000;
const STEP = 20;
const MAX_SHOWN = 100;
const OPEN = ["scheduled", "queued", "running", "cancelling"];
const RETRIED = ["failed", "cancelled", "expired", "dead"];
const KINDS = { succeeded: "good", failed: "bad", expired: "bad", dead: "bad", cancelled: "warn", cancelling: "warn" };
const views = new Map(); // job id → JobView
const filterForm = byId("job-filter");
let controller;
let limit = STEP;
let caller = { tenant: "", scopes: [] };

filterForm.addEventListener("submit", (event) => {
  event.preventDefault();
  limit = STEP;
  again();
});
filterForm.addEventListener("change", again);
byId("job-more").addEventListener("click", () => {
  limit = Math.min(MAX_SHOWN, limit + STEP);
  again();
});

function again() {
  stopJobs();
  startJobs();
}

/** Read the list of jobs until `stopJobs`. */
export async function startJobs() {
  if (controller) return;
  controller = new AbortController();
  const { signal } = controller;
  while (!signal.aborted) {
    try {
      caller = await (await request("v1/key", { signal })).json();
      byId("job-tenant").hidden = !caller.scopes.includes("admin");
      show(await (await request(`v1/jobs?${query()}`, { signal })).json());
      say("");
    } catch (error) {
      if (signal.aborted) return;
      say(wordsOf(error), "bad");
    }
    await sleep(POLL_MS, signal).catch(() => {});
  }
}

export function stopJobs() {
  controller?.abort();
  controller = undefined;
}

function query() {
  const asked = new URLSearchParams({ limit });
  for (const [name, value] of new FormData(filterForm)) if (value.trim()) asked.set(name, value.trim());
  if (!asked.has("tenant") && !caller.scopes.includes("infer")) asked.set("tenant", "*");
  return asked;
}

function say(text, kind = "") {
  const status = byId("job-status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `feed ${kind}`;
}

function show({ data, has_more: hasMore }) {
  const listed = new Set(data.map((job) => job.id));
  for (const [id, view] of views) {
    if (listed.has(id)) continue;
    view.element.remove();
    views.delete(id);
  }
  let next = byId("job-list").firstChild;
  for (const job of data) {
    if (!views.has(job.id)) views.set(job.id, new JobView(job));
    const view = views.get(job.id);
    view.show(job);
    if (view.element === next) next = next.nextSibling;
    else byId("job-list").insertBefore(view.element, next);
  }
  byId("job-none").hidden = data.length > 0;
  byId("job-more").hidden = !hasMore || limit >= MAX_SHOWN;
}

/** One job. Its buttons stay the same elements, so that the focus stays where it is. */
class JobView {
  constructor({ id }) {
    this.badge = el("span", { className: "badge" });
    this.line = el("p", { className: "load" });
    this.status = el("p", { className: "status" });
    this.status.setAttribute("role", "status");
    this.details = el("div", { className: "job-details", hidden: true });
    this.buttons = {
      open: button("Open", () => this.toggle()),
      cancel: button("Cancel", () => this.act("DELETE", "")),
      retry: button("Retry", () => this.act("POST", "/retry")),
    };
    this.buttons.open.setAttribute("aria-expanded", "false");
    this.id = id;
    this.element = el("article", { className: "panel batch" }, el("h2", {}, id, " ", this.badge), this.line,
      this.details, this.status, el("div", { className: "row" }, ...Object.values(this.buttons)));
  }

  show(job) {
    const { ledger, state, tenant } = job;
    const hasChanged = this.job !== undefined && this.job.state !== state;
    this.job = job;
    this.badge.textContent = state;
    this.badge.className = `badge ${KINDS[state] ?? ""}`;
    this.line.textContent = [
      tenant === caller.tenant ? "" : `tenant ${tenant}`,
      `${job.priority}${job.background ? ", in the background" : ""}`,
      new Date(ledger.queued_ms).toLocaleString(),
      ledger.usage ? `${number(ledger.usage.completion_tokens)} tokens` : "",
      ledger.finished_ms ? `took ${duration(ledger.finished_ms - ledger.queued_ms)}` : "",
      ...job.tags,
    ].filter(Boolean).join(" · ");
    // A key opens and changes the jobs of its own tenant alone.
    const isOwn = tenant === caller.tenant && caller.scopes.includes("infer");
    this.buttons.open.hidden = !isOwn;
    this.buttons.cancel.hidden = !isOwn || !OPEN.includes(state) || state === "cancelling";
    this.buttons.retry.hidden = !isOwn || !RETRIED.includes(state);
    if (hasChanged && !this.details.hidden) this.load();
  }

  toggle() {
    this.details.hidden = !this.details.hidden;
    this.buttons.open.textContent = this.details.hidden ? "Open" : "Close";
    this.buttons.open.setAttribute("aria-expanded", String(!this.details.hidden));
    if (!this.details.hidden) this.load();
  }

  load() {
    return this.tried(async () => {
      const job = await (await request(`v1/jobs/${encodeURIComponent(this.id)}`)).json();
      this.details.replaceChildren(...detailsOf(job));
    });
  }

  act(method, what) {
    return this.tried(async () => {
      const answer = await (await request(`v1/jobs/${encodeURIComponent(this.id)}${what}`, { method })).json();
      if (answer.retry_of) this.say(`The retry is the job ${answer.id}.`);
      again();
    });
  }

  async tried(action) {
    this.say("");
    try {
      await action();
    } catch (error) {
      this.say(wordsOf(error), "error");
    }
  }

  say(text, kind = "") {
    this.status.textContent = text;
    this.status.className = `status ${kind}`;
  }
}

function detailsOf({ ledger, outcome, result, pool, metadata, retry_of: retryOf, position }) {
  const rows = {
    Pool: pool,
    Node: ledger.node,
    Queued: timeOf(ledger.queued_ms),
    Position: position,
    Taken: timeOf(ledger.taken_ms),
    "First token": timeOf(ledger.first_token_ms),
    Finished: timeOf(ledger.finished_ms),
    "Waited in the queue": ledger.taken_ms ? duration(ledger.taken_ms - ledger.queued_ms) : null,
    Tokens: ledger.usage && `${number(ledger.usage.prompt_tokens)} in the prompt (${number(ledger.usage.cached_tokens)} ` +
      `from the cache), ${number(ledger.usage.completion_tokens)} generated`,
    Preemptions: ledger.preemptions + ledger.engine_preemptions || null,
    "Lost nodes": ledger.losses || null,
    "Retry of": retryOf,
    Error: outcome?.code ? `${outcome.message} (${outcome.code})` : null,
    Metadata: metadata && JSON.stringify(metadata),
  };
  const shown = Object.entries(rows).filter(([, value]) => value !== null && value !== undefined);
  const list = el("dl", {}, ...shown.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, String(value))]));
  const texts = (result?.choices ?? []).map((choice) => el("section", {},
    el("pre", { tabIndex: 0 }, choice.text), copyButton("Copy", () => choice.text)));
  return [list, ...texts];
}

function timeOf(ms) {
  return ms ? new Date(ms).toLocaleString() : null;
}
