// The view of batches: upload by drag and drop, progress, pause, resume, cancel, retry and download.

import { request, sleep, wordsOf } from "./api.js";
import { byId, button, duration, el, number } from "./dom.js";
import { FlowGraph } from "./flow.js";

const POLL_MS = 2_000;
const SHOWN = 50;
const HEAD_BYTES = 1 << 20;
const MAX_RETRY_BYTES = 64 << 20;
const OPEN = ["validating", "in_progress", "finalizing", "cancelling"];
const KINDS = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn", cancelling: "warn" };
const WORDS = { in_progress: "in progress" };
const FLOW = "flow";
const FLOW_FIELDS = ["after", "for_each", "on_failure", "priority"];
const views = new Map(); // batch id → BatchView
let controller;

/** Read the list of batches until `stopBatches`. */
export async function startBatches() {
  if (controller) return;
  controller = new AbortController();
  const { signal } = controller;
  while (!signal.aborted) {
    try {
      show(await newest(signal));
      say("");
    } catch (error) {
      if (signal.aborted) return;
      say(wordsOf(error), "bad");
    }
    await sleep(POLL_MS, signal).catch(() => {});
  }
}

/** Return the newest batches of OpenAI's and of Anthropic's API. */
async function newest(signal) {
  const paths = [`v1/batches?limit=${SHOWN}`, `v1/messages/batches?limit=${SHOWN}`];
  const answers = await Promise.all(paths.map(async (path) => (await request(path, { signal })).json()));
  const [batches, ofMessages] = answers.map((answer) => answer.data);
  const all = [...batches.map(ofOpenAi), ...ofMessages.map(ofAnthropic)];
  all.sort((one, other) => other.created_at - one.created_at);
  const hasMore = all.length > SHOWN || answers.some((answer) => answer.has_more);
  return { data: all.slice(0, SHOWN), has_more: hasMore };
}

/** Add to a batch where it is and what it lets download. */
function ofOpenAi(batch) {
  const contents = {};
  for (const kind of ["output", "error"]) {
    if (batch[`${kind}_file_id`]) contents[kind] = `v1/files/${batch[`${kind}_file_id`]}/content`;
  }
  // Rows of a flow would lack those that they wait for.
  const mayRetry = Boolean(batch.error_file_id) && batch.endpoint !== FLOW;
  return { ...batch, path: `v1/batches/${batch.id}`, contents, mayRetry };
}

/** Return a message batch in the shape of the others. Which of its requests failed is known at its end. */
function ofAnthropic(batch) {
  const { processing, succeeded, errored, canceled, expired } = batch.request_counts;
  const isEnded = batch.processing_status === "ended";
  const failed = errored + canceled + expired;
  const ending = canceled ? "cancelled" : expired ? "expired" : "completed";
  const path = `v1/messages/batches/${batch.id}`;
  return {
    ...batch,
    path,
    endpoint: "/v1/messages",
    status: isEnded ? ending : batch.processing_status === "canceling" ? "cancelling" : "in_progress",
    request_counts: {
      total: processing + succeeded + failed, completed: isEnded ? succeeded : batch.answered, failed,
    },
    created_at: Date.parse(batch.created_at) / 1000,
    contents: batch.results_url ? { output: `${path}/results` } : {},
  };
}

export function stopBatches() {
  controller?.abort();
  controller = undefined;
}

/** Make the upload form work. Call it once. */
export function startUploads() {
  const area = byId("batch-drop");
  const input = byId("batch-file");
  input.addEventListener("change", () => {
    if (input.files.length) submit(input.files[0]);
    input.value = "";
  });
  for (const kind of ["dragenter", "dragover"]) {
    area.addEventListener(kind, (event) => {
      event.preventDefault();
      area.classList.add("over");
    });
  }
  area.addEventListener("dragleave", () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    area.classList.remove("over");
    if (event.dataTransfer.files.length) submit(event.dataTransfer.files[0]);
  });
}

function say(text, kind = "") {
  const status = byId("batch-status");
  if (status.textContent !== text) status.textContent = text;
  status.className = `feed ${kind}`;
}

function tell(text, kind = "") {
  const status = byId("upload-status");
  status.textContent = text;
  status.className = `feed ${kind}`;
}

