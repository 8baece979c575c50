// The playground: conversations with the served models. Their turns are kept in the browser (conversations.js).

import { beginPart, deleteAnswers, inputOf, newAnswer, noteFailure, randomId, readAnswer, stopAnswer } from "./answer.js";
import { LostError, apiKey, request, sleep, wordsOf } from "./api.js";
import { ask as askUser } from "./ask.js";
import { ConversationList } from "./conversation_list.js";
import { openStore } from "./conversations.js";
import { byId, download } from "./dom.js";
import {
  SettingError, currentSettings, forgetSettings, isForCompletion, loadModels, requestFields, showSettings, startSettings,
} from "./settings.js";
import { ofTab } from "./storage.js";
import { viewOf } from "./turns.js";

const DRAFT = "penstock-draft";
const NEAR_END_PX = 80;
const SAVE_MS = 1_000;
const MAX_TITLE_CHARS = 60;
const LOOK_MS = 2_000;
const NOT_KEPT = "This browser keeps no conversations for this page: they are lost when you leave it.";

let store; // of the key's tenant
let starting = Promise.resolve(); // the newest call of startTenant
let channel; // tells other tabs what changed in that store
let conversation; // the one that is shown; it is not stored before its first message
let turns = []; // its turns
let views = new Map(); // turn → its view
let isAtEnd = true; // whether the reader has not scrolled away from the newest text
const known = new Map(); // id → conversation; one object for each, also when another part of the page changes it
const readers = new Map(); // conversation → {turn, controller} of the answer that is read
const view = Object.fromEntries(
  ["turns", "composer", "prompt", "send", "stop", "chat-title", "chat-note", "more", "rename", "export", "delete"]
    .map((id) => [id, byId(id)]),
);
const list = new ConversationList({ exportAll, forgetAll });

/** Connect the page's elements. */
export function startChat() {
  view.composer.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  view.prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    view.composer.requestSubmit();
  });
  view.prompt.addEventListener("input", () => {
    ofTab.set(DRAFT, view.prompt.value);
    fitPrompt();
  });
  view.stop.addEventListener("click", stop);
  view.rename.addEventListener("click", rename);
  view.export.addEventListener("click", () => exportThese([conversation]));
  view.delete.addEventListener("click", remove);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && readers.has(conversation?.id) && !document.querySelector("dialog[open]")) stop();
  });
  view.turns.addEventListener("grown", followEnd);
  view.turns.addEventListener("scroll", noteScroll);
  new ResizeObserver(followEnd).observe(view.turns); // A phone's keyboard takes half of the window.
  addEventListener("hashchange", showChosen);
  document.addEventListener("visibilitychange", () => {
    saveRunning();
    if (!document.hidden) loadModels();
  });
  addEventListener("pagehide", saveRunning);
  view.prompt.value = ofTab.get(DRAFT) ?? "";
  fitPrompt();
  startSettings(keepSettings);
  begin();
  return startTenant();
}

/** Open the conversations of the API key's tenant, and read on what was being answered. Call it when the key changed. */
export function startTenant() {
  starting = openTenant();
  return starting;
}

async function openTenant() {
  const listing = loadModels();
  const tenant = await tenantOfKey(apiKey.get());
  if (tenant === undefined) return;
  const next = await openStore(tenant);
  if (next.name === store?.name) {
    next.close();
  } else {
    leaveTenant();
    store = next;
    channel = new BroadcastChannel(store.name);
    channel.onmessage = ({ data }) => takeNews(data);
  }
  view["chat-note"].textContent = store.isLasting ? "" : NOT_KEPT;
  await refreshList();
  const answering = (await all()).filter((one) => one.isAnswering);
  await Promise.all(answering.map(resume));
  const isNewTab = location.hash === "" || location.hash === "#playground";
  const [answered] = answering;
  // A tab that was closed during an answer opens with it.
  if (isNewTab && answered && !turns.length) location.replace(`#playground/${answered.id}`);
  else await showChosen();
  await listing;
}

