// The text of a model as nodes: code blocks, inline code, bold text and paragraphs. Nothing else of Markdown.

import { el } from "./dom.js";

const FENCE = /^\s*```/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/**
 * Shows a text that grows. How a line looks depends on earlier lines only. So the nodes of finished lines stay, and each
 * `show` replaces those of the last line alone.
 */
export class GrowingMarkdown {
  constructor(element) {
    this.element = element;
    this.numFinished = 0; // characters of the finished lines
    this.isCode = false;
    this.block = undefined; // the open paragraph, or the text node of the open code block
    this.numLines = 0; // finished lines of that block
    this.removeLast = () => {};
  }

  /** Show a text that begins with the text shown before. A code block that is still open ends with it. */
  show(text) {
    this.removeLast();
    const end = text.lastIndexOf("\n") + 1;
    if (end > this.numFinished) {
      for (const line of text.slice(this.numFinished, end - 1).split("\n")) this.finish(line);
      this.numFinished = end;
    }
    const last = text.slice(end);
    this.removeLast = last.trim() && !FENCE.test(last) ? this.put(last) : () => {};
  }

  finish(line) {
    const isFence = FENCE.test(line);
    if (isFence) {
      this.isCode = !this.isCode;
      this.block = this.isCode ? document.createTextNode("") : undefined;
      if (this.isCode) this.element.append(el("pre", { tabIndex: 0 }, el("code", {}, this.block)));
    } else if (this.isCode || line.trim()) {
      this.put(line);
    } else {
      this.block = undefined;
    }
    this.numLines = isFence || !this.block ? 0 : this.numLines + 1;
  }

  /** Add a line to the open block. Return a function that removes it. */
  put(line) {
    const glue = this.numLines ? "\n" : "";
    return this.isCode ? this.putCode(glue + line) : this.putWords(glue, line);
  }

  putCode(text) {
    const { block } = this;
    const { length } = block;
    block.appendData(text);
    return () => block.deleteData(length, block.length);
  }

  putWords(glue, line) {
    if (!this.block) this.element.append((this.block = el("p")));
    const { block } = this;
    const numNodes = block.childNodes.length;
    block.append(glue, ...inlineNodes(line));
    return () => {
      while (block.childNodes.length > numNodes) block.lastChild.remove();
      if (numNodes) return;
      block.remove();
      this.block = undefined;
    };
  }
}

function inlineNodes(line) {
  return line.split(INLINE).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return el("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**")) return el("strong", {}, part.slice(2, -2));
    return part;
  });
}