/** Store a file and make a batch of its rows. The endpoint is that of its first row. */
async function submit(file) {
  tell(`Storing ${file.name}…`);
  try {
    const endpoint = endpointOf(await file.slice(0, HEAD_BYTES).text());
    const batch = await create(file, file.name, endpoint);
    tell(`${file.name} is batch ${batch.id}.`);
  } catch (error) {
    tell(error instanceof RowError ? error.message : wordsOf(error), "bad");
  }
}

class RowError extends Error {}

/** Return the `url` of the first row of a text of rows, or that of flows if a row has a field of theirs. */
function endpointOf(text) {
  const line = text.replace(/^\uFEFF/, "").split("\n").find((one) => one.trim());
  let row;
  try {
    row = JSON.parse(line);
  } catch {
    throw new RowError("The first line is no JSON object. A batch file has one request a line.");
  }
  const rows = text.split("\n").slice(1).map(parsed);
  if ([row, ...rows].some((one) => FLOW_FIELDS.some((name) => one && name in one))) return FLOW;
  if (typeof row?.url !== "string") throw new RowError("The first line has no url, such as /v1/chat/completions.");
  return row.url;
}

/** Return the object of a line; undefined for one that is none, such as one that is cut. */
function parsed(line) {
  try {
    const found = JSON.parse(line);
    return typeof found === "object" && found !== null ? found : undefined;
  } catch {
    return undefined;
  }
}

async function create(content, name, endpoint) {
  const fields = new FormData();
  fields.append("purpose", "batch");
  fields.append("file", content, name);
  const stored = await (await request("v1/files", { method: "POST", body: fields })).json();
  const window = byId("batch-window").value;
  const body = JSON.stringify({ input_file_id: stored.id, endpoint, completion_window: window });
  const headers = { "Content-Type": "application/json" };
  return (await request("v1/batches", { method: "POST", body, headers })).json();
}

function show({ data, has_more: hasMore }) {
  const listed = new Set(data.map((batch) => batch.id));
  for (const [id, view] of views) {
    if (listed.has(id)) continue;
    view.element.remove();
    views.delete(id);
  }
  let next = byId("batch-list").firstChild;
  for (const batch of data) {
    if (!views.has(batch.id)) views.set(batch.id, new BatchView(batch));
    const view = views.get(batch.id);
    view.show(batch);
    if (view.element === next) next = next.nextSibling;
    else byId("batch-list").insertBefore(view.element, next);
  }
  byId("batch-none").hidden = data.length > 0;
  byId("batch-more").hidden = !hasMore;
}

/** One batch. Its buttons stay the same elements, so that the focus stays where it is. */
class BatchView {
  constructor({ id }) {
    this.badge = el("span", { className: "badge" });
    this.bar = el("progress", { max: 1, value: 0 });
    this.bar.setAttribute("aria-label", `Progress of ${id}`);
    this.counts = el("p", { className: "load" });
    this.note = el("p", { className: "hint" });
    this.buttons = {
      pause: button("Pause", () => this.act("pause")),
      resume: button("Resume", () => this.act("resume")),
      cancel: button("Cancel", () => this.act("cancel")),
      output: button("Download the output", () => this.download("output")),
      error: button("Download the errors", () => this.download("error")),
      retry: button("Retry failed rows", () => this.retry()),
      rows: button("Show the rows", () => this.toggleRows()),
    };
    this.graph = new FlowGraph(`v1/batches/${id}`);
    this.problem = el("p", { className: "status error" });
    this.problem.setAttribute("role", "status");
    this.element = el("article", { className: "panel batch" },
      el("h2", {}, id, " ", this.badge), this.bar, this.counts, this.note, this.problem,
      el("div", { className: "row" }, ...Object.values(this.buttons)), this.graph.element);
  }

