// The page's frame: its views, the theme and the API key.

import { apiKey } from "./api.js";
import { startBatches, startUploads, stopBatches } from "./batches.js";
import { startChat, startTenant } from "./chat.js";
import { startDashboard, stopDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { startJobs, stopJobs } from "./jobs.js";
import { lasting } from "./storage.js";
import { startWebhooks, stopWebhooks } from "./webhooks.js";

const VIEWS = ["playground", "batches", "jobs", "dashboard"];
const THEMES = ["auto", "light", "dark"];
const THEME = "penstock-theme";
const NO_KEY = "This is no API key: it has a character that no key has, such as “…”, a space or an invisible one.";

function showView() {
  const [hash] = location.hash.slice(1).split("/");
  const chosen = VIEWS.includes(hash) ? hash : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== chosen;
    const link = byId(`${name}-link`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `penstock ${chosen}`;
  byId("view-name").textContent = byId(`${chosen}-link`).textContent;
  watchViews();
}

/** Read what a view shows only while it is visible: the gateway computes nothing without viewers. */
function watchViews() {
  watch("dashboard", [startDashboard], [stopDashboard]);
  watch("batches", [startBatches, startWebhooks], [stopBatches, stopWebhooks]);
  watch("jobs", [startJobs], [stopJobs]);
}

function watch(name, starts, stops) {
  for (const change of byId(name).hidden || document.hidden ? stops : starts) change();
}

function chosenTheme() {
  const theme = lasting.get(THEME);
  return THEMES.includes(theme) ? theme : THEMES[0];
}

function showTheme() {
  const theme = chosenTheme();
  document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = `Theme: ${theme}`;
}

function nextTheme() {
  lasting.set(THEME, THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length]);
  showTheme();
}

function startKeyDialog() {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  const check = () => input.setCustomValidity(apiKey.isSendable(input.value.trim()) ? "" : NO_KEY);
  let openedMs = 0; // when the dialog was last opened
  const open = (reason) => {
    if (document.querySelector("dialog[open]")) return;
    byId("key-reason").textContent = reason;
    input.value = apiKey.get();
    check();
    dialog.returnValue = "cancel";
    dialog.showModal();
    openedMs = performance.now();
  };
  let declined; // the key with which the user closed the dialog that the page had opened
  let actedMs = 0; // when the user last did something outside the dialog
  let againMs = 0; // when the user, having declined, did something that may ask again
  const askAgain = () => {
    if (declined === undefined) return;
    declined = undefined;
    againMs = actedMs;
  };
  input.addEventListener("input", check);
  byId("key-button").addEventListener("click", () => open(""));
  // Views that look again every few seconds must not ask again and again. What the user does asks again.
  for (const name of ["hashchange", "submit"]) {
    addEventListener(name, ({ target }) => {
      if (target === byId("key-form")) return;
      actedMs = performance.now();
      askAgain();
    }, true);
  }
  addEventListener("keyneeded", ({ detail: { reason, sentMs } }) => {
    // A view's request that was on its way when the user went on is not what the user did.
    if (declined !== apiKey.get() && sentMs >= againMs) open(reason);
  });
  dialog.addEventListener("close", () => {
    declined = apiKey.get();
    if (actedMs > openedMs) askAgain(); // A busy browser reports the end of the dialog after what the user did next.
    if (dialog.returnValue === "cancel") return;
    apiKey.set(dialog.returnValue === "clear" ? "" : input.value.trim());
    declined = undefined;
    input.value = "";
    startTenant();
    for (const stop of [stopDashboard, stopBatches, stopWebhooks, stopJobs]) stop();
    watchViews();
  });
}

/** The buttons that show what a narrow window hides. */
function startDrawers() {
  for (const opener of document.querySelectorAll("[data-drawer]")) {
    const drawer = byId(opener.dataset.drawer);
    const show = (isOpen) => {
      drawer.classList.toggle("open", isOpen);
      opener.setAttribute("aria-expanded", String(isOpen));
    };
    opener.addEventListener("click", () => show(!drawer.classList.contains("open")));
    addEventListener("hashchange", () => show(false));
    document.addEventListener("keydown", (event) => {
      // Of a dialog that the drawer opened, the key closes the dialog alone.
      if (event.key !== "Escape" || !drawer.classList.contains("open") || document.querySelector("dialog[open]")) return;
      show(false);
      opener.focus();
    });
    document.addEventListener("click", ({ target }) => {
      if (!drawer.contains(target) && !opener.contains(target) && !target.closest("dialog")) show(false);
    });
  }
}

showTheme();
byId("theme-button").addEventListener("click", nextTheme);
startKeyDialog();
startDrawers();
startChat();
startUploads();
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", watchViews);
showView();
// Not on a phone, where a keyboard would cover the page.
if (!byId("playground").hidden && matchMedia("(pointer: fine)").matches) byId("prompt").focus();
