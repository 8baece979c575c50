// A dialog with a question: yes or no, or a line of text.

import { byId } from "./dom.js";

/** Ask. Returns the text (true without a field) if the user agrees, and undefined otherwise. */
export function ask({ title, text = "", value, action }) {
  const dialog = byId("ask-dialog");
  const input = byId("ask-input");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-ok").textContent = action;
  byId("ask-field").hidden = value === undefined;
  input.value = value ?? "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "ok") resolve(undefined);
      else resolve(value === undefined ? true : input.value.trim());
    }, { once: true });
  });
}
