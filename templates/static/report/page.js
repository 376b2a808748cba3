"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const cells = [...document.querySelectorAll("details.cell")];
  const root = document.documentElement;

  // Colours: what was chosen last is kept where the browser lets a page keep something.
  const theme = find("theme");
  const kept = { get: () => "", set: () => {} };
  try {
    const store = window.localStorage;
    kept.get = () => store.getItem("fusegen-theme") || "";
    kept.set = (value) => store.setItem("fusegen-theme", value);
  } catch (error) { /* a page that may keep nothing follows the system */ }
  const paint = (value) => {
    if (value) root.dataset.theme = value;
    else delete root.dataset.theme;
  };
  theme.value = ["light", "dark"].includes(kept.get()) ? kept.get() : "";
  paint(theme.value);
  theme.addEventListener("change", () => { paint(theme.value); kept.set(theme.value); });
  theme.parentElement.hidden = false;

  // The filter: a module is shown if it has every word.
  const box = find("filter"), shown = find("shown");
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const cell of cells) {
      cell.hidden = !words.every((word) => cell.dataset.words.includes(word));
      count += cell.hidden ? 0 : 1;
    }
    for (const bundle of document.querySelectorAll("section.bundle"))
      bundle.hidden = !bundle.querySelector("details.cell:not([hidden])");
    shown.value = (words.length ? count + " of " : "") + cells.length + " modules";
  };
  box.addEventListener("input", filter);
  box.form.addEventListener("submit", (event) => event.preventDefault());
  find("open").addEventListener("click", () => { for (const cell of cells) if (!cell.hidden) cell.open = true; });
  find("close").addEventListener("click", () => { for (const cell of cells) cell.open = false; });
  box.form.hidden = false;
  filter();

  // What a link leads to is opened, and shown whatever the filter says.
  const follow = () => {
    const target = find(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") at.open = true;
      if (at.hidden) { box.value = ""; filter(); }
    }
    target.scrollIntoView();
    const focus = target.querySelector("summary, a") || target;
    if (target.tagName === "DETAILS") focus.focus({ preventScroll: true });
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
