// The settings of the playground: model, sampling, system prompt, the schema of the answer and tools.

import { request, wordsOf } from "./api.js";
import { byId, el } from "./dom.js";
import { lasting } from "./storage.js";

const SETTINGS = "penstock-parameters";
const NUMBERS = { temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p",
  max_tokens: "max_output_tokens", seed: "seed", presence_penalty: "presence_penalty",
  frequency_penalty: "frequency_penalty" };
const parameterForm = byId("parameter-form");
const model = byId("model");

/** A field that has no value the gateway could use. */
export class SettingError extends Error {}

/** Fill the list of models, for example after the API key changed. */
export async function loadModels() {
  const note = byId("model-note");
  const chosen = model.value;
  try {
    const { data } = await (await request("v1/models")).json();
    model.replaceChildren(...data.map(({ id }) => el("option", {}, id)));
    if (data.some(({ id }) => id === chosen)) model.value = chosen;
    note.textContent = data.length ? "" : "No model is served yet. Start a node, then reload.";
  } catch (error) {
    note.textContent = wordsOf(error);
  }
}

/** Return the fields of a request, without the conversation. The model's own defaults apply to what is not set. */
export function requestFields() {
  const fields = parameterForm.elements;
  const found = { model: model.value };
  const system = fields.system.value.trim();
  if (system) found.instructions = system;
  for (const [name, field] of Object.entries(NUMBERS)) {
    if (fields[name].value !== "") found[field] = Number(fields[name].value);
  }
  const stops = fields.stop.value.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops;
  if (fields.effort.value) found.reasoning = { effort: fields.effort.value };
  const schema = jsonOf("schema", "JSON schema");
  if (schema !== undefined) found.text = { format: { type: "json_schema", name: "answer", schema, strict: false } };
  const tools = jsonOf("tools", "Tools");
  if (tools !== undefined) {
    found.tools = (Array.isArray(tools) ? tools : [tools]).map(toolOf);
    found.tool_choice = fields.tool_choice.value;
  }
  return found;
}

function jsonOf(name, label) {
  const text = parameterForm.elements[name].value.trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${label}: this is no JSON (${error.message}).`);
  }
  if (typeof value !== "object" || value === null) throw new SettingError(`${label}: this must be a JSON object.`);
  return value;
}

/** Return a tool as /v1/responses takes it. In chats the function is a member of it. */
function toolOf(tool) {
  const { function: inner, ...rest } = tool ?? {};
  return { type: "function", ...rest, ...inner };
}

/** Restore what the user set before, and keep what changes. */
export function startSettings() {
  for (const [name, value] of Object.entries(kept())) {
    const field = parameterForm.elements.namedItem(name);
    if (field) field.value = value;
  }
  parameterForm.addEventListener("input", () => {
    lasting.set(SETTINGS, JSON.stringify(Object.fromEntries(new FormData(parameterForm))));
  });
  parameterForm.addEventListener("reset", () => lasting.remove(SETTINGS));
  parameterForm.addEventListener("submit", (event) => event.preventDefault());
}

function kept() {
  try {
    return JSON.parse(lasting.get(SETTINGS)) ?? {};
  } catch {
    return {}; // damaged
  }
}

/** Forget what the user set. */
export function forgetSettings() {
  parameterForm.reset();
}
