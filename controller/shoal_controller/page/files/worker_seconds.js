// Where the seconds of a job's workers went, as one bar of as many parts as there are uses, and a line that names them.
// Called by the job's view.

import { duration, percent } from "./amounts.js";
import { element, keyed, setText } from "./elements.js";

const WORDS = {
  training: "training",
  idle_lane: "without a lane",
  standby: "standing by",
  starting: "starting",
  paused: "paused",
  lost_step: "in lost steps",
  missing: "missing",
};

export class WorkerSeconds {
  constructor(place) {
    this.bar = element("div", { class: "uses", role: "img" });
    this.key = element("ul", { class: "uses-key quiet note", "aria-label": "Seconds of workers by use" });
    this.part = element("div", { id: "worker-seconds", hidden: true }, this.bar, this.key);
    place.append(this.part);
  }

  show(seconds) {
    const all = Object.values(seconds).reduce((sum, one) => sum + one, 0);
    this.part.hidden = all <= 0;
    const used = Object.keys(WORDS).filter((use) => seconds[use] > 0);
    const said = (use) => `${percent(seconds[use] / all)} ${WORDS[use]}`;
    this.bar.setAttribute("aria-label", `Seconds of workers: ${used.map(said).join(", ")}`);
    keyed(this.bar, used, (use) => use, (use) => element("span", { class: `use ${use}` }), (part, use) => {
      part.style.flexGrow = seconds[use];
      part.title = `${duration(seconds[use])} ${WORDS[use]}`;
    });
    keyed(this.key, used, (use) => use, keyLine, (line, use) => setText(line.lastChild, ` ${said(use)}`));
  }
}

const keyLine = (use) => element("li", {}, element("span", { class: `swatch ${use}`, "aria-hidden": "true" }), element("span"));
