// A request of the playground as a command for a terminal, and as a Python program.

/** The address of the gateway's API, as the page's own address has it. */
const base = () => new URL("v1", location.href).href;

/** The method of OpenAI's client for an answer, the name of its input, and the program that prints its text. */
const chat = { method: "responses", input: "input", text: "output_text" };
const completion = { method: "completions", input: "prompt", text: "choices[0].text" };

/** Return a curl command. The key is the shell's `PENSTOCK_API_KEY`, never the page's. */
export function curlOf({ request: fields, isCompletion }, input) {
  const api = isCompletion ? completion : chat;
  const body = JSON.stringify({ ...fields, [api.input]: input }, null, 2).replaceAll("'", "'\\''");
  return [`curl ${base()}/${api.method} \\`, `  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\`,
    "  -H 'Content-Type: application/json' \\", `  -d '${body}'`, ""].join("\n");
}

const OPENAI_FIELDS = new Set(["model", "instructions", "temperature", "top_p", "max_output_tokens", "text", "tools",
  "tool_choice", "reasoning", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty"]);

/** Return a program for the package `openai`. Options that OpenAI does not have are in `extra_body`. */
export function pythonOf({ request: fields, isCompletion }, input) {
  const api = isCompletion ? completion : chat;
  const own = Object.entries(fields).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(fields).filter(([name]) => !OPENAI_FIELDS.has(name));
  const given = [...own, [api.input, input], ...(extra.length ? [["extra_body", Object.fromEntries(extra)]] : [])];
  return ["import os", "", "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(base())}, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))`,
    `response = client.${api.method}.create(`, ...given.map(([name, value]) => `    ${name}=${literal(value, "    ")},`), ")",
    `print(response.${api.text})`, ""].join("\n");
}

/** Write a value as a Python expression. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const [open, close] = isList ? "[]" : "{}";
  const inner = `${indent}    `;
  const parts = isList ? value.map((one) => literal(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}
