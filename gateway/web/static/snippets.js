// A request of the playground as a command for a terminal, and as a Python program.

/** The address of the gateway's API, as the page's own address has it. */
const base = () => new URL("v1", location.href).href;

/** Return a curl command. The key is the shell's `PENSTOCK_API_KEY`, never the page's. */
export function curlOf(fields, input) {
  const body = JSON.stringify({ ...fields, input }, null, 2).replaceAll("'", "'\\''");
  return [`curl ${base()}/responses \\`, `  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\`,
    "  -H 'Content-Type: application/json' \\", `  -d '${body}'`, ""].join("\n");
}

const OPENAI_FIELDS = new Set(["model", "instructions", "temperature", "top_p", "max_output_tokens", "text", "tools",
  "tool_choice", "reasoning"]);

/** Return a program for the package `openai`. Options that OpenAI does not have are in `extra_body`. */
export function pythonOf(fields, input) {
  const own = Object.entries(fields).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(fields).filter(([name]) => !OPENAI_FIELDS.has(name));
  const given = [...own, ["input", input], ...(extra.length ? [["extra_body", Object.fromEntries(extra)]] : [])];
  return ["import os", "", "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(base())}, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))`,
    "response = client.responses.create(", ...given.map(([name, value]) => `    ${name}=${literal(value, "    ")},`), ")",
    "print(response.output_text)", ""].join("\n");
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
