// An answer as a durable response of /v1/responses. It can be read on after a lost connection, a reload or a crash.
//
// The record of an answer is a turn: {role: "assistant", model, request, key, response, lastEvent, state, note, content,
// reasoning, calls, startedMs, firstMs, lastMs, isResumed, usage, isCompletion, isContinued, earlier, earlierTokens}.
// `state` is running, done, stopped or failed. `lastEvent` is the last event whose text the record has: its number, or
// its id in a job's stream. `key` makes a repeated request safe while the id of the response is not known.
//
// A model without a chat template continues a text (`isCompletion`). Its answer is a job of /v1/jobs, which is as
// durable; `response` is then the job's id. An answer that goes on has further responses: `earlier` has the ids of those
// before the last one, and `earlierTokens` their tokens.

import { ApiError, LostError, eventsOf, request, sleep, wordsOf } from "./api.js";
import { duration, number } from "./dom.js";

/** The gateway cancels an answer that no page has read for so long. docs/HTTP.md names it. */
const GRACE_S = 600;
const CANCELED = `Stopped: canceled, or not read by a page for ${GRACE_S / 60} minutes`;
const FIRST_PAUSE_MS = 300;
const MAX_PAUSE_MS = 5_000;
const MAX_UNSENT_MS = 600_000; // A question that is older, and may not have arrived, is not sent again by itself.
const RESUMABLE_CODES = new Set(["gateway_stopped", "gateway_ends"]);

/** Make the record of an answer that has not begun. `fields` are those of the request, without the conversation. */
export function newAnswer(conversation, number, fields, isCompletion) {
  const turn = {
    conversation, number, role: "assistant", content: "", reasoning: "", calls: [], response: "", earlier: [],
    earlierTokens: 0,
  };
  begin(turn, fields, isCompletion);
  return turn;
}

/** Let an answer that ended go on. */
export function beginPart(turn, fields, isCompletion) {
  const earlier = [...(turn.earlier ?? []), idOf(turn)].filter(Boolean);
  Object.assign(turn, { isContinued: true, earlier, earlierTokens: numTokens(turn) });
  begin(turn, fields, isCompletion);
}

function begin(turn, fields, isCompletion) {
  Object.assign(turn, {
    model: fields.model, request: fields, isCompletion, key: randomId(), response: "", lastEvent: -1, state: "running",
    note: "", startedMs: Date.now(), firstMs: 0, lastMs: 0, isResumed: false, isCut: false, usage: null,
  });
}

/** The path of what the gateway stores of an answer, "" while it is not known. */
function idOf({ response, isCompletion }) {
  return response && `v1/${isCompletion ? "jobs" : "responses"}/${encodeURIComponent(response)}`;
}

/** Return how many tokens an answer has, with those of its earlier parts. */
export function numTokens({ usage, earlierTokens }) {
  return (usage?.output_tokens ?? 0) + (earlierTokens ?? 0);
}

/** Whether an answer ended before its text did, so that it can go on. A new part of JSON would begin a new object. */
export function canGoOn({ state, isCut, content, calls, request }) {
  return content !== "" && !calls.length && !request.text && (isCut || state === "stopped" || state === "failed");
}

/**
 * Read an answer to its end and write what arrives into its record. `input` is the conversation before it.
 *
 * `onChange(words, kind)` is called after each change, with what the page says meanwhile. While the gateway is lost, it
 * looks for one. Throws ApiError if the gateway refuses the request, and an error after an abort.
 */
export async function readAnswer(turn, input, signal, onChange) {
  let pauseMs = FIRST_PAUSE_MS;
  let hasArrived = turn.response !== "";
  while (turn.state === "running") {
    if (!hasArrived && Date.now() - turn.startedMs > MAX_UNSENT_MS) {
      endAs(turn, "failed", "This question did not reach a gateway.");
      return;
    }
    try {
      const response = await openStream(turn, input, signal);
      const job = response.headers.get("X-Penstock-Job");
      if (!turn.response && job) turn.response = turn.isCompletion ? job : `resp_${job}`;
      hasArrived = true;
      if (response.status === 202) continue; // A job's stream has a path of its own.
      for await (const { id, data } of eventsOf(response, signal)) {
        pauseMs = FIRST_PAUSE_MS;
        if (data !== "[DONE]") onChange((turn.isCompletion ? takeChunk : take)(turn, JSON.parse(data), id));
      }
      if (turn.state === "running") throw new LostError("the stream ended early");
    } catch (error) {
      // The gateway has accepted the request, so a refusal means that this gateway cannot look for it now.
      const isOutage = hasArrived && (error.status === 429 || error.status === 503);
      if (signal.aborted || !(isOutage || isLoss(error))) throw error;
      onChange("The connection was lost. The answer continues as soon as a gateway is found…", "lost");
      await sleep(pauseMs, signal);
      pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
    }
  }
}

function openStream(turn, input, signal) {
  const { isCompletion, lastEvent } = turn;
  if (turn.response) {
    const [path, name] = isCompletion ? ["/stream?", "after"] : ["?stream=true&", "starting_after"];
    const after = lastEvent === -1 ? "" : `&${name}=${encodeURIComponent(lastEvent)}`;
    return request(`${idOf(turn)}${path}return_progress=true${after}`, { signal });
  }
  const headers = { "Content-Type": "application/json", "Idempotency-Key": turn.key };
  const body = JSON.stringify(bodyOf(turn, input));
  return request(isCompletion ? "v1/jobs" : "v1/responses", { method: "POST", headers, body, signal });
}

/** The body of a request for an answer that outlives its page, for a while. */
function bodyOf({ request: fields, isCompletion, isContinued }, input) {
  const lasting = { ...fields, return_progress: true, reader_grace_s: GRACE_S };
  if (isCompletion) return { ...lasting, prompt: input, background: false };
  const continued = isContinued ? { continue_final_message: true } : {};
  return { ...lasting, input, background: true, stream: true, ...continued };
}

