// What the conversation looks like: one element for each message of the user, each answer, and each result of a call.

import { canGoOn, numTokens } from "./answer.js";
import { button, copyButton, duration, el, number } from "./dom.js";
import { GrowingMarkdown, codeBlock } from "./markdown.js";
import { curlOf, pythonOf } from "./snippets.js";

const RENDER_MS = 60;
const MAX_RENDER_MS = 1_000;
const PAUSE_FACTOR = 5; // how many times the duration of a rendering the page pauses after it

/** Make the view of a turn. `actions` has what its buttons do: {edit, retry, goOn, sendResults, inputBefore}. */
export function viewOf(turn, actions) {
  if (turn.role === "assistant") return new AnswerView(turn, actions);
  return turn.role === "tool" ? new ToolView(turn) : new UserView(turn, actions);
}

/** A message of the user, with a button that edits it. */
class UserView {
  constructor(turn, { edit }) {
    this.element = el("article", { className: "turn user" }, el("h2", { className: "unseen" }, "You"),
      el("div", { className: "said" }, turn.content),
      el("footer", {}, button("Edit", () => edit(turn)), copyButton("Copy", () => turn.content)));
  }
}

/** The result of a call, as the user gave it. */
class ToolView {
  constructor(turn) {
    this.element = el("article", { className: "turn tool" }, el("h2", { className: "who" }, `Result of ${turn.name}`),
      el("div", { className: "said" }, codeBlock(turn.content, "")));
  }
}

/** An answer. Its text, its status and its speed change while it streams. */
class AnswerView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.pauseMs = RENDER_MS;
    this.text = el("div", { className: "said" });
    this.shown = new GrowingMarkdown(this.text);
    this.thoughts = document.createTextNode("");
    this.thinking = el("details", { hidden: true, className: "thinking" },
      el("summary", {}, "Reasoning"), el("p", {}, this.thoughts));
    this.calls = el("div", { className: "calls" });
    this.status = el("p", { className: "status" });
    this.status.setAttribute("role", "status");
    this.figures = el("span", { className: "figures" });
    const input = () => actions.inputBefore(turn);
    this.goOn = button("Continue", () => actions.goOn(turn));
    this.buttons = el("span", { className: "actions", hidden: true }, this.goOn,
      copyButton("Copy", () => turn.content), button("Regenerate", () => actions.retry(turn)),
      copyButton("Copy as curl", () => curlOf(turn, input())),
      copyButton("Copy as Python", () => pythonOf(turn, input())));
    this.who = el("h2", { className: "who" });
    this.element = el("article", { className: "turn answer" }, this.who, this.thinking, this.text, this.calls, this.status,
      el("footer", {}, this.figures, this.buttons));
    if (turn.state === "running") this.say(turn.firstMs ? "" : "Waiting for the first token…");
    else this.say(turn.note, turn.state);
    this.renderNow();
  }

  /** Show where the request waits, that the connection was lost, or how the answer ended. */
  say(text, kind = "") {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.className = `status ${kind}`;
  }

  /** Render soon, so that many small events cost one rendering. A very long text is rendered less often. */
  render() {
    this.timer ??= setTimeout(() => this.renderNow(), this.pauseMs);
  }

  renderNow() {
    const startedAt = performance.now();
    const isRunning = this.turn.state === "running";
    clearTimeout(this.timer);
    this.timer = undefined;
    const { content, reasoning } = this.turn;
    // The text of a JSON schema is shown as what it is.
    const isJson = this.turn.request.text !== undefined && content !== "";
    this.shown.show(isJson ? `\`\`\`json\n${content}\n\`\`\`` : content, isRunning);
    this.thinking.hidden = !reasoning;
    this.thoughts.appendData(reasoning.slice(this.thoughts.length));
    this.figures.textContent = figureWords(this.turn);
    this.text.ariaBusy = this.thinking.ariaBusy = String(isRunning);
    this.who.textContent = this.turn.model;
    this.buttons.hidden = isRunning;
    this.goOn.hidden = !canGoOn(this.turn) || !this.actions.isLast(this.turn);
    if (!isRunning) this.showCalls();
    this.element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
    this.text.getBoundingClientRect(); // ends the layout, so that its time counts
    const pauseMs = PAUSE_FACTOR * (performance.now() - startedAt);
    this.pauseMs = Math.min(MAX_RENDER_MS, Math.max(RENDER_MS, pauseMs));
  }

  /** Show the calls, each with a field for its result if the conversation ends with them. */
  showCalls() {
    const { turn, actions } = this;
    if (!turn.calls.length) return;
    const isLast = actions.isLast(turn);
    const fields = turn.calls.map((call) => {
      const label = `Result of ${call.name}`;
      const field = el("textarea", { rows: 2 });
      return { call, field, element: el("section", { className: "call" },
        el("h3", {}, `Calls ${call.name}`), codeBlock(prettyJson(call.arguments), "json"),
        ...(isLast ? [el("label", {}, label, field)] : [])) };
    });
    this.calls.replaceChildren(...fields.map(({ element }) => element));
    if (!isLast) return;
    const send = button("Send the results", () => {
      actions.sendResults(turn, fields.map(({ call, field }) => ({ call, content: field.value })));
    }, "primary");
    this.calls.append(el("div", { className: "row" }, send));
  }
}

function figureWords(turn) {
  const { startedMs, firstMs, lastMs, isResumed, usage, isCut, content } = turn;
  const words = [];
  if (firstMs) words.push(`TTFT ${duration(firstMs - startedMs)}`);
  const count = usage?.output_tokens ?? 0;
  // The time of an answer that was read on after a reload tells nothing about its speed.
  if (count > 1 && lastMs > firstMs && !isResumed) {
    words.push(`${number((1000 * (count - 1)) / (lastMs - firstMs), 1)} tokens/s`);
  }
  if (count) words.push(`${number(numTokens(turn))} tokens`, `${number(usage.input_tokens)} in the prompt`);
  if (isCut) words.push(`cut at the token limit${content ? "" : ", before its answer began"}`);
  return words.join(" · ");
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut short
  }
}
