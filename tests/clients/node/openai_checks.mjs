// The official `openai` package for Node: chat, its helpers, responses, files, batches and webhooks.

import assert from "node:assert/strict";
import http from "node:http";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  API,
  ASK_LENGTH,
  ASK_RIVER,
  KEY,
  LENGTHS_KM,
  LONG_STORY_TOKENS,
  MODEL,
  QUESTION,
  STORY,
  TOO_LONG,
  check,
  main,
  sleep,
  waitUntilNewestJobIsCancelled,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: API, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const greedy = { model: MODEL, temperature: 0, max_tokens: 24 };
const user = (content) => [{ role: "user", content }];
const River = z.strictObject({ name: z.enum(Object.keys(LENGTHS_KM)), is_navigable: z.boolean() });
const Length = z.strictObject({ name: z.enum(Object.keys(LENGTHS_KM)) });
const lengthTool = zodFunction({ name: "length_of", parameters: Length });

check("served model is listed and retrieved", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert(ids.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

check("chat answers with text and usage", async () => {
  const answer = await client.chat.completions.create({ messages: user(QUESTION), ...greedy });
  assert(answer.choices[0].message.content);
  assert.equal(answer.usage.completion_tokens, greedy.max_tokens);
});

check("streamed chat has the text and the usage of the whole answer", async () => {
  const whole = await client.chat.completions.create({ messages: user(QUESTION), ...greedy });
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = client.chat.completions.stream({ messages: user(QUESTION), ...greedy, ...options });
  let text = "";
  stream.on("content", (piece) => (text += piece));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

check("completions answer and stream the same text", async () => {
  const asked = { ...greedy, prompt: "Once upon a time" };
  const whole = await client.completions.create(asked);
  let text = "";
  for await (const piece of await client.completions.create({ ...asked, stream: true })) text += piece.choices[0].text;
  assert.equal(text, whole.choices[0].text);
});

check("forced call is answered in a second request", async () => {
  const asked = { ...greedy, max_tokens: 200, tools: [lengthTool], parallel_tool_calls: false };
  const first = await client.chat.completions.create({ messages: user(ASK_LENGTH), tool_choice: "required", ...asked });
  const [call] = first.choices[0].message.tool_calls;
  const { name } = Length.parse(JSON.parse(call.function.arguments));
  const result = { role: "tool", tool_call_id: call.id, content: `${LENGTHS_KM[name]} km` };
  const messages = [...user(ASK_LENGTH), first.choices[0].message, result];
  const second = await client.chat.completions.create({ messages, tool_choice: "none", ...asked });
  assert(second.choices[0].message.content);
});

check("streamed call is collected", async () => {
  const choice = { type: "function", function: { name: "length_of" } };
  const asked = { ...greedy, max_tokens: 200, tools: [lengthTool], tool_choice: choice };
  const final = await client.chat.completions.stream({ messages: user(ASK_LENGTH), ...asked }).finalChatCompletion();
  Length.parse(final.choices[0].message.tool_calls[0].function.parsed_arguments);
});

check("parsed message is sent back", async () => {
  const asked = { ...greedy, max_tokens: 200, response_format: zodResponseFormat(River, "river") };
  const first = await client.chat.completions.parse({ messages: user(ASK_RIVER), ...asked });
  River.parse(first.choices[0].message.parsed);
  const messages = [...user(ASK_RIVER), first.choices[0].message, ...user("Another one.")];
  River.parse((await client.chat.completions.parse({ messages, ...asked })).choices[0].message.parsed);
});

check("response stream has the text of the stored response", async () => {
  const text = { format: zodTextFormat(River, "river") };
  const asked = { model: MODEL, input: ASK_RIVER, temperature: 0, max_output_tokens: 200, text };
  const stream = client.responses.stream(asked);
  let streamed = "";
  stream.on("response.output_text.delta", (event) => (streamed += event.delta));
  const final = await stream.finalResponse();
  River.parse(final.output_parsed);
  assert(final.usage.output_tokens > 0);
  assert.equal((await client.responses.retrieve(final.id)).output_text, streamed);
});

check("background response is canceled and deleted", async () => {
  const asked = { model: MODEL, input: STORY, background: true, max_output_tokens: LONG_STORY_TOKENS };
  const { id } = await client.responses.create(asked);
  await client.responses.cancel(id);
  await waitUntilNewestJobIsCancelled();
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

check("errors are those of the client", async () => {
  const ask = (wrong) => client.chat.completions.create({ messages: user("x"), ...greedy, ...wrong });
  await assert.rejects(ask({ model: "absent" }), OpenAI.NotFoundError);
  await assert.rejects(ask({ top_p: 9 }), { param: "top_p", status: 400 });
  await assert.rejects(ask({ messages: user(TOO_LONG) }), { code: "context_length_exceeded", status: 400 });
});

check("aborted stream cancels its job", async () => {
  const asked = { ...greedy, max_tokens: LONG_STORY_TOKENS, ignore_eos: true };
  const stream = await client.chat.completions.create({ messages: user(STORY), ...asked, stream: true });
  for await (const _piece of stream) break;
  stream.controller.abort();
  await waitUntilNewestJobIsCancelled();
});

const ENDED = ["completed", "failed", "expired", "cancelled"];

async function uploaded(rows) {
  const lines = rows.map((row) => (typeof row === "string" ? row : JSON.stringify(row))).join("\n");
  return client.files.create({ file: await toFile(Buffer.from(lines), "rows.jsonl"), purpose: "batch" });
}

function row(custom_id, body = {}) {
  const asked = { messages: user(QUESTION), ...greedy, ...body };
  return { custom_id, method: "POST", url: "/v1/chat/completions", body: asked };
}

async function made(rows) {
  const { id } = await uploaded(rows);
  const asked = { input_file_id: id, endpoint: "/v1/chat/completions", completion_window: "24h" };
  return client.batches.create({ ...asked, metadata: { project: "rivers" } });
}

async function ended(id) {
  let batch;
  while (!ENDED.includes((batch = await client.batches.retrieve(id)).status)) await sleep(200);
  return batch;
}

async function linesOf(fileId) {
  const text = await (await client.files.content(fileId)).text();
  return text.trimEnd().split("\n").map((line) => JSON.parse(line));
}

check("file is uploaded, listed, read and deleted", async () => {
  const file = await uploaded(["{}", "{}"]);
  assert.deepEqual([file.bytes, file.filename, file.purpose], [5, "rows.jsonl", "batch"]);
  const ids = [];
  for await (const one of client.files.list({ limit: 1 })) ids.push(one.id);
  assert(ids.includes(file.id));
  assert.equal((await client.files.retrieve(file.id)).id, file.id);
  assert.equal(await (await client.files.content(file.id)).text(), "{}\n{}");
  assert.equal((await client.files.delete(file.id)).deleted, true);
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
});

check("batch has the answers of chats, and errors in a file of their own", async () => {
  const batch = await made([row("one"), row("two", { temperature: -1 })]);
  assert.deepEqual(batch.metadata, { project: "rivers" });
  const ids = [];
  for await (const one of client.batches.list({ limit: 1 })) ids.push(one.id);
  assert(ids.includes(batch.id));
  const done = await ended(batch.id);
  assert.deepEqual(done.request_counts, { total: 2, completed: 1, failed: 1 });
  const [[answered], [failed]] = [await linesOf(done.output_file_id), await linesOf(done.error_file_id)];
  const whole = await client.chat.completions.create({ messages: user(QUESTION), ...greedy });
  assert.equal(answered.response.body.choices[0].message.content, whole.choices[0].message.content);
  assert.deepEqual([answered.custom_id, failed.custom_id, failed.error.param], ["one", "two", "temperature"]);
});

check("batch is canceled, and reads its file until then", async () => {
  const batch = await made([row("one", { max_tokens: LONG_STORY_TOKENS, ignore_eos: true, messages: user(STORY) })]);
  await assert.rejects(client.files.delete(batch.input_file_id), OpenAI.ConflictError);
  // Before, its rows are not known.
  while ((await client.batches.retrieve(batch.id)).status === "validating") await sleep(100);
  assert.equal((await client.batches.cancel(batch.id)).status, "cancelling");
  const done = await ended(batch.id);
  assert.equal(done.status, "cancelled");
  assert.equal((await linesOf(done.error_file_id))[0].error.code, "batch_cancelled");
});

check("wrong lines of a batch are named", async () => {
  const done = await ended((await made([row("one"), "", row("one")])).id);
  assert.deepEqual([done.status, done.errors.data[0].code, done.errors.data[0].line], ["failed", "duplicate_custom_id", 3]);
});

check("end of a batch is told to a webhook, whose signature the client checks", async () => {
  let received;
  const told = new Promise((resolve) => (received = resolve));
  const server = http.createServer(async (request, answer) => {
    const pieces = [];
    for await (const piece of request) pieces.push(piece);
    answer.end();
    received({ body: Buffer.concat(pieces).toString(), headers: new Headers(request.headers) });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = `http://127.0.0.1:${server.address().port}/hook`;
  const { id, signing_secret: secret } = await client.webhooks.create({
    url, name: "checks", event_types: ["batch.completed"],
  });
  const batch = await made([row("one")]);
  const { body, headers } = await told;
  const event = await client.webhooks.unwrap(body, headers, secret);
  assert.deepEqual([event.type, event.data.id], ["batch.completed", batch.id]);
  await assert.rejects(client.webhooks.unwrap(`${body} `, headers, secret), OpenAI.InvalidWebhookSignatureError);
  await client.webhooks.delete(id);
  server.close();
});

await main("openai");