  show(batch) {
    this.batch = batch;
    const { total, completed, failed } = batch.request_counts;
    const isOpen = OPEN.includes(batch.status);
    this.badge.textContent = batch.paused && isOpen ? "paused" : WORDS[batch.status] ?? batch.status;
    this.badge.className = `badge ${batch.paused && isOpen ? "warn" : KINDS[batch.status] ?? ""}`;
    this.bar.max = Math.max(1, total);
    this.bar.value = completed + failed;
    this.bar.hidden = !isOpen;
    this.counts.textContent = [
      `${batch.endpoint} · ${number(completed)} of ${number(total)} rows answered`,
      failed ? `${number(failed)} failed` : "",
      batch.rows_per_second ? `${number(batch.rows_per_second, 1)} rows a second` : "",
      batch.expected_end_at ? `ends in about ${duration(Math.max(0, 1000 * batch.expected_end_at - Date.now()))}` : "",
      batch.usage?.total_tokens ? `${number(batch.usage.total_tokens)} tokens` : "",
    ].filter(Boolean).join(" · ");
    const [first] = batch.errors?.data ?? [];
    this.note.textContent = [
      `made ${new Date(1000 * batch.created_at).toLocaleString()}`,
      batch.waiting && isOpen ? `waits: ${batch.waiting}` : "",
      first ? `${first.line ? `line ${first.line}: ` : ""}${first.message}` : "",
    ].filter(Boolean).join(" · ");
    const isRunning = ["validating", "in_progress"].includes(batch.status);
    this.buttons.pause.hidden = !isRunning || batch.paused;
    this.buttons.resume.hidden = !isRunning || !batch.paused;
    this.buttons.cancel.hidden = !isRunning;
    this.buttons.output.hidden = !batch.contents.output;
    this.buttons.error.hidden = !batch.contents.error;
    this.buttons.retry.hidden = !batch.mayRetry;
    this.buttons.rows.hidden = batch.endpoint !== FLOW;
    this.graph.refresh().catch((error) => (this.problem.textContent = wordsOf(error)));
  }

  async toggleRows() {
    const { element } = this.graph;
    element.hidden = !element.hidden;
    this.buttons.rows.textContent = element.hidden ? "Show the rows" : "Hide the rows";
    this.buttons.rows.setAttribute("aria-expanded", String(!element.hidden));
    await this.tried(() => this.graph.refresh());
  }

  async act(what) {
    await this.tried(async () => {
      const answer = await (await request(`${this.batch.path}/${what}`, { method: "POST" })).json();
      this.show(answer.type === "message_batch" ? ofAnthropic(answer) : ofOpenAi(answer));
    });
  }

  async download(kind) {
    await this.tried(async () => {
      const content = await (await request(this.batch.contents[kind])).blob();
      const link = el("a", { href: URL.createObjectURL(content), download: `${this.batch.id}_${kind}.jsonl` });
      link.click();
      URL.revokeObjectURL(link.href);
    });
  }

  /** Make a new batch of the rows that are in the error file. */
  async retry() {
    await this.tried(async () => {
      const [errors, input] = await Promise.all(
        [this.batch.error_file_id, this.batch.input_file_id].map(smallText));
      const failed = new Set(linesOf(errors).map((line) => JSON.parse(line).custom_id));
      const rows = linesOf(input).filter((line) => failed.has(JSON.parse(line).custom_id));
      const content = new Blob([rows.map((row) => `${row}\n`).join("")]);
      const batch = await create(content, `retry-of-${this.batch.id}.jsonl`, this.batch.endpoint);
      tell(`${rows.length === 1 ? "1 row is" : `${number(rows.length)} rows are`} batch ${batch.id}.`);
    });
  }

  async tried(action) {
    this.problem.textContent = "";
    const buttons = Object.values(this.buttons);
    for (const one of buttons) one.disabled = true;
    try {
      await action();
    } catch (error) {
      this.problem.textContent = error instanceof RowError ? error.message : wordsOf(error);
    } finally {
      for (const one of buttons) one.disabled = false;
    }
  }
}

async function contentOf(fileId) {
  return (await request(`v1/files/${fileId}/content`)).blob();
}

async function smallText(fileId) {
  const { bytes } = await (await request(`v1/files/${fileId}`)).json();
  if (bytes > MAX_RETRY_BYTES) {
    throw new RowError(`The file has more than ${MAX_RETRY_BYTES >> 20} MiB: use \`penstock batch submit --retry-of\` instead.`);
  }
  return (await contentOf(fileId)).text();
}

function linesOf(text) {
  return text.replace(/^\uFEFF/, "").split("\n").filter((line) => line.trim());
}
