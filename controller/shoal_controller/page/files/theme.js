// The colours of the page's style for those who draw on canvases, looked up once: asking the browser for each line would
// make it work out the whole page's style each time. Called by the pictures and charts.

const dark = matchMedia("(prefers-color-scheme: dark)");
const inks = new Map();

dark.addEventListener("change", () => inks.clear());

/** A colour by its name in page.css. */
export function ink(name) {
  if (!inks.has(name)) inks.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return inks.get(name);
}

export const isDark = () => dark.matches;

/** Call `redraw` whenever the page becomes light or dark, until `signal`. */
export function onTheme(redraw, signal) {
  dark.addEventListener("change", redraw, { signal });
}
