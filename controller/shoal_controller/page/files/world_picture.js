// The world over time: workers as rows, time to the right, the lanes of each as colours, every change a mark that can be
// pressed. One canvas, so that hundreds of workers cost no elements; what it shows is also in the list of changes.
// Called by the job's view.

import { clock, plural, utc } from "./amounts.js";
import { element, keyed, setText, visible } from "./elements.js";
import { laneColour, laneWords } from "./lanes.js";
import { reasonIcon, reasonTone, reasonWord } from "./phases.js";
import { ink, isDark, onTheme } from "./theme.js";
import { GUTTER, MARGIN } from "./time_axis.js";

const MOST_ROWS = 150;
const TALLEST = 420; // pixels of all rows
const ROW = [3, 24]; // least and most pixels of one
const APART = 26; // pixels between two marks; nearer ones are one
const NUMBER_WIDTH = 20;

export class WorldPicture {
  constructor(place, axis, onChosen, signal) {
    this.axis = axis;
    this.onChosen = onChosen;
    this.worlds = [];
    this.rows = [];
    this.chosen = null;
    this.canvas = element("canvas", { role: "img", "aria-label": "The world over time" });
    this.marks = element("ol", { class: "marks", "aria-label": "Changes of the world" });
    this.hair = element("div", { class: "hair", hidden: true });
    this.note = element("p", { class: "quiet note" });
    this.frame = element("div", { class: "world-picture" }, this.marks, this.canvas, this.hair);
    place.append(this.frame, this.note);
    this.listen(signal);
  }

  listen(signal) {
    const draw = () => this.draw();
    const sizes = new ResizeObserver(draw);
    const point = (time) => this.point(time);
    onTheme(draw, signal);
    sizes.observe(this.frame);
    this.axis.listeners.add(draw);
    this.axis.cursors.add(point);
    signal.addEventListener("abort", () => {
      sizes.disconnect();
      this.axis.listeners.delete(draw);
      this.axis.cursors.delete(point);
    });
  }

  /** `worlds`: as REST has them, oldest first. */
  show(worlds) {
    this.worlds = worlds;
    this.draw();
  }

  choose(generation) {
    this.chosen = generation;
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    const [from, to] = this.axis.bounds;
    this.scale = (time) => GUTTER + ((time - from) / (to - from)) * (width - GUTTER - MARGIN);
    const seen = this.worlds.filter((world) => world.began <= to && (world.ended ?? Infinity) >= from);
    const rows = rowsOf(seen);
    this.rows = rows.slice(0, MOST_ROWS);
    const tall = Math.max(ROW[0], Math.min(ROW[1], Math.floor(TALLEST / Math.max(1, this.rows.length))));
    this.paint(width, tall, seen);
    this.mark(seen.filter((world) => world.began >= from));
    setText(this.note, noteOf(rows.length, seen));
    this.canvas.setAttribute("aria-label", pictureSentence(from, to, rows.length, seen));
  }

  paint(width, tall, worlds) {
    const height = Math.max(24, this.rows.length * tall);
    const sharp = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * sharp) || this.canvas.height !== Math.round(height * sharp)) {
      this.canvas.width = Math.round(width * sharp);
      this.canvas.height = Math.round(height * sharp);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    this.names(pen, tall);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER - MARGIN, height);
    pen.clip();
    const colours = { isDark: isDark(), pale: ink("line"), text: ink("text"), ground: ink("card"), pause: ink("text") };
    for (const world of worlds) this.world(pen, world, tall, width, colours);
    this.lines(pen, worlds, height);
    pen.restore();
  }

  names(pen, tall) {
    const every = Math.ceil(13 / tall);
    pen.fillStyle = ink("muted");
    pen.font = '11px system-ui, "Segoe UI", Roboto, sans-serif';
    pen.textAlign = "right";
    this.rows.forEach((worker, index) => {
      if (index % every === 0) pen.fillText(short(worker), GUTTER - 8, (index + 0.5) * tall, GUTTER - 10);
    });
  }

  world(pen, world, tall, width, colours) {
    const left = Math.max(GUTTER - 1, this.scale(world.began));
    const right = Math.min(width, world.ended === null ? width - MARGIN : this.scale(world.ended));
    this.rows.forEach((worker, index) => {
      const lanes = world.lanes?.[worker];
      if (lanes === undefined) return;
      const gap = tall > 6 ? 2 : 0;
      band(pen, lanes, { left, top: index * tall + gap / 2, width: Math.max(0.5, right - left), height: tall - gap }, colours);
    });
    if (world.pause_seconds > 0) {
      const begin = this.scale(world.began - world.pause_seconds);
      const end = this.scale(world.began);
      pen.fillStyle = colours.pause;
      pen.globalAlpha = 0.35;
      if (end - begin > 1) pen.fillRect(begin, 0, end - begin, this.rows.length * tall);
      pen.globalAlpha = 1;
    }
  }

  lines(pen, worlds, height) {
    for (const world of worlds) {
      const x = Math.round(this.scale(world.began)) + 0.5;
      const isChosen = world.generation === this.chosen;
      pen.strokeStyle = ink(`tone-${reasonTone(world.reason)}`);
      pen.lineWidth = isChosen ? 3 : world.reason === "balance" ? 0.5 : 1.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, height);
      pen.stroke();
    }
  }

  mark(worlds) {
    const groups = [];
    for (const world of worlds) {
      const x = this.scale(world.began);
      const last = groups.at(-1);
      if (last && x - last.x < APART) last.worlds.push(world);
      else groups.push({ x, worlds: [world] });
    }
    keyed(this.marks, groups, (group) => foremost(group).generation, (group) => this.markOf(group), (item, group) => this.place(item, group));
  }

  markOf(group) {
    const button = element("button", { type: "button", onclick: () => this.onChosen(foremost(button.group)) });
    const item = element("li", {}, button);
    item.button = button;
    return item;
  }

  place(item, group) {
    const world = foremost(group);
    const { button } = item;
    button.group = group;
    item.style.left = `${group.x}px`;
    button.className = `mark ${reasonTone(world.reason)}`;
    button.setAttribute("aria-pressed", String(group.worlds.some((one) => one.generation === this.chosen)));
    const more = group.worlds.length - 1;
    const words = `${reasonWord(world.reason)} at ${clock(world.began)}: ${visible(world.sentence)}${more ? ` And ${plural(more, "change")} close to it.` : ""}`;
    button.setAttribute("aria-label", words);
    button.title = `${words} (${utc(world.began)})`;
    const key = `${world.reason} ${more}`;
    if (button.dataset.key === key) return;
    button.dataset.key = key;
    button.replaceChildren(reasonIcon(world.reason), more ? element("span", { "aria-hidden": "true" }, `+${more}`) : "");
  }

  point(time) {
    this.hair.hidden = time === null;
    if (time !== null && this.scale) this.hair.style.left = `${this.scale(time)}px`;
  }
}

