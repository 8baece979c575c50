// Small helpers around the DOM. Text always becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Make an element. `props` are properties, `children` are nodes or text. */
export function el(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}

/** Append nodes one by one: a call takes only so many arguments, and a paragraph may have a hundred thousand nodes. */
export function appendAll(parent, nodes) {
  for (const node of [...nodes]) parent.append(node);
}

/** Make an SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Make a button that calls `onclick`. */
export function button(text, onclick, className = "quiet") {
  return el("button", { type: "button", className, onclick }, text);
}

/** Format a number for people: 12,345 or 0.42. */
export function number(value, digits = 0) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** Format milliseconds: 42 ms, 1.3 s, 5 min, 7 h or 3 d. */
export function duration(ms) {
  if (ms < 10) return `${number(ms, 1)} ms`;
  if (ms < 999.5) return `${number(ms)} ms`;
  if (ms < 100_000) return `${number(ms / 1000, ms < 10_000 ? 1 : 0)} s`;
  if (ms < 6_000_000) return `${number(ms / 60_000)} min`;
  return ms < 172_800_000 ? `${number(ms / 3_600_000)} h` : `${number(ms / 86_400_000)} d`;
}

/** Make a button that copies a text, and says so. */
export function copyButton(label, text) {
  const made = button(label, async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Copying failed";
    setTimeout(() => (made.textContent = label), 1_500);
  });
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard's interface is missing on pages without TLS.
    const field = el("textarea", { className: "unseen", value: text });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}

/** Offer a text as a file. */
export function download(name, text, type = "application/json") {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}
