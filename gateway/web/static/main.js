// The page's frame: its two views, the theme and the API key.

import { apiKey } from "./api.js";
import { startBatches, startUploads, stopBatches } from "./batches.js";
import { loadModels, startChat } from "./chat.js";
import { startDashboard, stopDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { lasting } from "./storage.js";
import { startWebhooks, stopWebhooks } from "./webhooks.js";

const VIEWS = ["playground", "batches", "dashboard"];
const THEMES = ["auto", "light", "dark"];
const THEME = "penstock-theme";
const NO_KEY = "This is no API key: it has a character that no key has, such as “…”, a space or an invisible one.";

function showView() {
  const hash = location.hash.slice(1);
  const chosen = VIEWS.includes(hash) ? hash : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== chosen;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `penstock ${chosen}`;
  watchViews();
}

/** Read what a view shows only while it is visible: the gateway computes nothing without viewers. */
function watchViews() {
  if (byId("dashboard").hidden || document.hidden) stopDashboard();
  else startDashboard();
  if (byId("batches").hidden || document.hidden) {
    stopBatches();
    stopWebhooks();
  } else {
    startBatches();
    startWebhooks();
  }
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
  input.addEventListener("input", check);
  byId("key-button").addEventListener("click", () => {
    input.value = apiKey.get();
    check();
    dialog.returnValue = "cancel";
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "cancel") return;
    apiKey.set(dialog.returnValue === "clear" ? "" : input.value.trim());
    input.value = "";
    loadModels();
    stopDashboard();
    stopBatches();
    stopWebhooks();
    watchViews();
  });
}

showTheme();
byId("theme-button").addEventListener("click", nextTheme);
startKeyDialog();
startChat();
startUploads();
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", watchViews);
showView();
// Not on a phone, where a keyboard would cover the page.
if (!byId("playground").hidden && matchMedia("(pointer: fine)").matches) byId("prompt").focus();
