// The list of conversations beside the playground.

import { byId, el } from "./dom.js";

/** Shows the conversations as links. `actions` has what its buttons do: {exportAll, forgetAll}. */
export class ConversationList {
  constructor({ exportAll, forgetAll }) {
    this.list = byId("conversation-list");
    byId("export-all").addEventListener("click", exportAll);
    byId("forget-all").addEventListener("click", forgetAll);
  }

  /** Show conversations, of which the one with the id `chosen` is open. */
  show(conversations, chosen) {
    this.list.replaceChildren(...conversations.map(({ id, title, isAnswering }) => {
      const link = el("a", { href: `#playground/${id}`, title }, title);
      if (isAnswering) link.append(el("span", { className: "badge" }, "answering"));
      return el("li", {}, link);
    }));
    byId("conversation-none").hidden = conversations.length > 0;
    byId("export-all").hidden = byId("forget-all").hidden = !conversations.length;
    this.mark(chosen);
  }

  /** Mark the conversation that is open. */
  mark(chosen) {
    for (const link of this.list.querySelectorAll("a")) {
      if (link.hash === `#playground/${chosen}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
}
