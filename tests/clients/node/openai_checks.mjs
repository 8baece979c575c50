// The official `openai` package for Node: chat, its helpers, and responses.

import assert from "node:assert/strict";
import OpenAI from "openai";
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

await main("openai");