/** Write one event into the record. Return what the page says meanwhile. */
function take(turn, event) {
  if (event.type.startsWith("penstock:")) return waitingWords(event);
  if (event.type === "error") throw new ApiError(event, 200);
  if (event.sequence_number <= turn.lastEvent) return "";
  turn.lastEvent = event.sequence_number;
  switch (event.type) {
    case "response.created":
      turn.response = event.response.id;
      return "Waiting for the first token…";
    case "response.output_text.delta":
      return grow(turn, "content", event.delta);
    case "response.reasoning_text.delta":
      return grow(turn, "reasoning", event.delta);
    case "response.output_item.done":
      if (event.item.type === "function_call") {
        turn.calls.push({ id: event.item.call_id, name: event.item.name, arguments: event.item.arguments });
      }
      return "";
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      return finish(turn, event.response);
    default:
      return turn.firstMs ? "" : "Waiting for the first token…";
  }
}

/** Write one event of a job's stream into the record, as `take` does. */
function takeChunk(turn, event, id) {
  if (event.error) throw new ApiError(event.error, 200);
  if (event.queue_progress) return waitingWords(event.queue_progress);
  if (event.prompt_progress) return waitingWords({ type: "penstock:prompt_progress", ...event.prompt_progress });
  if (id) turn.lastEvent = id;
  if (event.text) grow(turn, "content", event.text);
  if (event.finish_reason) turn.isCut = event.finish_reason === "length";
  if (event.usage) {
    turn.usage = { output_tokens: event.usage.completion_tokens, input_tokens: event.usage.prompt_tokens };
  }
  if (!event.outcome) return turn.firstMs ? "" : "Waiting for the first token…";
  const { state, message } = event.outcome;
  if (state === "succeeded") return endAs(turn, "done");
  if (state === "cancelled") return endAs(turn, "stopped", CANCELED);
  return endAs(turn, "failed", `The answer failed. (${message})`);
}

function grow(turn, name, text) {
  turn.lastMs = Date.now();
  turn.firstMs ||= turn.lastMs;
  turn[name] += text;
  return "";
}

function finish(turn, response) {
  turn.usage = response.usage;
  if (response.status === "failed") return endAs(turn, "failed", `The answer failed. (${response.error.message})`);
  if (response.status === "cancelled") {
    return endAs(turn, "stopped", CANCELED);
  }
  turn.isCut = response.status === "incomplete";
  return endAs(turn, "done");
}

function endAs(turn, state, note = "") {
  turn.state = state;
  turn.note = note;
  return note;
}

/** Note why an answer could not be read. One without a valid key goes on as soon as there is a key. */
export function noteFailure(turn, error) {
  if (error.status === 401) return;
  const isGone = error.code === "response_not_found" || error.code === "job_not_found";
  endAs(turn, "failed", isGone ? "The gateway no longer has the rest of this answer." : wordsOf(error));
}

/** Stop an answer. It ends within a step; the page does not wait for that. */
export function stopAnswer(turn) {
  endAs(turn, "stopped", "Stopped");
  if (!turn.response) return Promise.resolve();
  const [path, method] = turn.isCompletion ? [idOf(turn), "DELETE"] : [`${idOf(turn)}/cancel`, "POST"];
  // It outlives a page that is left at this moment, as the deletions below do.
  return request(path, { method, keepalive: true }).catch(() => {});
}

/** Delete what is stored of answers. Return how many could not be deleted; the gateway drops those after a day. */
export async function deleteAnswers(turns) {
  const paths = turns.flatMap((turn) => [...(turn.earlier ?? []), idOf(turn)]).filter(Boolean);
  const deleted = await Promise.all(paths.map(async (path) => {
    const [whole, method] = path.startsWith("v1/jobs/") ? [`${path}/ack`, "POST"] : [path, "DELETE"];
    try {
      await request(whole, { method, keepalive: true });
    } catch (error) {
      return error.status === 404;
    }
    return true;
  }));
  return deleted.filter((one) => !one).length;
}

/** Return turns as input items of a request, or as one text. A message without an answer becomes one with the next:
 * some models need alternate roles. */
export function inputOf(turns, isText = false) {
  if (isText) return turns.map(({ role, content }, at) => (at && role === "user" ? "\n" : "") + content).join("");
  const items = [];
  for (const turn of turns) {
    if (turn.role === "tool") {
      items.push({ type: "function_call_output", call_id: turn.call, output: turn.content });
      continue;
    }
    const last = items.at(-1);
    if (turn.content && last?.role === turn.role) last.content += `\n\n${turn.content}`;
    else if (turn.content) items.push({ role: turn.role, content: turn.content });
    for (const call of turn.calls ?? []) {
      items.push({ type: "function_call", call_id: call.id, name: call.name, arguments: call.arguments });
    }
  }
  return items;
}

function waitingWords({ type, position, estimated_wait_ms: wait, paused, processed, total }) {
  if (type === "penstock:prompt_progress") return `Reading the prompt: ${number(processed)} of ${number(total)} tokens`;
  if (!position) return "A node has the request";
  if (paused) return `Waiting in the queue: position ${position}; the ${paused} is paused`;
  return `Waiting in the queue: position ${position}${wait == null ? "" : `, about ${duration(wait)}`}`;
}

function isLoss(error) {
  // 502 and 504 come from a proxy whose gateway is gone.
  return error instanceof LostError || RESUMABLE_CODES.has(error.code) || error.status === 502 || error.status === 504;
}

export function randomId() {
  // `crypto.randomUUID` is missing on pages without TLS.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
