// The settings of the playground: model, sampling, system prompt, the schema of the answer and tools.

import { request, wordsOf } from "./api.js";
import { byId, el } from "./dom.js";
import { lasting } from "./storage.js";

const SETTINGS = "penstock-settings"; // those of the next new conversation: the last that were used
const NUMBERS = { temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p",
  max_tokens: "max_output_tokens", seed: "seed", presence_penalty: "presence_penalty",
  frequency_penalty: "frequency_penalty" };
const parameterForm = byId("parameter-form");
const model = byId("model");
const NO_TEMPLATE = "This model has no chat template. It continues your text, without system prompt, tools and schema.";
const NO_MODEL = "No model is served yet. Start a node.";
let models; // model → what it is good for; undefined until the list was read
let numReadings = 0; // of the list
let chosen = ""; // also a model that nothing serves, if a conversation has it
let isOfConversation = false; // whether the settings are those of a conversation, and not of a new one

/** A field that has no value the gateway could use. */
export class SettingError extends Error {}

/** Fill the list of models, for example after the API key changed. */
export async function loadModels() {
  const reading = ++numReadings;
  try {
    const { data } = await (await request("v1/models")).json();
    if (reading !== numReadings) return; // A newer list may be shown already.
    // A node of an earlier release says nothing.
    models = new Map(data.map((one) => [one.id, one.capabilities?.length ? one.capabilities : ["chat"]]));
    showModels();
  } catch (error) {
    if (reading === numReadings) byId("model-note").textContent = wordsOf(error);
  }
}

/** What the playground uses a model for: "chat", "completion", or "" for a model that generates no text. */
function useOf(id) {
  return ["chat", "completion"].find((use) => (models?.get(id) ?? ["chat"]).includes(use)) ?? "";
}

function showModels() {
  const ids = [...models.keys()];
  if (!isOfConversation && !models.has(chosen)) chosen = "";
  if (!chosen) chosen = ids.find((id) => useOf(id) === "chat") ?? ids.find(useOf) ?? "";
  const words = { chat: "", completion: " (completion)", "": " (no text)" };
  const options = ids.map((id) => el("option", { value: id, disabled: !useOf(id) }, id + words[useOf(id)]));
  if (chosen && !models.has(chosen)) options.unshift(el("option", { value: chosen }, `${chosen} (not served)`));
  model.replaceChildren(...options);
  model.value = chosen;
  showUse();
}

/** Say what the chosen model cannot do, and hide the settings of chats from a model that has none. */
function showUse() {
  const isCompletion = useOf(chosen) === "completion";
  for (const field of parameterForm.querySelectorAll(".of-chat")) field.hidden = isCompletion;
  if (!models) return;
  const note = !models.size ? NO_MODEL : !models.has(chosen) ? goneWords() : "";
  byId("model-note").textContent = note || (isCompletion ? NO_TEMPLATE : "");
}

const goneWords = () => `No node serves the model ${chosen} any more. Choose another one.`;

/** Return all settings, to keep them with a conversation. */
export function currentSettings() {
  return { ...Object.fromEntries(new FormData(parameterForm)), model: chosen };
}

/** Show the settings of a conversation. A new one has none: it gets those that are shown, with a model that is served. */
export function showSettings(settings) {
  isOfConversation = Boolean(settings);
  if (settings) fill(settings);
  if (models) showModels();
}

function fill(settings) {
  for (const [name, value] of Object.entries(settings)) {
    const field = parameterForm.elements.namedItem(name);
    if (field) field.value = value;
  }
  chosen = settings.model || chosen;
}

/** Return the fields of a request, without the conversation. The model's own defaults apply to what is not set. */
export function requestFields() {
  if (models ? !models.has(chosen) : !chosen) {
    loadModels(); // A node may serve it now.
    throw new SettingError(models?.size ? goneWords() : NO_MODEL);
  }
  const fields = parameterForm.elements;
  const isCompletion = useOf(chosen) === "completion";
  const found = { model: chosen };
  for (const [name, field] of Object.entries(NUMBERS)) {
    if (fields[name].value !== "") found[isCompletion ? name : field] = Number(fields[name].value);
  }
  const stops = fields.stop.value.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops;
  if (isCompletion) return found;
  const system = fields.system.value.trim();
  if (system) found.instructions = system;
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

/** Whether the chosen model continues texts, because it has no chat template. */
export const isForCompletion = () => useOf(chosen) === "completion";

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

/** Restore what was used last, and call `onChange` with what the user changes. */
export function startSettings(onChange) {
  fill(kept());
  const change = () => {
    chosen = model.value || chosen; // The list may not be there yet.
    showUse();
    lasting.set(SETTINGS, JSON.stringify(currentSettings()));
    onChange();
  };
  model.addEventListener("change", change);
  parameterForm.addEventListener("input", change);
  parameterForm.addEventListener("reset", () => setTimeout(change)); // after the fields have their defaults
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
  setTimeout(() => lasting.remove(SETTINGS)); // after `change`
}