/** Return the tenant's name. Without a valid key there is none, and what was shown is hidden. */
async function tenantOfKey(key) {
  while (key === apiKey.get()) {
    try {
      return (await (await request("v1/key")).json()).tenant;
    } catch (error) {
      // The list of models says that a key is missing.
      view["chat-note"].textContent = error.status === 401 ? "" : wordsOf(error);
      if (error.status === 401) leaveTenant();
      if (!(error instanceof LostError)) return undefined;
    }
    await sleep(LOOK_MS);
  }
  return undefined;
}

function leaveTenant() {
  for (const { controller } of readers.values()) controller.abort();
  readers.clear();
  known.clear();
  channel?.close();
  store?.close();
  store = channel = undefined;
  list.show([], "");
  begin();
}

/** Show the conversation that the page's address names, or a new one. */
async function showChosen() {
  const [name, id] = location.hash.slice(1).split("/");
  if (!store || (name && name !== "playground")) return;
  if (!id) {
    if (turns.length) begin();
    return;
  }
  if (id === conversation.id) return;
  const found = (await all()).find((one) => one.id === id);
  if (found) await showStored(found);
  else begin();
}

async function showStored(found) {
  let reader, stored;
  do {
    reader = readers.get(found.id);
    stored = await store.turnsOf(found.id);
  } while (reader !== readers.get(found.id)); // An answer that ended meanwhile was stored after these were read.
  // The turn that is read on is the one in memory.
  show(found, stored.map((turn) => (turn.number === reader?.turn.number ? reader.turn : turn)));
}

/** Return all conversations of the store, the last changed one first. */
async function all() {
  return (await store.all()).map((stored) => {
    const one = known.get(stored.id) ?? stored;
    // Another tab may have changed it. One that is read here is changed here.
    if (!readers.has(one.id)) Object.assign(one, stored);
    known.set(one.id, one);
    return one;
  });
}

/** Begin a conversation. */
function begin() {
  const now = Date.now();
  show({ id: randomId(), title: "", createdMs: now, changedMs: now, isAnswering: false }, []);
}

function show(chosen, itsTurns) {
  conversation = chosen;
  turns = itsTurns;
  views = new Map();
  view.turns.replaceChildren();
  isAtEnd = true;
  for (const turn of turns) addView(turn);
  // A conversation of an earlier page has only the models of its answers.
  const [last] = turns.filter((turn) => turn.model).slice(-1);
  showSettings(chosen.settings ?? (last && { model: last.model }));
  showTitle();
  showRunning();
  followEnd();
}

/** Keep what the user set with the conversation. */
function keepSettings() {
  conversation.settings = currentSettings();
  if (store && turns.length) kept(store.save(conversation));
}

function addView(turn) {
  const made = viewOf(turn, { edit, retry, goOn, sendResults, inputBefore, isLast: (one) => turns.at(-1) === one });
  views.set(turn, made);
  view.turns.append(made.element);
}

function showTitle() {
  view["chat-title"].textContent = conversation.title || "New chat";
  for (const name of ["more", "rename", "export", "delete"]) view[name].hidden = !turns.length;
  list.mark(conversation.id);
  byId("playground-link").hash = turns.length ? `#playground/${conversation.id}` : "#playground";
}

async function refreshList() {
  list.show(await all(), conversation.id);
}

/** Return the conversation before a turn as the input of a request. */
function inputBefore(turn) {
  return inputOf(turns.slice(0, turns.indexOf(turn)), turn.isCompletion);
}

async function send() {
  const text = view.prompt.value.trim();
  if (!text || readers.has(conversation.id)) return;
  if (!store) await starting;
  if (!store) await startTenant(); // asks for the key
  if (!store) return;
  const fields = checkedFields();
  if (!fields) return;
  view.prompt.value = "";
  ofTab.remove(DRAFT);
  fitPrompt();
  conversation.title ||= titleOf(text);
  add({ role: "user", content: text });
  answer(fields);
}

/** Return the fields of the next request, or say which setting is wrong. */
function checkedFields() {
  try {
    const fields = requestFields();
    view["chat-note"].textContent = store.isLasting ? "" : NOT_KEPT;
    return fields;
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    view["chat-note"].textContent = error.message;
    return undefined;
  }
}

function titleOf(text) {
  const [line] = text.split("\n");
  const chars = [...line.slice(0, 2 * MAX_TITLE_CHARS)]; // An emoji is two units of a string.
  return chars.length > MAX_TITLE_CHARS ? `${chars.slice(0, MAX_TITLE_CHARS).join("")}…` : line;
}

