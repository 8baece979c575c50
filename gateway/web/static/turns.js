// What the conversation looks like: one element for each message of the user and each answer.

import { button, duration, el, number } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";

const RENDER_MS = 60;
const MAX_RENDER_MS = 1_000;
const PAUSE_FACTOR = 5; // how many times the duration of a rendering the page pauses after it

/** A message of the user, with a button that edits it. */
export class UserTurn {
  constructor(text, onEdit) {
    this.message = { role: "user", content: text };
    const edit = button("Edit", () => onEdit(this));
    this.element = el("article", { className: "turn user" }, el("h2", { className: "unseen" }, "You"),
      el("div", { className: "said" }, text), el("footer", {}, edit));
  }
}

/** An answer. Its text, its status and its speed change while it streams. */
export class AnswerTurn {
  constructor(model, onRetry) {
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.startedAt = performance.now();
    this.firstAt = 0;
    this.lastAt = 0;
    this.numTokens = 0;
    this.pauseMs = RENDER_MS;
    this.finishReason = "";
    this.text = el("div", { className: "said", ariaBusy: "true" });
    this.shown = new GrowingMarkdown(this.text);
    this.thoughts = document.createTextNode("");
    this.thinking = el("details", { hidden: true, className: "thinking", ariaBusy: "true" },
      el("summary", {}, "Reasoning"), el("p", {}, this.thoughts));
    this.status = el("p", { className: "status" }, "Waiting for the first token…");
    this.status.setAttribute("role", "status");
    this.figures = el("span", { className: "figures" });
    this.retry = button("Retry", () => onRetry(this));
    this.retry.hidden = true;
    this.element = el("article", { className: "turn answer" },
      el("h2", { className: "who" }, model), this.thinking, this.text, this.status,
      el("footer", {}, this.figures, this.retry));
  }

  /** Show where the request waits, or that the connection was lost. */
  say(text, kind = "") {
    this.status.textContent = text;
    this.status.className = `status ${kind}`;
  }

  /** Take one event of the stream. */
  take(event, numTokens) {
    if (event.queue_progress || event.prompt_progress) return this.say(waitingWords(event));
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    if (text || reasoning) {
      this.lastAt = performance.now();
      this.firstAt ||= this.lastAt;
      this.say("");
    }
    this.message.content += text;
    this.reasoning += reasoning;
    this.numTokens = event.usage?.completion_tokens ?? numTokens ?? this.numTokens;
    this.usage = event.usage ?? this.usage;
    this.render();
    return undefined;
  }

  /** Render soon, so that many small events cost one rendering. A very long text is rendered less often. */
  render() {
    this.timer ??= setTimeout(() => this.renderNow(), this.pauseMs);
  }

  renderNow() {
    const startedAt = performance.now();
    clearTimeout(this.timer);
    this.timer = undefined;
    this.shown.show(this.message.content);
    this.thinking.hidden = !this.reasoning;
    this.thoughts.appendData(this.reasoning.slice(this.thoughts.length));
    this.figures.textContent = this.figureWords();
    this.element.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
    this.text.getBoundingClientRect(); // ends the layout, so that its time counts
    const pauseMs = PAUSE_FACTOR * (performance.now() - startedAt);
    this.pauseMs = Math.min(MAX_RENDER_MS, Math.max(RENDER_MS, pauseMs));
  }

  figureWords() {
    if (!this.firstAt) return "";
    const words = [`TTFT ${duration(this.firstAt - this.startedAt)}`];
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (this.numTokens > 1 && seconds > 0) words.push(`${number((this.numTokens - 1) / seconds, 1)} tokens/s`);
    if (this.numTokens) words.push(`${number(this.numTokens)} tokens`);
    if (this.usage) words.push(`${number(this.usage.prompt_tokens)} in the prompt`);
    if (this.finishReason === "length") words.push("cut at the token limit");
    return words.join(" · ");
  }

  /** Note the end of the answer. */
  end(words = "", kind = "") {
    this.say(words, kind);
    this.renderNow();
    this.retry.hidden = false;
    this.text.ariaBusy = this.thinking.ariaBusy = "false";
  }
}

function waitingWords({ queue_progress: queue, prompt_progress: prompt }) {
  if (prompt) return `Reading the prompt: ${number(prompt.processed)} of ${number(prompt.total)} tokens`;
  if (!queue.position) return "A node has the request";
  const wait = queue.estimated_wait_ms == null ? "" : `, about ${duration(queue.estimated_wait_ms)}`;
  return `Waiting in the queue: position ${queue.position}${wait}`;
}
