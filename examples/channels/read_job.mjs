// Prints a job's tokens, each once: node read_job.mjs JOB_ID CHANNEL; docs/howto/redis_channels.md says why.
import { realpathSync } from "node:fs";
import { fileURLToPath } from "node:url";
import Redis from "ioredis";

const gateway = process.env.PENSTOCK_URL ?? "http://127.0.0.1:8000";
const headers = { Authorization: `Bearer ${process.env.PENSTOCK_API_KEY ?? "none"}` };
const silenceMs = 3000;

async function get(path, signal) {
  const answer = await fetch(gateway + path, { headers, signal });
  if (answer.ok) return answer;
  throw Object.assign(new Error(`${path}: ${answer.status} ${await answer.text()}`), { status: answer.status });
}

// Yields the events after number `seen` that the job has by now.
async function* logged(jobId, seen) {
  const last = (await (await get(`/v1/jobs/${jobId}`)).json()).num_chunks - 1;
  if (seen >= last) return;
  const ends = new AbortController();
  try {
    const stream = await get(`/v1/jobs/${jobId}/stream?after=${seen}`, ends.signal);
    let held = "";
    for await (const part of stream.body.pipeThrough(new TextDecoderStream())) {
      const lines = (held + part).split("\n");
      held = lines.pop();
      for (const line of lines.filter((one) => one.startsWith("data: {"))) {
        const event = JSON.parse(line.slice(6));
        if (event.index !== undefined) yield event;
        if (event.index >= last) return;
      }
    }
  } finally {
    ends.abort();
  }
}

// Yields each message; null after silence, and once subscribed.
async function* published(channel) {
  const redis = new Redis(process.env.REDIS_URL, { enableReadyCheck: false, maxRetriesPerRequest: null });
  const messages = [];
  let wake = () => {};
  const put = (message) => {
    messages.push(message);
    wake();
  };
  redis.on("message", (_, message) => put(JSON.parse(message)));
  redis.on("error", () => {}); // it connects again and subscribes again by itself
  try {
    await redis.subscribe(channel);
    put(null);
    while (true) {
      const timer = setTimeout(() => put(null), silenceMs);
      if (!messages.length) await new Promise((resolve) => (wake = resolve));
      clearTimeout(timer);
      yield messages.shift();
    }
  } finally {
    redis.disconnect();
  }
}

// Yields a job's events, each once, in order, to the last one.
export async function* events(jobId, channel) {
  let seen = -1;
  for await (const message of published(channel)) {
    if (message && (message.id !== jobId || message.index <= seen)) continue;
    try {
      for await (const event of message?.index === seen + 1 ? [message] : logged(jobId, seen)) {
        seen = event.index;
        yield event;
        if (event.outcome) return;
      }
    } catch (error) {
      if (error.status < 500 && error.status !== 429) throw error;
      // No gateway answers: the next message or silence tries again.
    }
  }
}

if (realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  for await (const event of events(...process.argv.slice(2))) {
    process.stdout.write(event.text ?? `\n${event.outcome.state}\n`);
  }
}
