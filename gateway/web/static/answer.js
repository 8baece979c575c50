// An answer as a durable response of /v1/responses. It can be read on after a lost connection, a reload or a crash.
//
// The record of an answer is a turn: {role: "assistant", model, request, key, response, lastEvent, state, note, content,
// reasoning, calls, startedMs, firstMs, lastMs, isResumed, usage}. `state` is running, done, stopped or failed.
// `lastEvent` is the number of the last event whose text the record has. `key` makes a repeated request safe while the
// id of the response is not known.

import { ApiError, LostError, eventsOf, request, sleep, wordsOf } from "./api.js";
import { duration, number } from "./dom.js";

/** The gateway cancels an answer that no page has read for so long. docs/HTTP.md names it. */
const GRACE_S = 600;
const FIRST_PAUSE_MS = 300;
const MAX_PAUSE_MS = 5_000;
const MAX_UNSENT_MS = 600_000; // A question that is older, and may not have arrived, is not sent again by itself.
const RESUMABLE_CODES = new Set(["gateway_stopped", "gateway_ends"]);

/** Make the record of an answer that has not begun. `fields` are those of the request, without the conversation. */
export function newAnswer(conversation, number, fields) {
  return {
    conversation, number, role: "assistant", model: fields.model, request: fields, key: randomId(), response: "",
    lastEvent: -1, state: "running", note: "", content: "", reasoning: "", calls: [], startedMs: Date.now(),
    firstMs: 0, lastMs: 0, isResumed: false, usage: null,
  };
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
      if (!turn.response && job) turn.response = `resp_${job}`;
      hasArrived = true;
      for await (const { data } of eventsOf(response, signal)) {
        pauseMs = FIRST_PAUSE_MS;
        if (data !== "[DONE]") onChange(take(turn, JSON.parse(data)));
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
  if (turn.response) {
    const after = turn.lastEvent >= 0 ? `&starting_after=${turn.lastEvent}` : "";
    const path = `v1/responses/${encodeURIComponent(turn.response)}?stream=true&return_progress=true${after}`;
    return request(path, { signal });
  }
  const headers = { "Content-Type": "application/json", "Idempotency-Key": turn.key };
  const body = JSON.stringify(bodyOf(turn.request, input));
  return request("v1/responses", { method: "POST", headers, body, signal });
}

/** The body of a request for an answer that outlives its page, for a while. */
function bodyOf(fields, input) {
  return { ...fields, input, background: true, stream: true, return_progress: true, reader_grace_s: GRACE_S };
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
    return endAs(turn, "stopped", `Stopped: canceled, or not read by a page for ${GRACE_S / 60} minutes`);
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
  const isGone = error.code === "response_not_found";
  endAs(turn, "failed", isGone ? "The gateway no longer has the rest of this answer." : wordsOf(error));
}

/** Stop an answer. It ends within a step; the page does not wait for that. */
export function stopAnswer(turn) {
  endAs(turn, "stopped", "Stopped");
  if (!turn.response) return Promise.resolve();
  const path = `v1/responses/${encodeURIComponent(turn.response)}/cancel`;
  // It outlives a page that is left at this moment, as the deletions below do.
  return request(path, { method: "POST", keepalive: true }).catch(() => {});
}

/** Delete the stored responses of turns. Return how many could not be deleted; the gateway drops those after a day. */
export async function deleteResponses(turns) {
  const ids = turns.map((turn) => turn.response).filter(Boolean);
  const deleted = await Promise.all(ids.map(async (id) => {
    try {
      await request(`v1/responses/${encodeURIComponent(id)}`, { method: "DELETE", keepalive: true });
    } catch (error) {
      return error.status === 404;
    }
    return true;
  }));
  return deleted.filter((one) => !one).length;
}

/** Return turns as input items of a request. A message without an answer becomes one with the next: some models need
 * alternate roles. */
export function inputOf(turns) {
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

function waitingWords({ type, position, estimated_wait_ms: wait, processed, total }) {
  if (type === "penstock:prompt_progress") return `Reading the prompt: ${number(processed)} of ${number(total)} tokens`;
  if (!position) return "A node has the request";
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
