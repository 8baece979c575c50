// The playground: a conversation with one of the served models.

import { answerTo, cancelJob } from "./answer.js";
import { request, wordsOf } from "./api.js";
import { byId, el } from "./dom.js";
import { lasting } from "./storage.js";
import { AnswerTurn, UserTurn } from "./turns.js";

const PARAMETERS = "penstock-parameters";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const NEAR_END_PX = 80;

let turns = [];
let isAtEnd = true; // whether the reader has not scrolled away from the newest text
let running; // {abort, job} of the answer that streams now
const view = Object.fromEntries(
  ["turns", "composer", "prompt", "send", "stop", "clear", "model", "model-note", "parameter-form"].map((id) => [id, byId(id)]),
);

/** Connect the page's elements. */
export function startChat() {
  view.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  view.prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  view.prompt.addEventListener("input", fitPrompt);
  view.stop.addEventListener("click", stop);
  view.clear.addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  view.turns.addEventListener("grown", followEnd);
  view.turns.addEventListener("scroll", noteScroll);
  keepParameters();
  loadModels();
}

/** Fill the list of models, for example after the API key changed. */
export async function loadModels() {
  const chosen = view.model.value;
  try {
    const { data } = await (await request("v1/models")).json();
    view.model.replaceChildren(...data.map(({ id }) => el("option", {}, id)));
    if (data.some(({ id }) => id === chosen)) view.model.value = chosen;
    view["model-note"].textContent = data.length ? "" : "No model is served yet. Start a node, then reload.";
  } catch (error) {
    view["model-note"].textContent = wordsOf(error);
  }
}

function send() {
  const text = view.prompt.value.trim();
  if (!text || running) return;
  view.prompt.value = "";
  fitPrompt();
  add(new UserTurn(text, edit));
  answer();
}

async function answer() {
  const turn = new AnswerTurn(view.model.value, retry);
  const body = { ...bodyOf(), messages: messages() };
  add(turn);
  view.turns.scrollTop = view.turns.scrollHeight;
  running = { controller: new AbortController(), job: "" };
  showRunning();
  const { signal } = running.controller;
  try {
    for await (const { job, event, numTokens, lost } of answerTo(body, signal)) {
      if (job) running.job = job;
      if (lost) turn.say("The connection was lost. The answer continues as soon as a gateway is found…", "lost");
      if (event) turn.take(event, numTokens);
    }
    turn.end();
  } catch (error) {
    if (signal.aborted) turn.end("Stopped");
    else turn.end(wordsOf(error), "error");
  }
  running = undefined;
  showRunning();
}

function stop() {
  if (!running) return;
  // The gateway would let the job of a closed stream continue for a few seconds, so that its reader may return.
  if (running.job) cancelJob(running.job);
  running.controller.abort();
}

/** Generate an answer again. */
function retry(turn) {
  if (running) return;
  cutAt(turn);
  answer();
}

/** Take a message, and all that follows it, back into the text field. */
function edit(turn) {
  if (running) return;
  cutAt(turn);
  view.prompt.value = turn.message.content;
  fitPrompt();
  view.prompt.focus();
}

function clear() {
  stop();
  turns = [];
  view.turns.replaceChildren();
  view.prompt.focus();
}

function add(turn) {
  turns.push(turn);
  view.turns.append(turn.element);
}

function cutAt(turn) {
  for (const cut of turns.splice(turns.indexOf(turn))) cut.element.remove();
}

/** Return the conversation. A message without an answer becomes one with the next: some models need alternate roles. */
function messages() {
  const system = view["parameter-form"].elements.system.value.trim();
  const said = system ? [{ role: "system", content: system }] : [];
  for (const { role, content } of turns.map((turn) => turn.message)) {
    const last = said.at(-1);
    if (content && last?.role === role) last.content += `\n\n${content}`;
    else if (content) said.push({ role, content });
  }
  return said;
}

/** Return the parameters that the user set. The model's own defaults apply to the others. */
function bodyOf() {
  const fields = view["parameter-form"].elements;
  const body = { model: view.model.value, stream: true, stream_options: { include_usage: true }, return_progress: true };
  for (const name of NUMBERS) if (fields[name].value !== "") body[name] = Number(fields[name].value);
  const stops = fields.stop.value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  return body;
}

function keepParameters() {
  const parameterForm = view["parameter-form"];
  for (const [name, value] of Object.entries(keptParameters())) {
    const field = parameterForm.elements.namedItem(name);
    if (field) field.value = value;
  }
  parameterForm.addEventListener("input", () => {
    lasting.set(PARAMETERS, JSON.stringify(Object.fromEntries(new FormData(parameterForm))));
  });
  parameterForm.addEventListener("reset", () => lasting.remove(PARAMETERS));
  parameterForm.addEventListener("submit", (event) => event.preventDefault());
  // On a phone the conversation comes first.
  if (matchMedia("(max-width: 760px)").matches) byId("parameters").open = false;
}

function keptParameters() {
  try {
    return JSON.parse(lasting.get(PARAMETERS)) ?? {};
  } catch {
    return {}; // damaged
  }
}

/** Show Stop or Send. A focused button that disappears passes the focus on; a field that has it keeps it. */
function showRunning() {
  const [shown, hidden] = running ? [view.stop, view.send] : [view.send, view.stop];
  const focused = document.activeElement;
  shown.hidden = false;
  if (running && focused === hidden) shown.focus({ preventScroll: true });
  if (!running && (focused === hidden || focused === document.body)) view.prompt.focus({ preventScroll: true });
  hidden.hidden = true;
}

function noteScroll() {
  const { scrollHeight, scrollTop, clientHeight } = view.turns;
  isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
}

function followEnd() {
  if (isAtEnd) view.turns.scrollTop = view.turns.scrollHeight;
}

function fitPrompt() {
  view.prompt.rows = Math.min(8, Math.max(2, view.prompt.value.split("\n").length));
}
