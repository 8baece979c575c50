// The Markdown of a model as nodes. The parser's tokens become elements here, so no text is ever read as markup.

import markdownIt from "./markdown-it.js";
import Prism from "./prism.js";
import { appendAll, copyButton, el } from "./dom.js";

// Some of the expressions that find colors take quadratic time. Longer code, and longer lines, get none.
const MAX_COLORED = 20_000;
const MAX_COLORED_LINE = 500;
const LANGUAGES = { console: "bash", golang: "go", rs: "rust", jsonc: "json", "c++": "cpp", "c#": "csharp" };
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5" }; // h1 and h2 are those of the page and of the turn
const ALIGNMENTS = { "text-align:center": "center", "text-align:right": "right" };

const parser = markdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

/**
 * Shows a text that grows. Each `show` parses the text from the last block but one on. Nodes of blocks whose source is
 * the same stay, so that a reader may select them meanwhile.
 */
export class GrowingMarkdown {
  constructor(element) {
    this.element = element;
    this.blocks = []; // {source, node, isPlain} of each top-level block
    this.numStable = 0; // blocks that cannot change while the text grows
    this.stableChars = 0; // characters of the text before the first block that may
  }

  /** Show a text that begins with the text shown before, or any text if it is the last one (not `isGrowing`). */
  show(text, isGrowing = true) {
    const source = text.replace(/\r\n?/g, "\n");
    if (!isGrowing) this.numStable = this.stableChars = 0;
    const { blocks, isSelfContained } = blocksOf(source.slice(this.stableChars));
    const before = this.blocks.splice(this.numStable);
    blocks.forEach((block, i) => {
      const old = before[i];
      // The colors of code come once its block is complete.
      const isPlain = isGrowing && i === blocks.length - 1;
      if (old?.source === block.source && old.isPlain === isPlain && isSelfContained) return this.blocks.push(old);
      const node = nodeOf(block.tokens, isPlain);
      if (old) old.node.replaceWith(node);
      else this.element.append(node);
      return this.blocks.push({ source: block.source, node, isPlain });
    });
    for (const { node } of before.slice(blocks.length)) node.remove();
    // A later line may change the last block, and the block before it, such as a list that goes on after a blank line.
    const numStable = Math.max(0, blocks.length - 2);
    if (!isGrowing || !numStable) return;
    this.numStable += numStable;
    this.stableChars += blocks[numStable].start;
  }
}

/** Return the top-level blocks of a text, and whether none of them refers to a link that another one defines. */
function blocksOf(text) {
  const environment = {};
  const lineStarts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lineStarts.push(at + 1);
  const startOf = (line) => lineStarts[line] ?? text.length;
  const blocks = [];
  for (const token of parser.parse(text, environment)) {
    if (token.level === 0 && token.nesting >= 0) {
      const [first, end] = token.map;
      blocks.push({ start: startOf(first), source: text.slice(startOf(first), startOf(end)), tokens: [] });
    }
    blocks.at(-1).tokens.push(token);
  }
  return { blocks, isSelfContained: Object.keys(environment.references ?? {}).length === 0 };
}

/** Return the element of one block's tokens. */
function nodeOf(tokens, isPlain) {
  const open = [el("div")];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === 1) open.push(openedBy(token));
    else if (token.nesting === -1) close(open);
    else if (token.type === "inline") appendAll(parent, inlineNodes(token.children));
    else if (token.type === "hr") parent.append(el("hr"));
    else parent.append(codeBlock(token.content.replace(/\n$/, ""), isPlain ? "" : token.info.trim().split(/\s/)[0]));
  }
  return open[0].firstChild;
}

function openedBy(token) {
  const made = el(HEADINGS[token.tag] ?? (token.tag === "h4" || token.tag === "h5" ? "h6" : token.tag));
  if (token.tag === "ol" && token.attrGet("start")) made.start = Number(token.attrGet("start"));
  const alignment = ALIGNMENTS[token.attrGet("style")];
  if (alignment) made.className = alignment;
  made.isHidden = token.hidden; // the paragraphs of a list without blank lines
  return made;
}

function close(open) {
  const made = open.pop();
  if (made.isHidden) appendAll(open.at(-1), made.childNodes);
  else if (made.tagName === "TABLE") open.at(-1).append(el("div", { className: "wide", tabIndex: 0 }, made));
  else open.at(-1).append(made);
}

const MARKS = { strong_open: "strong", em_open: "em", s_open: "s" };

function inlineNodes(tokens) {
  const open = [el("span")];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === "link_open") open.push(linkTo(token.attrGet("href")));
    else if (token.nesting === 1) open.push(el(MARKS[token.type] ?? "span"));
    else if (token.nesting === -1) open.at(-2).append(open.pop());
    else if (token.type === "softbreak" || token.type === "hardbreak") parent.append(el("br"));
    else if (token.type === "code_inline") parent.append(el("code", {}, token.content));
    else if (token.type === "image") parent.append(imageLink(token));
    else parent.append(token.content);
  }
  return open[0].childNodes;
}

/** Return a link that tells its target nothing of this page. What is no address of the web is no link. */
function linkTo(address) {
  const isWeb = /^https?:$/.test(protocolOf(address));
  return isWeb ? el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }) : el("span");
}

function protocolOf(address) {
  try {
    return new URL(address).protocol;
  } catch {
    return "";
  }
}

/** The page loads no image of an answer: that would tell another host that it is read. */
function imageLink(token) {
  const made = linkTo(token.attrGet("src"));
  made.append(`[image: ${token.content || "without a description"}]`);
  return made;
}

/** Return a block of code, with colors if the language is known, and a button that copies it. */
export function codeBlock(text, language) {
  const name = LANGUAGES[language.toLowerCase()] ?? language.toLowerCase();
  // `Prism.languages` has functions too.
  const isKnown = Object.hasOwn(Prism.languages, name) && typeof Prism.languages[name] === "object";
  const isShort = text.length <= MAX_COLORED && !text.split("\n").some((line) => line.length > MAX_COLORED_LINE);
  const code = el("code", {},
    ...(isKnown && isShort ? Prism.tokenize(text, Prism.languages[name]).map(coloredNode) : [text]));
  return el("figure", { className: "code" },
    el("figcaption", {}, el("span", {}, language), copyButton("Copy", () => text)), el("pre", { tabIndex: 0 }, code));
}

function coloredNode(token) {
  if (typeof token === "string") return token;
  const parts = Array.isArray(token.content) ? token.content : [token.content];
  return el("span", { className: `code-${token.type}` }, ...parts.map(coloredNode));
}
