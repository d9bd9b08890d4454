// Makes elements. Whatever comes from a job (names, messages, log lines) goes in as text, never as markup: nothing here
// or elsewhere in the page parses HTML, and marks that turn the direction of text are shown as what they are.
// Called by every view; knows nothing of jobs.

const SVG = "http://www.w3.org/2000/svg";
const LONGEST_SHOWN = 300; // characters of a text before it is folded

/** An element with attributes, listeners (`onclick`) and children; a child that is null or false is left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for pictures. */
export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Control characters and marks of direction as `⟨U+202E⟩`: they could make a text read as another one. */
export function visible(text) {
  return String(text).replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (one) => `⟨U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

/** A name that somebody else has given, isolated from the text around it. */
export function foreign(text, attributes = {}) {
  return element("bdi", attributes, visible(text));
}

/** A text of any length that somebody else has written: beyond a limit it is folded. */
export function foreignText(text) {
  const shown = visible(text);
  if (shown.length <= LONGEST_SHOWN) return element("bdi", { class: "foreign" }, shown);
  const rest = shown.length - LONGEST_SHOWN;
  return element(
    "span",
    {},
    element("bdi", { class: "foreign" }, `${shown.slice(0, LONGEST_SHOWN)}…`),
    element(
      "details",
      { class: "folded" },
      element("summary", {}, `${rest.toLocaleString()} more characters`),
      element("bdi", { class: "foreign" }, shown.slice(LONGEST_SHOWN)),
    ),
  );
}

/** A table over `body`. A narrow window hides its head, and each cell shows the title of its column: see `row`. */
export function table(caption, titles, body, attributes = {}) {
  const head = element("tr", {}, titles.map((title) => element("th", { scope: "col" }, title)));
  return element("table", attributes, element("caption", { class: "unseen" }, caption), element("thead", {}, head), body);
}

/** A row of a table with these titles; its first cell is its heading. */
export function row(titles, attributes, ...cells) {
  cells.forEach((cell, column) => (cell.dataset.title = titles[column]));
  return element("tr", attributes, ...cells);
}

/** Put `text` there if it is not there already: an unchanged element costs nothing, and keeps a selection. */
export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/**
 * Make the children of `place` show `items` in order, one element for each key: those that stay are updated, not made
 * again, so that focus and scroll stay where they are.
 */
export function keyed(place, items, keyOf, make, update = () => {}) {
  const before = place.keyedChildren ?? new Map();
  const now = new Map();
  let at = place.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    const child = before.get(key) ?? make(item);
    update(child, item);
    now.set(key, child);
    if (child === at) at = at.nextSibling;
    else place.insertBefore(child, at);
  }
  for (const [key, child] of before) if (!now.has(key)) child.remove();
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
  place.keyedChildren = now;
}

/** A function that calls `act` at most once in so many milliseconds, the last time with the last call's arguments. */
export function atMostEvery(milliseconds, act) {
  let timer = null;
  let last = -Infinity;
  let given = [];
  const run = () => {
    timer = null;
    last = performance.now();
    act(...given);
  };
  return (...args) => {
    given = args;
    if (timer === null) timer = setTimeout(run, Math.max(0, last + milliseconds - performance.now()));
  };
}
