// The page's frame: its two views, the theme and the API key.

import { apiKey } from "./api.js";
import { loadModels, startChat } from "./chat.js";
import { startDashboard, stopDashboard } from "./dashboard.js";
import { byId } from "./dom.js";

const VIEWS = ["playground", "dashboard"];
const THEMES = ["auto", "light", "dark"];
const THEME = "penstock-theme";

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
  watchDashboard();
}

/** Read the feed only while its view is visible: the gateway computes nothing without viewers. */
function watchDashboard() {
  if (byId("dashboard").hidden || document.hidden) stopDashboard();
  else startDashboard();
}

function showTheme() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = `Theme: ${theme}`;
}

function nextTheme() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  localStorage.setItem(THEME, THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  showTheme();
}

function startKeyDialog() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => {
    byId("key-input").value = apiKey.get();
    dialog.returnValue = "cancel";
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "cancel") return;
    apiKey.set(dialog.returnValue === "clear" ? "" : byId("key-input").value.trim());
    byId("key-input").value = "";
    loadModels();
    stopDashboard();
    watchDashboard();
  });
}

showTheme();
byId("theme-button").addEventListener("click", nextTheme);
startKeyDialog();
startChat();
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", watchDashboard);
showView();