/** Add what the user said. It is stored before the answer to it. */
function add(fields) {
  const turn = { conversation: conversation.id, number: turns.length, ...fields };
  const before = turns.at(-1);
  turns.push(turn);
  addView(turn);
  views.get(before)?.renderNow?.(); // It is not the last one now.
  kept(store.saveTurn(turn));
}

/** Wait for a change of the store. A browser without space for it is named; the page goes on. */
async function kept(change) {
  try {
    await change;
  } catch (error) {
    view["chat-note"].textContent = `This browser did not keep the conversation. (${error.message})`;
  }
}

/** Ask for an answer to what has been said. */
async function answer(fields) {
  const turn = newAnswer(conversation.id, turns.length, fields, isForCompletion());
  turns.push(turn);
  addView(turn);
  await ask(turn);
}

/** Let an answer go on from where it ended, with the settings of now. */
async function goOn(turn) {
  const fields = checkedFields();
  if (readers.has(conversation.id) || !fields) return;
  beginPart(turn, fields, isForCompletion());
  views.get(turn).say("Waiting for the first token…");
  await ask(turn);
}

async function ask(turn) {
  isAtEnd = true;
  followEnd();
  const settings = currentSettings();
  const mine = Object.assign(conversation, { changedMs: Date.now(), isAnswering: true, settings });
  showSettings(settings);
  known.set(mine.id, mine);
  const input = inputFor(turn, turns);
  await kept(store.saveTurn(turn));
  await kept(store.save(mine));
  location.replace(`#playground/${mine.id}`);
  showTitle();
  tell(mine.id);
  await read(mine, turn, input);
}

/** Return the input of the request for the last turn: what was said before it, and what it has if it goes on. */
function inputFor(turn, all) {
  return inputOf(turn.isContinued ? all : all.slice(0, -1), turn.isCompletion);
}

/** Read on the answer of a conversation that a page left. */
async function resume(found) {
  const stored = await store.turnsOf(found.id);
  if (readers.has(found.id)) return; // another call may have begun meanwhile
  const turn = stored.at(-1);
  if (turn?.role !== "assistant" || turn.state !== "running") return;
  turn.isResumed = true;
  read(found, turn, inputFor(turn, stored));
}

/** Read an answer into its turn, keep it, and show it wherever the conversation is shown. */
async function read(mine, turn, input) {
  const controller = new AbortController();
  const { signal } = controller;
  const itsStore = store;
  const reader = { turn, controller, savedMs: Date.now() };
  readers.set(mine.id, reader);
  showRunning();
  await refreshList();
  const onChange = (words, kind) => {
    const shown = views.get(turn);
    shown?.say(words, kind);
    shown?.render();
    if (Date.now() - reader.savedMs < SAVE_MS) return;
    reader.savedMs = Date.now();
    kept(itsStore.saveTurn(turn));
  };
  try {
    await readAnswer(turn, input, signal, onChange);
  } catch (error) {
    if (signal.aborted) return;
    noteFailure(turn, error);
  }
  if (signal.aborted) return;
  await end(mine, turn, itsStore);
}

/** Note that an answer is not read any more. */
async function end(mine, turn, itsStore = store) {
  readers.delete(mine.id);
  const shown = views.get(turn);
  shown?.say(turn.note, turn.state);
  shown?.renderNow();
  if (conversation.id === mine.id) showRunning();
  mine.isAnswering = turn.state === "running";
  mine.changedMs = Date.now();
  // Both as they are now: `all` may give the conversation what an older reading of the store says.
  await Promise.all([itsStore.saveTurn(turn), itsStore.save(mine)].map(kept));
  if (itsStore === store) await refreshList();
  tell(mine.id);
}

function stop() {
  const reader = readers.get(conversation?.id);
  if (!reader) return;
  // The gateway would let the answer of a closed stream go on for minutes, so that its page may return.
  stopAnswer(reader.turn);
  reader.controller.abort();
  end(conversation, reader.turn);
}

/** Generate an answer again, with the settings of now. */
async function retry(turn) {
  const fields = checkedFields();
  if (readers.has(conversation.id) || !fields) return;
  await cutAt(turn);
  answer(fields);
}