const WEIGHT = { kill: 5, restore: 5, start: 4, drain: 3, scale_up: 3, scale_down: 3, join: 2, balance: 0 };

/** Of marks at one place, the one that matters most. */
const foremost = (group) => group.worlds.reduce((one, other) => ((WEIGHT[other.reason] ?? 1) > (WEIGHT[one.reason] ?? 1) ? other : one));

const NUMBER = /^w(\d+)$/;

/** Every worker of these worlds, by number. */
function rowsOf(worlds) {
  const found = new Set(worlds.flatMap((world) => Object.keys(world.lanes ?? {})));
  const order = (name) => Number(NUMBER.exec(name)?.[1] ?? Infinity);
  return [...found].sort((one, other) => order(one) - order(other) || (one < other ? -1 : 1));
}

function short(name) {
  const shown = visible(name);
  return shown.length > 9 ? `${shown.slice(0, 8)}…` : shown;
}

/** One worker in one world: a stripe for each lane, with its number where there is room; pale where it has none. */
function band(pen, lanes, box, colours) {
  if (!lanes.length) {
    pen.fillStyle = colours.pale;
    pen.fillRect(box.left, box.top + box.height * 0.35, box.width, Math.max(1, box.height * 0.3));
    return;
  }
  const tall = box.height / lanes.length;
  lanes.forEach((lane, index) => {
    pen.fillStyle = laneColour(lane, colours.isDark);
    pen.fillRect(box.left, box.top + index * tall, box.width, tall + 0.25);
  });
  const words = `lane${lanes.length === 1 ? "" : "s"} ${laneWords(lanes)}`;
  if (box.height < 13 || box.width < NUMBER_WIDTH) return;
  pen.font = '11px system-ui, "Segoe UI", Roboto, sans-serif';
  pen.textAlign = "left";
  const fitting = [words, laneWords(lanes)].find((text) => pen.measureText(text).width + 14 < box.width);
  if (!fitting) return;
  pen.fillStyle = colours.ground;
  pen.globalAlpha = 0.82;
  pen.beginPath();
  pen.roundRect(box.left + 3, box.top + box.height / 2 - 7, pen.measureText(fitting).width + 8, 14, 4);
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = colours.text;
  pen.fillText(fitting, box.left + 7, box.top + box.height / 2 + 0.5);
}

function noteOf(rows, worlds) {
  const hidden = rows > MOST_ROWS ? `${MOST_ROWS} of ${rows} workers are drawn; the table below has all. ` : "";
  const unknown = worlds.some((world) => world.lanes === null) ? "Who held which lane is not known of worlds that began before this controller led, or too long ago. " : "";
  return hidden + unknown;
}

function pictureSentence(from, to, rows, worlds) {
  const last = worlds.at(-1);
  const held = last?.lanes
    ? ` Last: ${Object.entries(last.lanes).slice(0, 12).map(([worker, lanes]) => `${visible(worker)} ${lanes.length ? `lanes ${laneWords(lanes)}` : "no lane"}`).join("; ")}.`
    : "";
  return `The world from ${clock(from)} to ${clock(to)}: ${plural(rows, "worker")}, ${plural(worlds.length, "generation")}.${held}`;
}
