// The end of a worker's log, kept up to date while it is open. Its lines are text, whatever is in them.
// Called by the job's view.

import { bytes } from "./amounts.js";
import { element, foreign, setText, visible } from "./elements.js";
import { poll } from "./poll.js";
import { get } from "./rest.js";

const BYTES = 16384;
const SECONDS = 2;

export class LogTail {
  constructor(place, job, signal) {
    this.job = job;
    this.outer = signal;
    this.stopping = null;
    this.title = element("h3", {});
    this.note = element("p", { class: "quiet note" });
    this.text = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log", dir: "ltr" });
    this.closing = element("button", { type: "button", class: "small", onclick: () => this.close() }, "Close");
    this.box = element("section", { class: "card", tabindex: "-1", "aria-label": "Log of a worker", hidden: true }, element("div", { class: "panel-head" }, this.title, this.closing), this.note, this.text);
    place.append(this.box);
  }

  open(worker) {
    this.close();
    this.box.hidden = false;
    this.title.replaceChildren("Log of ", foreign(worker));
    this.text.textContent = "";
    this.text.hidden = true;
    setText(this.note, "Reading…");
    this.stopping = new AbortController();
    const signal = AbortSignal.any([this.outer, this.stopping.signal]);
    const path = `/v1/jobs/${encodeURIComponent(this.job)}/workers/${encodeURIComponent(worker)}/log?bytes=${BYTES}`;
    poll({
      ask: async () => this.show(await get(path, signal)),
      seconds: () => SECONDS,
      signal,
      onProblem: (problem) => {
        setText(this.note, visible(problem.message));
        this.stopping?.abort(); // there is no log here, and asking again makes none
      },
    });
    this.box.focus({ preventScroll: true });
    this.box.scrollIntoView({ block: "nearest" });
  }

  show(found) {
    const isAtEnd = this.text.hidden || this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 8;
    setText(this.note, `${visible(found.path)}: ${extent(found)}`);
    this.text.hidden = false;
    setText(this.text, visible(found.text));
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  close() {
    this.stopping?.abort();
    this.stopping = null;
    this.box.hidden = true;
  }
}

function extent(found) {
  if (found.bytes === null) return "the end"; // how much a pod has printed is not known
  return found.begin > 0 ? `the last ${bytes(found.bytes - found.begin)} of ${bytes(found.bytes)}` : bytes(found.bytes);
}
