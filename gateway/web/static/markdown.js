// The text of a model as nodes: code blocks, inline code, bold text and paragraphs. Nothing else of Markdown.

import { el } from "./dom.js";

const FENCE = /^\s*```/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Return nodes for a text. A code block that is still open ends with the text. */
export function nodesOf(text) {
  const nodes = [];
  let lines = [];
  let isCode = false;
  const flush = () => {
    const block = lines.join("\n");
    if (isCode) nodes.push(el("pre", { tabIndex: 0 }, el("code", {}, block)));
    else nodes.push(...block.split(/\n{2,}/).filter((part) => part.trim()).map(paragraph));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (FENCE.test(line)) {
      flush();
      isCode = !isCode;
    } else {
      lines.push(line);
    }
  }
  if (lines.length) flush();
  return nodes;
}

function paragraph(text) {
  const parts = text.split(INLINE).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return el("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**")) return el("strong", {}, part.slice(2, -2));
    return part;
  });
  return el("p", {}, ...parts);
}
