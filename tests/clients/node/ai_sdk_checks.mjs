// The AI SDK: its default model class, which asks the Responses API, and its chat class.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
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

const provider = createOpenAI({ baseURL: API, apiKey: KEY });
const short = { temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const longer = { ...short, maxOutputTokens: 200 };
const River = z.strictObject({ name: z.enum(Object.keys(LENGTHS_KM)), is_navigable: z.boolean() });

for (const [kind, modelOf] of [["default model", provider], ["chat model", provider.chat]]) {
  const model = modelOf(MODEL);

  check(`${kind} answers with text and usage`, async () => {
    const { text, usage, finishReason } = await generateText({ model, prompt: QUESTION, ...short });
    assert(text);
    assert.equal(usage.outputTokens, 24);
    assert.equal(finishReason, "length");
  });

  check(`${kind} streams the text of the whole answer`, async () => {
    const whole = await generateText({ model, prompt: QUESTION, ...short });
    const stream = streamText({ model, prompt: QUESTION, ...short });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, 24);
  });

  check(`${kind} calls a tool and goes on with its result`, async () => {
    const length_of = tool({
      description: "Return the length of a river.",
      inputSchema: z.strictObject({ name: z.enum(Object.keys(LENGTHS_KM)) }),
      execute: ({ name }) => `${LENGTHS_KM[name]} km`,
    });
    const { steps, text } = await generateText({
      model,
      prompt: ASK_LENGTH,
      tools: { length_of },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      ...longer,
    });
    assert.equal(steps.length, 2);
    assert.equal(steps[0].toolResults[0].toolName, "length_of");
    assert(text);
  });

  check(`${kind} makes a record`, async () => {
    const output = Output.object({ schema: River });
    River.parse((await generateText({ model, prompt: ASK_RIVER, output, ...longer })).output);
  });

  check(`${kind} reports errors`, async () => {
    const absent = generateText({ model: modelOf("absent"), prompt: "x", ...short });
    await assert.rejects(absent, (error) => APICallError.isInstance(error) && error.statusCode === 404);
    const tooLong = generateText({ model, prompt: TOO_LONG, ...short });
    await assert.rejects(tooLong, (error) => error.statusCode === 400 && /maximum context length/.test(error.message));
  });

  check(`${kind} cancels the job of an aborted stream`, async () => {
    const abort = new AbortController();
    const asked = { model, prompt: STORY, abortSignal: abort.signal, ...short, maxOutputTokens: LONG_STORY_TOKENS };
    for await (const part of streamText(asked).fullStream) if (part.type === "text-delta") abort.abort();
    await waitUntilNewestJobIsCancelled();
  });
}

await main("ai", "@ai-sdk/openai");
