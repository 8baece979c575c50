// Reads answers without end while gateways are killed, by the official packages as they are (`faults.gateway_kills`).
//
// Each line on stdout is an answer: its case, its text or its error, and the silences of half a second and more with
// their ends, in seconds of the monotonic clock. It ends once stdin ends, after the answers that are open.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const { PENSTOCK_URL, PENSTOCK_MODEL: model, PENSTOCK_TEXT: content, PENSTOCK_READERS } = process.env;
const TIMEOUT_MS = 120_000;
const NOTED_SILENCE_S = 0.5;
const openai = new OpenAI({ baseURL: `${PENSTOCK_URL}/v1`, apiKey: "none", timeout: TIMEOUT_MS });
const anthropic = new Anthropic({ baseURL: PENSTOCK_URL, apiKey: "none", timeout: TIMEOUT_MS });
const messages = [{ role: "user", content }];
const nowS = () => Number(process.hrtime.bigint()) / 1e9;

async function textOf(events, textIn, gaps) {
  let text = "";
  let lastS = nowS();
  for await (const event of events) {
    text += textIn(event) ?? "";
    const now = nowS();
    if (now - lastS > NOTED_SILENCE_S) gaps.push([now, now - lastS]);
    lastS = now;
  }
  return text;
}

const CASES = {
  chat: async (gaps) => {
    const options = { include_usage: true };
    const stream = await openai.chat.completions.create({ model, messages, stream: true, stream_options: options });
    return textOf(stream, (chunk) => chunk.choices[0]?.delta.content, gaps);
  },
  "whole chat": async () => (await openai.chat.completions.create({ model, messages })).choices[0].message.content,
  response: async (gaps) => {
    const stream = await openai.responses.create({ model, input: content, stream: true });
    return textOf(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : ""), gaps);
  },
  message: async (gaps) => {
    const stream = await anthropic.messages.create({ model, messages, max_tokens: 250, stream: true });
    return textOf(stream, (event) => event.delta?.text, gaps);
  },
  "whole message": async () => (await anthropic.messages.create({ model, messages, max_tokens: 250 })).content[0].text,
};

let stops = false;

async function read(start) {
  const names = Object.keys(CASES);
  for (let number = start; !stops; number += 1) {
    const name = names[number % names.length];
    const gaps = [];
    const answer = { case: name, gaps };
    try {
      answer.text = await CASES[name](gaps);
    } catch (error) {
      answer.error = String(error?.stack ?? error);
    }
    console.log(JSON.stringify(answer));
  }
}

process.stdin.on("end", () => {
  stops = true;
});
process.stdin.resume();
await Promise.all(Array.from({ length: Number(PENSTOCK_READERS) }, (_, number) => read(number)));
process.exit(0);
