// Small pictures of an hour, as wide as a word: one of numbers, one of the world. Their values are in their labels.
// Called by the list of jobs.

import { figure, plural } from "./amounts.js";
import { drawing } from "./elements.js";

const WIDTH = 120;
const HEIGHT = 28;

const isKnown = (value) => value !== null && Number.isFinite(value);

function framed(label, ...children) {
  return drawing(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "sparkline", role: "img", "aria-label": label, preserveAspectRatio: "none" },
    ...children,
  );
}

const across = (values) => (index) => (values.length > 1 ? (index * WIDTH) / (values.length - 1) : WIDTH / 2);

const FEWEST = 8; // points of a picture, so that a young job's is not a block

/** From the first known value on: a young job's picture has the whole width. */
function young(values, others = values) {
  const first = values.findIndex((value, index) => isKnown(value) || isKnown(others[index]));
  return Math.max(0, Math.min(first, values.length - FEWEST));
}

/** From when to when something is known, gaps among it. */
function spanOf(values, seconds) {
  const minutes = (points) => Math.round((points * seconds) / 60);
  const first = values.findIndex(isKnown);
  const last = values.findLastIndex(isKnown);
  const whole = minutes(values.length - first);
  const ago = minutes(values.length - 1 - last);
  if (ago > 1) return `${plural(Math.max(1, minutes(last + 1 - first)), "minute")} until ${plural(ago, "minute")} ago`; // the present minute may be new
  return whole >= 59 ? "the last hour" : `the last ${plural(Math.max(1, whole), "minute")}`;
}

/** A curve with gaps where nothing is known. `hour`: as REST has it. */
export function curve(hour, name) {
  const values = hour[name].slice(young(hour[name]));
  const known = values.filter(isKnown);
  if (!known.length) return framed(`${name}: not known yet`);
  const least = Math.min(...known);
  const most = Math.max(...known);
  const x = across(values);
  const y = (value) => HEIGHT - 3 - ((HEIGHT - 6) * (value - least)) / (most - least || 1);
  const label = `${name} over ${spanOf(values, hour.every_seconds)}: from ${figure(known[0])} to ${figure(known.at(-1))}`;
  const last = values.findLastIndex(isKnown);
  return framed(
    label,
    drawing("path", { d: path(values, x, y), class: "line", fill: "none" }),
    drawing("path", { d: `M${x(last).toFixed(1)} ${y(values[last]).toFixed(1)}h.01`, class: "end" }),
  );
}

function path(values, x, y) {
  let isDown = false;
  let made = "";
  values.forEach((value, index) => {
    if (isKnown(value)) made += `${isDown ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = isKnown(value);
  });
  return made;
}

/** How many workers trained, under a line of how many were wanted. */
export function world(hour) {
  const from = young(hour.active, hour.wanted);
  const [active, wanted] = [hour.active.slice(from), hour.wanted.slice(from)];
  const most = Math.max(1, ...active.filter(isKnown), ...wanted.filter(isKnown));
  const x = across(active);
  const y = (value) => HEIGHT - 1 - ((HEIGHT - 4) * value) / most;
  const known = active.filter(isKnown);
  if (!known.length) return framed("world: not known yet");
  const least = Math.min(...known);
  const label = `workers over ${spanOf(active, hour.every_seconds)}: ${least} to ${plural(Math.max(...known), "worker")}`;
  return framed(
    label,
    drawing("path", { d: steps(active, x, y), class: "area" }),
    drawing("path", { d: outline(wanted, x, y), class: "wanted", fill: "none" }),
  );
}

function steps(values, x, y) {
  const width = values.length > 1 ? x(1) : WIDTH;
  return values
    .map((value, index) => (isKnown(value) && value > 0 ? `M${(x(index) - width / 2).toFixed(1)} ${HEIGHT}V${y(value).toFixed(1)}h${(width + 0.2).toFixed(1)}V${HEIGHT}z` : ""))
    .join("");
}

function outline(values, x, y) {
  let made = "";
  let before = null;
  values.forEach((value, index) => {
    if (isKnown(value)) made += before === null ? `M${x(index).toFixed(1)} ${y(value).toFixed(1)}` : `H${x(index).toFixed(1)}V${y(value).toFixed(1)}`;
    before = isKnown(value) ? value : null;
  });
  return made;
}
