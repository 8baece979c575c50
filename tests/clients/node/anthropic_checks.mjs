// The official `@anthropic-ai/sdk` package for Node: messages, and message batches.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { KEY, LONG_STORY_TOKENS, MODEL, QUESTION, STORY, URL_OF_SERVER, check, main } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_OF_SERVER, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const user = (content) => [{ role: "user", content }];
const greedy = { model: MODEL, max_tokens: 24, temperature: 0, messages: user(QUESTION) };

async function ended(id) {
  let batch;
  while ((batch = await client.messages.batches.retrieve(id)).processing_status !== "ended") {
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  return batch;
}

async function resultsOf(id) {
  const results = {};
  for await (const one of await client.messages.batches.results(id)) results[one.custom_id] = one.result;
  return results;
}

check("message has text and usage", async () => {
  const message = await client.messages.create(greedy);
  assert(message.content[0].text);
  assert.equal(message.usage.output_tokens, greedy.max_tokens);
});

check("streamed message has the text of the whole one", async () => {
  const whole = await client.messages.create(greedy);
  const final = await client.messages.stream(greedy).finalMessage();
  assert.equal(final.content[0].text, whole.content[0].text);
});

check("message batch has the results of messages", async () => {
  const requests = [
    { custom_id: "one", params: greedy },
    { custom_id: "two", params: { ...greedy, model: "absent" } },
  ];
  const made = await client.messages.batches.create({ requests });
  assert.equal(made.processing_status, "in_progress");
  assert.equal(made.request_counts.processing, 2);
  const ids = [];
  for await (const one of client.messages.batches.list({ limit: 1 })) ids.push(one.id);
  assert(ids.includes(made.id));
  const batch = await ended(made.id);
  assert.deepEqual([batch.request_counts.succeeded, batch.request_counts.errored], [1, 1]);
  const results = await resultsOf(made.id);
  const whole = await client.messages.create(greedy);
  assert.equal(results.one.message.content[0].text, whole.content[0].text);
  assert.equal(results.two.error.error.type, "not_found_error");
  assert.equal((await client.messages.batches.delete(made.id)).type, "message_batch_deleted");
  await assert.rejects(client.messages.batches.retrieve(made.id), Anthropic.NotFoundError);
});

check("message batch is canceled", async () => {
  const params = { model: MODEL, max_tokens: LONG_STORY_TOKENS, messages: user(STORY) };
  const made = await client.messages.batches.create({ requests: [{ custom_id: "one", params }] });
  assert.equal((await client.messages.batches.cancel(made.id)).processing_status, "canceling");
  await ended(made.id);
  assert.deepEqual(await resultsOf(made.id), { one: { type: "canceled" } });
});

check("errors are those of the client", async () => {
  await assert.rejects(client.messages.create({ ...greedy, model: "absent" }), Anthropic.NotFoundError);
  const requests = [{ custom_id: "a b", params: greedy }];
  await assert.rejects(client.messages.batches.create({ requests }), Anthropic.BadRequestError);
});

await main("@anthropic-ai/sdk");
