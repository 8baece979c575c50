// A server of the Model Context Protocol over standard input and output, with one tool.

import readline from "node:readline";

const TOOL = {
  name: "length_of",
  description: "The length of a river in km.",
  inputSchema: { type: "object", properties: { river: { type: "string" } }, required: ["river"] },
};
const ANSWERS = {
  initialize: ({ protocolVersion }) => ({
    protocolVersion,
    capabilities: { tools: {} },
    serverInfo: { name: "rivers", version: "1" },
  }),
  "tools/list": () => ({ tools: [TOOL] }),
  "tools/call": ({ arguments: { river } }) => ({ content: [{ type: "text", text: `${river}: 6650 km` }] }),
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) continue;
  const answer = ANSWERS[method];
  const end = answer ? { result: answer(params) } : { error: { code: -32601, message: `unknown: ${method}` } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...end }));
}
