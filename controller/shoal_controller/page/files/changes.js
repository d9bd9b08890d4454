// The changes of the world as a list, and the timeline of the one that is chosen: who noticed what when, whom the others
// waited for, seconds per phase. Called by the job's view.

import { bytes, count, duration, moment, plural } from "./amounts.js";
import { atMostEvery, element, foreign, foreignText, keyed, row, setText, table } from "./elements.js";
import { kindBadge, reasonBadge } from "./phases.js";
import { Problem, get } from "./rest.js";

const TITLES = ["When", "Why", "Workers", "Pause", "Bytes moved", "Steps lost", "Description"];
const SHOWN = 12; // changes before the list is folded
/** In the order in which they come, of a change that is planned and of one that is not. */
const PHASE_WORDS = {
  detect: "noticing it",
  prepare: "stopping the others",
  plan: "planning",
  fill: "copying, beside training",
  group: "building the process group",
  promote: "promoting copies",
  open: "opening",
  switch: "switching",
  first_step: "first step",
};
const NOT_KNOWN = "not known";
const SETTLED = "resized"; // the kind of the last event of a change
const LOOK_MILLISECONDS = 2000;

/** Whether all members have reported what a change cost; one that dies before never does. */
export const isCostKnown = (world) => Object.keys(world?.phases ?? {}).length > 0;

