// How a phase, a state and a reason look: a shape and a word each, so that colour never says anything alone.
// Called by all views. Pure.

import { drawing, element, visible } from "./elements.js";

const SHAPES = {
  play: "M5 3l8 5-8 5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  stop: "M4 4h8v8H4z",
  check: "M3 8.5l3.5 3.5L13 4.5",
  cross: "M4 4l8 8M12 4l-8 8",
  warning: "M8 2l6.5 12h-13zM8 6.5v3.5M8 12v.5",
  wait: "M4 2h8M4 14h8M5 2v3l3 3 3-3V2M5 14v-3l3-3 3 3v3",
  turn: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  up: "M8 13V3M4 7l4-4 4 4",
  down: "M8 3v10M4 9l4 4 4-4",
  plus: "M8 3v10M3 8h10",
  balance: "M2 6h12M5 6l-2 5h4zM11 6l-2 5h4zM8 3v10",
  back: "M3 8h10M7 4L3 8l4 4",
  flag: "M4 14V2l8 3-8 3",
  out: "M9 3h4v10H9M10 8H2M5 5L2 8l3 3",
  circle: "M8 3a5 5 0 1 0 .01 0z",
};
const FILLED = new Set(["play", "pause", "stop"]);

/** Tone, shape, word. */
const PHASES = {
  waiting: ["busy", "wait"],
  starting: ["busy", "wait"],
  running: ["good", "play"],
  resizing: ["busy", "turn"],
  paused: ["quiet", "pause"],
  stalled: ["bad", "warning"],
  succeeded: ["good", "check"],
  failed: ["bad", "cross"],
  cancelled: ["quiet", "stop"],
};
const STATES = {
  starting: ["busy", "wait"],
  ready: ["busy", "circle"],
  active: ["good", "play"],
  draining: ["busy", "out"],
  suspected: ["bad", "warning"],
  lost: ["bad", "cross"],
  left: ["quiet", "out"],
};
const REASONS = {
  start: ["good", "flag", "start"],
  kill: ["bad", "cross", "loss"],
  join: ["good", "plus", "join"],
  drain: ["busy", "out", "drain"],
  scale_up: ["good", "up", "scale up"],
  scale_down: ["busy", "down", "scale down"],
  balance: ["quiet", "balance", "balance"],
  restore: ["bad", "back", "restore"],
};

export function icon(shape) {
  const filled = FILLED.has(shape);
  const path = drawing("path", { d: SHAPES[shape] ?? SHAPES.circle, fill: filled ? "currentColor" : "none" });
  return drawing("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, path);
}

function badge([tone, shape], word) {
  return element("span", { class: `badge ${tone}` }, icon(shape), visible(word));
}

export const phaseBadge = (phase) => badge(PHASES[phase] ?? ["quiet", "circle"], phase);
export const stateBadge = (state) => badge(STATES[state] ?? ["quiet", "circle"], state);
export const reasonBadge = (reason) => badge(REASONS[reason] ?? ["quiet", "circle"], reasonWord(reason));
export const reasonWord = (reason) => REASONS[reason]?.[2] ?? reason;
export const reasonIcon = (reason) => icon(REASONS[reason]?.[1] ?? "circle");
export const reasonTone = (reason) => REASONS[reason]?.[0] ?? "quiet";

export const isOver = (phase) => phase === "succeeded" || phase === "failed" || phase === "cancelled";

const KINDS_OF_TROUBLE = new Set([
  "lost", "killed", "failed", "refused", "stalled", "suspected", "unreachable", "checkpoint_failed", "checkpoint_damaged",
  "corrupt_block", "not_finite", "anew", "restoring", "unreadable_event", "claim_refused", "kept_out", "silent",
  "coordinate_missing",
]);
const KINDS_OF_SUCCESS = new Set(["trains", "succeeded", "checkpoint_saved", "joined", "returned", "resized", "open", "begun"]);

/** What an event's kind looks like in a list. */
export function kindBadge(kind) {
  const tone = KINDS_OF_TROUBLE.has(kind) ? "bad" : KINDS_OF_SUCCESS.has(kind) ? "good" : "quiet";
  const shape = tone === "bad" ? "warning" : tone === "good" ? "check" : "circle";
  return badge([tone, shape], kind.replaceAll("_", " "));
}
