// One streamed answer of /v1/chat/completions. After a lost connection it continues at the last event.

import { ApiError, LostError, eventsOf, request, sleep } from "./api.js";

const MAX_LOST_MS = 60_000;
const FIRST_PAUSE_MS = 300;
const MAX_PAUSE_MS = 5_000;
const RESUMABLE_CODES = new Set(["gateway_stopped", "gateway_ends"]);

/**
 * Yield what happens to an answer: {job}, {event, numTokens} or {lost: true}.
 *
 * The idempotency key makes a repeated request safe, and gives each event an id. With `Last-Event-ID` the gateway
 * continues after that event. Throws ApiError, or LostError if no gateway is found for a minute.
 */
export async function* answerTo(body, signal) {
  const text = JSON.stringify(body);
  const headers = { "Content-Type": "application/json", "Idempotency-Key": randomId() };
  let job = "";
  let lostSince = 0;
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const options = { method: "POST", headers, body: text, signal };
      const response = await request("v1/chat/completions", options);
      job = response.headers.get("X-Penstock-Job") || job;
      yield { job };
      let isComplete = false;
      for await (const { id, data } of eventsOf(response, signal)) {
        lostSince = 0;
        pauseMs = FIRST_PAUSE_MS;
        if (id) headers["Last-Event-ID"] = id;
        isComplete = data === "[DONE]";
        if (isComplete) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error, 200, event.error.retry_after_ms);
        yield { event, numTokens: id ? Number(id.split(":").pop()) : undefined };
      }
      if (isComplete) return;
      throw new LostError("the stream ended early");
    } catch (error) {
      lostSince ||= performance.now();
      const isOver = performance.now() - lostSince > MAX_LOST_MS;
      // The gateway has accepted the job, so a refusal means that this gateway cannot look for it now.
      const isOutage = job && (error.status === 429 || error.status === 503);
      if (signal.aborted || isOver || !(isOutage || isLoss(error))) throw error;
    }
    yield { lost: true };
    await sleep(pauseMs, signal);
    pauseMs = Math.min(2 * pauseMs, MAX_PAUSE_MS);
  }
}

/** Cancel a job. Its answer ends within a step. */
export function cancelJob(job) {
  return request(`v1/jobs/${encodeURIComponent(job)}`, { method: "DELETE" }).catch(() => {});
}

function isLoss(error) {
  // 502 and 504 come from a proxy whose gateway is gone.
  return error instanceof LostError || RESUMABLE_CODES.has(error.code) || error.status === 502 || error.status === 504;
}

function randomId() {
  // `crypto.randomUUID` is missing on pages without TLS.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