export class Changes {
  constructor(place, job, signal) {
    this.job = job;
    this.signal = signal;
    this.worlds = [];
    this.chosen = null;
    this.found = null; // the timeline that is shown
    this.isThrough = false; // nothing more comes of it
    this.lookAgain = atMostEvery(LOOK_MILLISECONDS, () => this.look());
    this.isWhole = false;
    this.panel = element("section", { class: "timeline card", "aria-label": "The chosen change", tabindex: "-1", hidden: true });
    this.body = element("tbody");
    this.more = element("button", { type: "button", class: "small", hidden: true, onclick: () => this.unfold() }, "Show all changes");
    const shown = table("Changes of the world, newest first", TITLES, this.body, { class: "changes" });
    place.append(this.panel, element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Changes of the world" }, shown), this.more);
  }

  onChosen(listener) {
    this.listener = listener;
  }

  show(worlds) {
    this.worlds = worlds;
    const newest = [...worlds].reverse();
    this.more.hidden = this.isWhole || newest.length <= SHOWN;
    keyed(this.body, this.isWhole ? newest : newest.slice(0, SHOWN), (world) => world.generation, (world) => this.line(world), updateLine);
    this.mark();
    this.renew();
  }

  unfold() {
    this.isWhole = true;
    this.show(this.worlds);
  }

  line(world) {
    const button = element("button", { type: "button", class: "link", onclick: () => this.choose(world) }, moment(world.began));
    const cells = Array.from({ length: 5 }, () => element("td"));
    const line = row(TITLES, {}, element("th", { scope: "row" }, button), element("td", {}, reasonBadge(world.reason)), ...cells);
    line.cells5 = cells;
    return line;
  }

  mark() {
    for (const [generation, line] of this.body.keyedChildren ?? []) line.classList.toggle("chosen", generation === this.chosen);
  }

  async choose(world) {
    this.chosen = world.generation;
    this.found = null;
    this.mark();
    this.listener?.(world.generation);
    const problem = await this.look();
    if (this.chosen !== world.generation) return;
    if (problem) {
      const close = element("button", { type: "button", class: "small", onclick: () => this.close() }, "Close");
      this.panel.replaceChildren(element("p", { class: "problem" }, problem.message), close);
    }
    this.panel.hidden = false;
    this.panel.focus({ preventScroll: true });
    this.panel.scrollIntoView({ block: "nearest" });
  }

  /** Ask for the timeline that is open. Returns the problem, where there is one. */
  async look() {
    const generation = this.chosen;
    if (generation === null || this.signal.aborted) return null;
    try {
      const found = await get(`/v1/jobs/${encodeURIComponent(this.job)}/worlds/${generation}`, this.signal);
      if (this.chosen !== generation) return null;
      const isSettled = found.timeline.some((event) => event.kind === SETTLED); // its events may be dropped by now
      this.isThrough = found.ended !== null || isSettled || isCostKnown(found) || !found.timeline.length;
      this.draw(found);
    } catch (error) {
      if (this.signal.aborted) return null;
      if (!(error instanceof Problem)) throw error;
      return error;
    }
    return null;
  }

  /** The open timeline follows what the list says of its world, and is asked for until the change is through. */
  renew() {
    const world = this.worlds.find((one) => one.generation === this.chosen);
    if (!world) return;
    if (this.found) this.draw({ ...this.found, ...world });
    if (!this.found || !this.isThrough) this.lookAgain();
  }

  draw(found) {
    if (JSON.stringify(found) === JSON.stringify(this.found)) return;
    const held = this.panel.contains(document.activeElement) && document.activeElement !== this.panel;
    this.found = found;
    this.panel.replaceChildren(...timeline(found, () => this.close()));
    if (held) this.panel.querySelector("button").focus({ preventScroll: true });
  }

  close() {
    this.panel.hidden = true;
    this.chosen = null;
    this.found = null;
    this.mark();
    this.listener?.(null);
  }
}

function updateLine(line, world) {
  const [workers, pause, moved, lost, sentence] = line.cells5;
  setText(workers, count(world.workers));
  setText(pause, pauseOf(world));
  setText(moved, movedBytes(world));
  setText(lost, count(world.lost_steps));
  if (sentence.shown !== world.sentence) sentence.replaceChildren(foreignText(world.sentence));
  sentence.shown = world.sentence;
}

const pauseOf = (world) => (isCostKnown(world) ? duration(world.pause_seconds) : NOT_KNOWN);

function movedBytes(world) {
  const { bytes: moved } = world;
  const parts = [["in the pause", moved.pause], ["beside training", moved.fill], ["from a checkpoint", moved.checkpoint]].filter(([, size]) => size);
  return parts.length ? parts.map(([words, size]) => `${bytes(size)} ${words}`).join(", ") : isCostKnown(world) ? "none" : NOT_KNOWN;
}

function timeline(world, close) {
  const title = element("h3", {}, reasonBadge(world.reason), ` Generation ${world.generation}, `, moment(world.began));
  const facts = element(
    "dl", { class: "facts" },
    fact("Pause", pauseOf(world), "pause"),
    fact("Bytes moved", movedBytes(world)),
    fact("Steps lost", count(world.lost_steps)),
    fact("Blocks promoted", isCostKnown(world) ? count(world.promoted_blocks) : NOT_KNOWN),
    world.noticed_by ? fact("Noticed by", foreign(world.noticed_by)) : null,
    world.waited_for.length ? fact("Waited for", foreign(world.waited_for.join(", "))) : null,
    world.slowest ? fact("Slowest", foreign(world.slowest)) : null,
  );
  return [
    element("div", { class: "panel-head" }, title, element("button", { type: "button", class: "small", onclick: close }, "Close")),
    element("p", { class: "sentence-line", "data-role": "sentence" }, foreign(world.sentence)),
    facts,
    phaseBars(world.phases),
    entries(world.timeline),
  ];
}

const fact = (name, value, role = null) => element("div", {}, element("dt", {}, name), element("dd", { "data-role": role }, value));

function phaseBars(phases) {
  const order = Object.keys(PHASE_WORDS);
  const place = ([name]) => (order.includes(name) ? order.indexOf(name) : order.length);
  const named = Object.entries(phases).filter(([, seconds]) => seconds > 0).sort((one, other) => place(one) - place(other));
  const whole = named.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!named.length) return element("p", { class: "quiet" }, Object.keys(phases).length ? "No time was spent in any phase." : "How long its phases took is not known: not all of its workers have said so.");
  const cause = named.reduce((sum, [name, seconds]) => (name === "fill" ? sum : sum + seconds), 0); // training goes on meanwhile
  let before = 0;
  const items = named.map(([name, seconds]) => {
    const bar = element("span", { class: "phase-bar", "aria-hidden": "true" });
    bar.style.marginInlineStart = `${(100 * before) / whole}%`;
    bar.style.inlineSize = `${Math.max(0.5, (100 * seconds) / whole)}%`;
    before += seconds;
    return element("li", {}, element("span", { class: "phase-name" }, PHASE_WORDS[name] ?? name.replaceAll("_", " ")), element("span", { class: "phase-seconds" }, duration(seconds)), element("span", { class: "phase-track" }, bar));
  });
  return element("div", {}, element("h4", {}, `Seconds per phase, from the cause to the first step: ${duration(cause)}`), element("ol", { class: "phases" }, items));
}

function entries(events) {
  if (!events.length) return element("p", { class: "quiet" }, "The events of this change are not kept any more.");
  const began = events[0].time;
  const items = events.map((event) =>
    element("li", {}, moment(event.time, `+${duration(event.time - began)}`), kindBadge(event.kind), element("span", {}, foreignText(event.message))),
  );
  return element("div", {}, element("h4", {}, `What happened, ${plural(events.length, "event")}`), element("ol", { class: "entries" }, items));
}
