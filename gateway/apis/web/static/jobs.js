// The view of jobs: a filtered table, newest first. A job opens below its row, with its times, its outcome and its result.

import { request, sleep, wordsOf } from "./api.js";
import { byId, button, copyButton, duration, el, number } from "./dom.js";

const POLL_MS = 2_000;
const FIRST_SHOWN = 50;
const MAX_SHOWN = 800;
const MAX_PAGE_JOBS = 100;
const OPEN = ["scheduled", "queued", "running", "cancelling"];
const RETRIED = ["failed", "cancelled", "expired", "dead"];
const KINDS = { succeeded: "good", failed: "bad", expired: "bad", dead: "bad", cancelled: "warn", cancelling: "warn" };
const views = new Map(); // job id → JobView
const filterForm = byId("job-filter");
const table = byId("job-table");
let controller;
let limit = FIRST_SHOWN;
let caller = { tenant: "", scopes: [] };
let aheadMs = 0; // by how much Redis's clock, which gives the jobs their times, is ahead of this browser's

filterForm.addEventListener("submit", (event) => {
  event.preventDefault();
  limit = FIRST_SHOWN;
  again();
});
filterForm.addEventListener("change", again);
byId("job-more").addEventListener("click", () => {
  limit *= 2;
  again();
});
table.addEventListener("keydown", (event) => {
  const row = event.target;
  if (!row.matches(".job")) return;
  const rows = [...table.querySelectorAll(".job")];
  const at = rows.indexOf(row);
  const goals = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 };
  const isOpen = row.getAttribute("aria-expanded") === "true";
  if (event.key in goals) rows[goals[event.key]]?.focus();
  else if (["Enter", " "].includes(event.key) || event.key === (isOpen ? "ArrowLeft" : "ArrowRight")) row.click();
  else return;
  event.preventDefault();
});
table.addEventListener("focusin", ({ target }) => {
  if (target.matches(".job")) makeReachable(target);
});

addEventListener("resize", fitDetails);

/** Let what is below a row be as wide as the table, which has fewer columns on a phone. */
function fitDetails() {
  const count = [...table.tHead.rows[0].cells].filter((cell) => cell.offsetParent).length;
  for (const { more } of views.values()) more.cells[0].colSpan = count;
}

/** Let Tab reach one row of the table; arrow keys lead to the others. */
function makeReachable(row) {
  for (const other of table.querySelectorAll('.job[tabindex="0"]')) other.tabIndex = -1;
  if (row) row.tabIndex = 0;
}

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
      show(await listed(signal));
      say(await progress(signal));
    } catch (error) {
      if (signal.aborted) return;
      say(wordsOf(error), "bad");
    }
    await sleep(POLL_MS * Math.ceil(limit / MAX_PAGE_JOBS), signal).catch(() => {});
  }
}

export function stopJobs() {
  controller?.abort();
  controller = undefined;
}

/** Return the newest jobs that the filter names, with as many pages as `limit` takes. A page may be short. */
async function listed(signal) {
  const data = [];
  let next = "";
  for (let left = Math.ceil(limit / MAX_PAGE_JOBS); left && next !== null; left -= 1) {
    const page = await (await request(`v1/jobs?${query(limit - data.length, next)}`, { signal })).json();
    data.push(...page.data);
    aheadMs = page.now_ms - Date.now();
    next = page.next;
  }
  return { data, hasMore: next !== null };
}

/** Return how far the open bulk actions and the jobs of the filter's tag are, in words, with rates and expected ends. */
async function progress(signal) {
  const { data } = await (await request("v1/jobs/bulk", { signal })).json();
  const parts = data.map((bulk) => {
    const counts = ["changed", "asked_to_stop", "already_over", "failed"].filter((name) => bulk[name])
      .map((name) => `${number(bulk[name])} ${name.replaceAll("_", " ")}`);
    const left = bulk.left === null ? [] : [`${number(bulk.left)} left`];
    return [`bulk ${bulk.action} ${bulk.id.slice(0, 8)}`, ...counts, ...left, ...pace(bulk)].join(", ");
  });
  return [...parts, await ofTag(signal)].filter(Boolean).join("; ");
}

function pace({ rate_per_s: rate, expected_end_ms: end }) {
  return [...(rate === null ? [] : [`${rate.toFixed(1)} a second`]),
    ...(end === null ? [] : [`expected end ${new Date(end).toLocaleString()}`])];
}

async function ofTag(signal) {
  const given = new FormData(filterForm);
  const [tag, tenant] = ["tag", "tenant"].map((name) => (given.get(name) ?? "").trim());
  if (!tag || tenant === "*" || (!tenant && !caller.scopes.includes("infer"))) return "";
  const asked = new URLSearchParams(tenant ? { tag, tenant } : { tag });
  const counts = await (await request(`v1/jobs/counts?${asked}`, { signal })).json();
  const states = Object.entries(counts.states).map(([state, count]) => `${number(count)} ${state}`);
  return [`${tag}: ${number(counts.total - counts.open)} of ${number(counts.total)} ended`, ...states, ...pace(counts)].join(", ");
}

function query(count, after) {
  const asked = new URLSearchParams({ limit: Math.min(count, MAX_PAGE_JOBS) });
  if (after) asked.set("after", after);
  for (const [name, value] of new FormData(filterForm)) if (value.trim()) asked.set(name, value.trim());
  if (!asked.has("tenant") && !caller.scopes.includes("infer")) asked.set("tenant", "*");
  return asked;
}