/** Take a message, and all that follows it, back into the text field. */
async function edit(turn) {
  if (readers.has(conversation.id)) return;
  await cutAt(turn);
  view.prompt.value = turn.content;
  ofTab.set(DRAFT, turn.content);
  fitPrompt();
  view.prompt.focus();
}

/** Send the results of an answer's calls, and ask for the next answer. */
async function sendResults(turn, results) {
  const fields = checkedFields();
  if (readers.has(conversation.id) || !fields) return;
  for (const { call, content } of results) add({ role: "tool", call: call.id, name: call.name, content });
  views.get(turn).showCalls();
  answer(fields);
}

async function cutAt(turn) {
  const cut = turns.splice(turns.indexOf(turn));
  for (const one of cut) {
    views.get(one).element.remove();
    views.delete(one);
  }
  if (turns.length) await store.cut(conversation.id, cut[0].number);
  else await store.remove(conversation.id);
  deleteAnswers(cut);
  views.get(turns.at(-1))?.renderNow?.(); // It is the last one again.
  showTitle();
  await refreshList();
}

async function rename() {
  const title = await askUser({ title: "Rename this conversation", value: conversation.title, action: "Rename" });
  if (!title) return;
  conversation.title = title;
  await store.save(conversation);
  showTitle();
  await refreshList();
  tell(conversation.id);
}

async function remove() {
  const text = "It is deleted in this browser, and its answers at the gateway.";
  if (!(await askUser({ title: "Delete this conversation?", text, action: "Delete" }))) return;
  const { id } = conversation;
  const numLeft = await removed(id);
  location.replace("#playground");
  begin();
  await refreshList();
  sayLeft(numLeft);
  view.prompt.focus();
}

/** Delete a conversation with its stored responses. Return how many of these could not be deleted. */
async function removed(id) {
  readers.get(id)?.controller.abort();
  readers.delete(id);
  known.delete(id);
  const gone = await store.turnsOf(id);
  await store.remove(id);
  tell(id);
  return deleteAnswers(gone);
}

async function forgetAll() {
  const text = "All conversations of this tenant with this gateway are deleted in this browser, and their answers at " +
    "the gateway. The settings are reset.";
  if (!store || !(await askUser({ title: "Forget all conversations?", text, action: "Forget all" }))) return;
  const found = await all();
  const numLeft = await Promise.all(found.map(({ id }) => removed(id)));
  await store.clear();
  forgetSettings();
  ofTab.remove(DRAFT);
  location.replace("#playground");
  begin();
  await refreshList();
  sayLeft(numLeft.reduce((sum, one) => sum + one, 0));
}

function sayLeft(count) {
  if (!count) return;
  const answers = count === 1 ? "1 answer" : `${count} answers`;
  view["chat-note"].textContent = `The gateway did not delete ${answers}; it does so a day after their end.`;
}

async function exportAll() {
  if (store) await exportThese(await all());
}

async function exportThese(chosen) {
  const conversations = await Promise.all(chosen.map(async (one) => ({ ...one, turns: await store.turnsOf(one.id) })));
  const name = chosen.length === 1 ? "conversation" : "conversations";
  download(`penstock-${name}.json`, JSON.stringify({ object: "penstock.conversations", conversations }, null, 2));
}

function tell(id) {
  channel?.postMessage(id);
}

/** Take a change that another tab made to a conversation. */
async function takeNews(id) {
  await refreshList();
  if (id !== conversation.id || readers.has(id)) return;
  const found = (await all()).find((one) => one.id === id);
  if (!found) {
    begin();
    return;
  }
  if (found.isAnswering) await resume(found);
  await showStored(found);
}

function saveRunning() {
  for (const { turn } of readers.values()) store.saveTurn(turn).catch(() => {});
}

/** Show Stop or Send. A focused button that disappears passes the focus on; a field that has it keeps it. */
function showRunning() {
  const isRunning = readers.has(conversation.id);
  const [shown, hidden] = isRunning ? [view.stop, view.send] : [view.send, view.stop];
  const focused = document.activeElement;
  shown.hidden = false;
  if (isRunning && focused === hidden) shown.focus({ preventScroll: true });
  if (!isRunning && focused === hidden) view.prompt.focus({ preventScroll: true });
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
