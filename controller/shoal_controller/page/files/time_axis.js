// The one time axis that the world's picture and all charts of a job share: they follow the present together, zoom
// together, and show one cursor. Called by the job's view; draws its own buttons and nothing else.

import { clock, now, utc } from "./amounts.js";
import { element, setText } from "./elements.js";

const WHOLE = Infinity; // from the job's beginning, a day at most
const SPANS = [
  [WHOLE, "All"],
  [120, "2 min"],
  [600, "10 min"],
  [3600, "1 h"],
  [86400, "1 day"],
];
const SHORTEST = 4;
const SHORTEST_WHOLE = 60;
const LONGEST = 86400;
export const GUTTER = 64; // pixels at the left for names and scales, the same in every picture
export const MARGIN = 12; // at the right

export class TimeAxis {
  constructor() {
    this.listeners = new Set();
    this.cursors = new Set();
    this.span = WHOLE; // seconds shown while it follows
    this.began = null;
    this.ended = null;
    this.fixed = null; // [from, to] after a zoom
    this.range = element("span", { class: "quiet", id: "axis-range" });
    this.buttons = new Map();
  }

  /** Seconds since the epoch: from, to. */
  get bounds() {
    if (this.fixed) return this.fixed;
    const end = this.ended ?? now();
    const life = this.began === null ? SHORTEST_WHOLE : Math.max(SHORTEST_WHOLE, 1.03 * (end - this.began));
    const span = Math.min(this.span === WHOLE ? life : this.span, LONGEST);
    return [end - span, end + span * 0.01];
  }

  /** When the job began and ended; null: not yet. A job that is over is shown as it ended. */
  suit(began, ended) {
    if (this.began === began && this.ended === ended) return;
    this.began = began;
    this.ended = ended;
    this.changed();
  }

  follow(span) {
    this.span = span;
    this.fixed = null;
    this.changed();
  }

  zoom(from, to) {
    if (!(to - from > 0)) return;
    const middle = (from + to) / 2;
    const half = Math.min(LONGEST, Math.max(SHORTEST, to - from)) / 2;
    this.fixed = [middle - half, middle + half];
    this.changed();
  }

  /** factor < 1: closer. */
  zoomBy(factor) {
    const [from, to] = this.bounds;
    const middle = this.fixed ? (from + to) / 2 : to;
    this.zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  shift(share) {
    const [from, to] = this.bounds;
    this.zoom(from + share * (to - from), to + share * (to - from));
  }

  /** The present moves on: redraw what follows it. */
  tick() {
    if (!this.fixed && this.ended == null) this.changed();
  }

  changed() {
    const [from, to] = this.bounds;
    for (const listener of this.listeners) listener(from, to);
    setText(this.range, `${clock(from)} – ${clock(to)}${this.fixed ? "" : this.ended == null ? ", following" : ", its end"}`);
    this.range.title = `${utc(from)} – ${utc(to)}`;
    for (const [span, button] of this.buttons) button.setAttribute("aria-pressed", String(!this.fixed && span === this.span));
  }

  /** Show one moment in all pictures; null: none. */
  point(time) {
    for (const cursor of this.cursors) cursor(time);
  }

  controls() {
    const press = (label, words, act) => element("button", { type: "button", class: "small", "aria-label": words, title: words, onclick: act }, label);
    const spans = SPANS.map(([span, label]) => {
      const button = element("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.follow(span) }, label);
      this.buttons.set(span, button);
      return button;
    });
    const controls = element(
      "div", { class: "axis-controls", role: "group", "aria-label": "Time shown" },
      ...spans,
      press("←", "Earlier", () => this.shift(-0.5)),
      press("→", "Later", () => this.shift(0.5)),
      press("+", "Closer", () => this.zoomBy(0.5)),
      press("−", "Wider", () => this.zoomBy(2)),
      this.range,
    );
    this.changed();
    return controls;
  }
}
