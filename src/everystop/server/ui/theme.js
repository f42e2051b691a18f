// The choice between light, dark and what the system says; kept in this browser.

import { themeChanged } from "./surface.js";

const KEY = "everystop-theme";
const CHOICES = ["auto", "light", "dark"];

/** @param {string} choice */
function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  themeChanged();
}

/** Let a select element choose the theme. @param {HTMLSelectElement} select */
export function chooseTheme(select) {
  const stored = localStorage.getItem(KEY) ?? "auto";
  select.value = CHOICES.includes(stored) ? stored : "auto";
  apply(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem(KEY, select.value);
    apply(select.value);
  });
}
