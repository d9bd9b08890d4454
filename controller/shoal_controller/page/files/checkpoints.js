// A job's checkpoints: step, age, size, verified or not. Called by the job's view.

import { bytes, count, since } from "./amounts.js";
import { element, foreign, keyed, row, setText, table } from "./elements.js";
import { icon } from "./phases.js";

const TITLES = ["Step", "Saved", "Size", "Verified", "Path"];
const SHOWN = 20; // before the rest is folded

export class Checkpoints {
  constructor(place) {
    this.none = element("p", { class: "quiet" }, "No checkpoint yet.");
    this.body = element("tbody");
    const shown = table("Checkpoints, newest first", TITLES, this.body);
    this.frame = element("div", { class: "wide low", tabindex: "0", role: "region", "aria-label": "Checkpoints" }, shown);
    this.more = element("button", { type: "button", class: "small", hidden: true, onclick: () => this.unfold() });
    this.shown = SHOWN;
    place.append(this.none, this.frame, this.more);
  }

  show(checkpoints) {
    this.none.hidden = checkpoints.length > 0;
    this.frame.hidden = !checkpoints.length;
    this.checkpoints = checkpoints;
    this.more.hidden = checkpoints.length <= this.shown;
    setText(this.more, `Show all ${count(checkpoints.length)} checkpoints`);
    keyed(this.body, checkpoints.slice(0, this.shown), (one) => `${one.step} ${one.path}`, checkpointLine, updateLine);
  }

  unfold() {
    this.shown = Infinity;
    this.show(this.checkpoints);
  }
}

function checkpointLine(saved) {
  const verified = element("td");
  const when = saved.saved === null || saved.saved === undefined ? element("span", { class: "quiet" }, "not known") : since(saved.saved);
  const line = row(
    TITLES, {},
    element("th", { scope: "row" }, count(saved.step)),
    element("td", {}, when),
    element("td", {}, bytes(saved.bytes)),
    verified,
    element("td", { class: "path" }, foreign(saved.path)),
  );
  line.verified = verified;
  return line;
}

function updateLine(line, saved) {
  const key = String(saved.verified);
  if (line.verified.shown === key) return;
  line.verified.shown = key;
  if (saved.verified) line.verified.replaceChildren(element("span", { class: "badge good" }, icon("check"), "verified"));
  else setText(line.verified, "not verified"); // nobody has compared its copies, which says nothing against it
}