function say(text, kind = "") {
  const status = byId("job-status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `feed ${kind}`;
}

function show({ data, hasMore }) {
  const ids = new Set(data.map((job) => job.id));
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.element.remove();
    views.delete(id);
  }
  let next = table.tBodies[0] ?? null;
  for (const job of data) {
    if (!views.has(job.id)) views.set(job.id, new JobView(job));
    const view = views.get(job.id);
    view.show(job);
    if (view.element === next) next = next.nextElementSibling;
    else table.insertBefore(view.element, next);
  }
  table.classList.toggle("all-tenants", data.some(({ tenant }) => tenant !== caller.tenant));
  table.hidden = !data.length;
  if (!table.querySelector('.job[tabindex="0"]')) makeReachable(table.querySelector(".job"));
  fitDetails();
  byId("job-none").textContent = [...new FormData(filterForm).values()].some(Boolean) ? "No such jobs." : "No jobs yet.";
  byId("job-none").hidden = data.length > 0;
  byId("job-more").hidden = !hasMore || limit >= MAX_SHOWN;
}

/** One job: its row, and below it what is shown on demand. They stay the same elements, so that the focus stays. */
class JobView {
  constructor({ id }) {
    this.id = id;
    this.cells = Object.fromEntries(
      ["state", "of-tenants", "model", "words", "in", "out", "waited", "took", "age"]
        .map((name) => [name, el("td", { className: name })]),
    );
    this.cells.words.dir = "auto";
    this.row = el("tr", { className: "job", tabIndex: -1, onclick: () => this.toggle() }, ...Object.values(this.cells));
    this.row.ariaLevel = 1;
    this.status = el("p", { className: "status" });
    this.status.setAttribute("role", "status");
    this.details = el("div");
    this.buttons = {
      cancel: button("Cancel", () => this.act("DELETE", ""), ""),
      retry: button("Retry", () => this.act("POST", "/retry"), ""),
    };
    this.more = el("tr", { className: "job-details", hidden: true }, el("td", {},
      el("p", {}, el("code", {}, id), " ", copyButton("Copy the id", () => id)), this.details, this.status,
      el("div", { className: "row" }, ...Object.values(this.buttons))));
    this.more.ariaLevel = 2;
    this.element = el("tbody", {}, this.row, this.more);
  }

  show(job) {
    const { ledger, state, tenant } = job;
    const hasChanged = this.job !== undefined && this.job.state !== state;
    this.job = job;
    const { queued_ms: queued, taken_ms: taken, finished_ms: finished, usage } = ledger;
    const shown = {
      state, model: job.model ?? job.pool, words: job.first_words ?? "", "of-tenants": tenant,
      in: usage ? number(usage.prompt_tokens) : "", out: usage ? number(usage.completion_tokens) : "",
      waited: taken ? duration(Math.max(0, taken - queued)) : "", took: finished ? duration(finished - queued) : "",
      age: duration(Math.max(1000, 1000 * Math.round((Date.now() + aheadMs - queued) / 1000))),
    };
    for (const [name, text] of Object.entries(shown)) {
      if (this.cells[name].textContent !== text) this.cells[name].textContent = text;
    }
    this.cells.model.title = shown.model;
    this.cells.words.title = shown.words;
    this.cells.state.className = `state ${KINDS[state] ?? ""}`;
    // A key opens and changes the jobs of its own tenant alone.
    const isOwn = tenant === caller.tenant && caller.scopes.includes("infer");
    this.buttons.cancel.hidden = !isOwn || !OPEN.includes(state) || state === "cancelling";
    this.buttons.retry.hidden = !isOwn || !RETRIED.includes(state);
    this.row.ariaExpanded = String(!this.more.hidden);
    this.isOwn = isOwn;
    if (hasChanged && !this.more.hidden) this.load();
  }

  toggle() {
    this.more.hidden = !this.more.hidden;
    this.row.ariaExpanded = String(!this.more.hidden);
    if (!this.more.hidden) this.load();
  }

  load() {
    if (!this.isOwn) {
      this.details.replaceChildren(...detailsOf(this.job));
      return;
    }
    this.tried(async () => {
      const path = `v1/jobs/${encodeURIComponent(this.id)}`;
      const [job, why] = await Promise.all([path, `${path}/why`].map(async (one) => (await request(one)).json()));
      this.details.replaceChildren(...detailsOf(job, why));
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

/** `why`: the explanation of the job, which only a key of its tenant reads. */
function detailsOf(job, why) {
  const { ledger, outcome, result, pool, metadata, retry_of: retryOf, position } = job;
  const rows = {
    Model: job.model,
    Pool: pool,
    Class: `${job.priority}${job.background ? ", in the background" : ""}`,
    Tags: job.tags.join(" ") || null,
    Node: ledger.node,
    Queued: timeOf(ledger.queued_ms),
    Position: position,
    Taken: timeOf(ledger.taken_ms),
    "First token": timeOf(ledger.first_token_ms),
    Finished: timeOf(ledger.finished_ms),
    "Waited in the queue": ledger.taken_ms ? duration(ledger.taken_ms - ledger.queued_ms) : null,
    "Where the time went": why && partsOf(why),
    "Waits for": listOf(why?.waits_for, (cause) => cause.waits_for),
    "Would help": listOf(why?.waits_for, (cause) => cause.helps),
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

/** Return the parts of a job's time, in order. */
function partsOf({ parts, not_recorded: missing }) {
  const told = parts.map((part) => `${part.text}: ${duration(1000 * part.seconds)}`);
  return [...told, ...(missing ? [`not recorded: ${missing}`] : [])].join("; ");
}

function listOf(values, wordsOfValue) {
  return values?.length ? values.map(wordsOfValue).join("; ") : null;
}

function timeOf(ms) {
  return ms ? new Date(ms).toLocaleString() : null;
}
