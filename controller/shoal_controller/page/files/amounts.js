// Numbers with their units, and times in the reader's zone with UTC on hover. Pure but for the reader's language.

import { element, setText } from "./elements.js";

const NOTHING = "–";
const WHOLE = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 12345 → "12,345". */
export const count = (value) => (known(value) ? WHOLE.format(value) : NOTHING);

/** "1 worker", "2 workers". */
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** Four digits that count. */
export function figure(value, digits = 4) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
}

export const percent = (share) => (known(share) ? `${(100 * share).toFixed(share >= 0.9995 || share < 0.0005 ? 0 : 1)} %` : NOTHING);

export function bytes(size) {
  if (!known(size)) return NOTHING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  let rest = size;
  while (rest >= 999.5 && power < units.length - 1) {
    rest /= 1000;
    power += 1;
  }
  return `${power ? rest.toFixed(rest < 10 ? 2 : rest < 100 ? 1 : 0) : rest} ${units[power]}`;
}

/** 0.058 → "58 ms", 75 → "1 min 15 s", 7300 → "2 h 2 min". */
export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  if (seconds < 0.9995) return `${seconds < 0.01 ? Number((seconds * 1000).toPrecision(2)) : Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Ages need no digits behind the point. */
export function age(seconds) {
  if (seconds < 1) return "now";
  return seconds < 60 ? `${Math.floor(seconds)} s ago` : `${duration(Math.floor(seconds))} ago`;
}

const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** Hour, minute and second in the reader's zone; with the day where it is another one. */
export function clock(time) {
  const moment = new Date(time * 1000);
  const today = new Date().toDateString() === moment.toDateString();
  return today ? CLOCK.format(moment) : `${DAY.format(moment)} ${CLOCK.format(moment)}`;
}

/** What stands there on hover. */
export const utc = (time) => `${new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19)} UTC`;

/** A moment: seconds since the epoch. */
export function moment(time, text = clock(time)) {
  if (!known(time)) return element("span", {}, NOTHING);
  return element("time", { datetime: new Date(time * 1000).toISOString(), title: utc(time) }, text);
}

/** How long ago, kept right by `refreshAges`. */
export function since(time) {
  if (!known(time)) return element("span", {}, NOTHING);
  const made = moment(time, age(now() - time));
  made.dataset.since = String(time);
  return made;
}

let ahead = 0; // seconds by which the controller's clock is ahead of the browser's

/** Seconds since the epoch by the controller's clock. */
export const now = () => Date.now() / 1000 + ahead;

/** What an answer's `Shoal-Clock` says, or its `Date`, which has whole seconds; only a difference that matters is believed. */
export function noteClock(exact, date) {
  const difference = (exact === null ? Date.parse(date) / 1000 + 0.5 : Number(exact)) - Date.now() / 1000;
  if (Number.isFinite(difference)) ahead = Math.abs(difference) > 2 ? difference : 0;
}

export function refreshAges() {
  for (const one of document.querySelectorAll("time[data-since]")) setText(one, age(now() - Number(one.dataset.since)));
}
