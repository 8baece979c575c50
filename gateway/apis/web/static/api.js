// Requests to the gateway: the API key, errors, and server-sent events.

import { ofTab } from "./storage.js";

const KEY = "penstock-key";
const MAX_SILENCE_MS = 600_000;
let silenceMs = 30_000; // A gateway sends a keep-alive every 10 s by default.

export const apiKey = {
  get: () => ofTab.get(KEY) ?? "",
  set: (key) => (key ? ofTab.set(KEY, key) : ofTab.remove(KEY)),
  /** Return whether an HTTP header can carry a key. */
  isSendable: (key) => /^[!-~]*$/.test(key),
};

/** An error that the gateway reported. */
export class ApiError extends Error {
  constructor(error, status, retryAfterMs) {
    super(error.message ?? `the gateway answered with status ${status}`);
    this.code = error.code ?? "";
    this.status = status;
    this.retryAfterMs = retryAfterMs;
  }

  /** Read the error of a response that is not OK. */
  static async of(response) {
    const body = await response.json().catch(() => ({}));
    const seconds = Number(response.headers.get("Retry-After"));
    return new ApiError(body.error ?? {}, response.status, seconds ? 1000 * seconds : undefined);
  }
}

/** The connection ended before the answer did. */
export class LostError extends Error {}

/** Send a request, with the API key if there is one. Throws ApiError or LostError. A 401 asks for a key. */
export async function request(path, { headers = {}, ...options } = {}) {
  const key = apiKey.get();
  const sentMs = performance.now();
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { ...options, headers: { ...authorization, ...headers } }).catch((error) => {
    throw options.signal?.aborted ? error : new LostError("the gateway cannot be reached");
  });
  if (response.ok) return response;
  const error = await ApiError.of(response);
  // The page's frame asks for a key, unless another request has brought a new one meanwhile.
  if (error.status === 401 && key === apiKey.get()) {
    dispatchEvent(new CustomEvent("keyneeded", { detail: { reason: wordsOf(error), sentMs } }));
  }
  throw error;
}

/** Yield the events of a stream as {id, data}. Throws LostError if the connection breaks or stays silent. */
export async function* eventsOf(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await readWithin(reader, silenceMs);
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event.data) yield event;
      }
    }
  } catch (error) {
    throw signal?.aborted ? error : new LostError("the connection was lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const event = { id: "", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

async function readWithin(reader, ms) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => {
      // The connection may be lost, or this gateway sends its keep-alives less often.
      silenceMs = Math.min(2 * ms, MAX_SILENCE_MS);
      reject(new LostError("the connection is silent"));
    }, ms);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } finally {
    clearTimeout(timer);
  }
}

/** Wait, or throw as soon as the signal aborts. */
export function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const onAbort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", onAbort, { once: true });
    return undefined;
  });
}

/** Say an error in plain words. */
export function wordsOf(error) {
  const after = error.retryAfterMs ? ` Try again in ${Math.ceil(error.retryAfterMs / 1000)} s.` : "";
  if (error instanceof LostError) return "The gateway cannot be reached. Is it running?";
  if (!(error instanceof ApiError)) return `The page failed: ${error.message}`;
  if (error.status === 401) return `This gateway needs a valid API key. (${error.message})`;
  if (error.code === "host_not_allowed") return `The gateway refuses the name in this page's address. (${error.message})`;
  if (error.status === 403) return `This API key does not permit the request. (${error.message})`;
  if (error.status === 429) return `The server is busy.${after} (${error.message})`;
  if (error.status === 503) return `The service is not available.${after} (${error.message})`;
  return `The request failed. (${error.message})`;
}
