// Who holds what: lanes, blocks and mirrors of each worker, blocks with copies missing, failure domains, copies under
// way. The blocks are one canvas; the figures beside it say the same. Called by the job's view.

import { bytes, count, plural } from "./amounts.js";
import { element, foreign, keyed, row, setText, table } from "./elements.js";
import { laneColour, laneWords } from "./lanes.js";
import { ink, isDark, onTheme } from "./theme.js";

const TITLES = ["Worker", "Failure domain", "Lanes", "Owned blocks", "Mirrored blocks"];
const ROW = 14;
const MOST_DRAWN = 200;

export class Holdings {
  constructor(place, signal) {
    this.sentence = element("p", { id: "copies" });
    this.canvas = element("canvas", { role: "img", "aria-label": "Blocks by holder" });
    this.frame = element("div", { class: "blocks-picture" }, this.canvas);
    this.key = element("p", { class: "quiet note" }, swatch("owned"), " owned ", swatch("mirrored"), " mirrored ", swatch("missing"), " copies missing");
    this.note = element("p", { class: "quiet note" });
    this.body = element("tbody");
    this.fills = element("ul", { class: "fills", "aria-label": "Copies under way" });
    const shown = table("Holdings by worker", TITLES, this.body);
    place.append(this.sentence, this.frame, this.key, this.note, this.fills, element("div", { class: "wide low", tabindex: "0", role: "region", "aria-label": "Holdings by worker" }, shown));
    const redraw = () => this.draw();
    const sizes = new ResizeObserver(redraw);
    onTheme(redraw, signal);
    sizes.observe(this.frame);
    signal.addEventListener("abort", () => sizes.disconnect());
  }

  show(found) {
    this.found = found;
    const size = found.block_bytes ? ` ${plural(found.blocks, "block")} of ${bytes(found.block_bytes)} state.` : ` ${plural(found.blocks, "block")}.`;
    this.sentence.className = found.missing.length ? "problem-line" : "";
    this.sentence.replaceChildren(foreign(found.sentence), `.${size}`.replace("..", "."));
    keyed(this.body, found.members, (member) => member.worker, memberLine, updateMember);
    keyed(this.fills, found.fills, (fill) => `${fill.source} ${fill.target}`, () => element("li"), (item, fill) => {
      item.replaceChildren(foreign(fill.source), " → ", foreign(fill.target), `: ${count(fill.filled)} of ${plural(fill.blocks, "block")} copied`);
    });
    setText(this.note, found.members.length > MOST_DRAWN ? `${MOST_DRAWN} of ${plural(found.members.length, "worker")} are drawn; the table below has all.` : "");
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!this.found || !width) return;
    const { members, blocks, missing } = this.found;
    const rows = members.slice(0, MOST_DRAWN);
    const tall = rows.length > 30 ? 5 : ROW;
    const height = Math.max(1, (rows.length + 1) * tall);
    const sharp = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * sharp);
    this.canvas.height = Math.round(height * sharp);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const x = (block) => (block / Math.max(1, blocks)) * width;
    const runs = (pairs, top, high) => {
      for (const [first, end] of pairs) pen.fillRect(x(first), top, Math.max(0.75, x(end) - x(first)), high);
    };
    rows.forEach((member, index) => {
      pen.fillStyle = ink("line");
      pen.fillRect(0, index * tall, width, tall - 1);
      pen.fillStyle = ink("mirror");
      runs(member.mirrored, index * tall + (tall - 1) * 0.3, (tall - 1) * 0.4);
      pen.fillStyle = ink("accent");
      runs(member.owned, index * tall, tall - 1);
    });
    pen.fillStyle = ink("tone-bad");
    runs(missing, rows.length * tall, tall - 1);
    const words = members.map((member) => `${member.worker} owns ${runsCount(member.owned)} and mirrors ${runsCount(member.mirrored)}`);
    this.canvas.setAttribute("aria-label", `Blocks by holder: ${words.slice(0, 12).join("; ")}. Copies missing: ${runsCount(missing)}.`);
  }
}

const swatch = (name) => element("span", { class: `swatch ${name}`, "aria-hidden": "true" });
const runsCount = (runs) => runs.reduce((sum, [first, end]) => sum + end - first, 0);

function memberLine(member) {
  const cells = Array.from({ length: 4 }, () => element("td"));
  const line = row(TITLES, {}, element("th", { scope: "row" }, foreign(member.worker)), ...cells);
  line.cells4 = cells;
  return line;
}

function updateMember(line, member) {
  const [domain, lanes, owned, mirrored] = line.cells4;
  if (domain.shown !== member.domain) domain.replaceChildren(foreign(member.domain || member.host));
  domain.shown = member.domain;
  showLanes(lanes, member.lanes);
  setText(owned, count(runsCount(member.owned)));
  setText(mirrored, count(runsCount(member.mirrored)));
}

/** Lanes as numbers on their colours. */
export function showLanes(place, lanes) {
  const key = `${lanes.join(",")} ${isDark()}`;
  if (place.shownLanes === key) return;
  place.shownLanes = key;
  if (lanes.length > 12) return void place.replaceChildren(`${laneWords(lanes)} (${lanes.length})`);
  const chips = lanes.map((lane) => {
    const chip = element("span", { class: "lane" }, String(lane));
    chip.style.backgroundColor = laneColour(lane, isDark());
    return chip;
  });
  place.replaceChildren(...(chips.length ? chips : ["none"]));
}
