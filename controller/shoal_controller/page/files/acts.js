// What may be done to a job: each act asks first and says what it will do, in the controller's own sentence; is sent
// with the version that the sentence was made for; and shows a conflict instead of overriding it.
// Called by the job's view, which shows the buttons to those only who have the right.

import { announce } from "./announce.js";
import { atMostEvery, element, foreign, foreignText, setText } from "./elements.js";
import { Problem, get, request } from "./rest.js";

const ACTS = {
  scale: { title: "Scale", press: "Scale", method: "POST", path: () => "/scale", body: (given) => ({ workers: given.workers }) },
  drain: { title: "Drain", press: "Drain", method: "POST", path: (given) => `/workers/${encodeURIComponent(given.worker)}/drain`, body: () => ({ why: "asked on the page" }) },
  lost: { title: "Confirm the loss of", press: "It is dead", danger: true, method: "POST", path: (given) => `/workers/${encodeURIComponent(given.worker)}/lost` },
  checkpoint: { title: "Save a checkpoint of", press: "Save a checkpoint", method: "POST", path: () => "/checkpoints" },
  pause: { title: "Pause", press: "Pause", method: "POST", path: () => "/pause" },
  resume: { title: "Resume", press: "Resume", method: "POST", path: () => "/resume" },
  cancel: { title: "Cancel", press: "Cancel the job", danger: true, method: "DELETE", path: () => "" },
};
const DONE = {
  scale: "The controller scales the job.",
  drain: "The worker is being drained.",
  lost: "The worker counts as lost.",
  checkpoint: "A checkpoint will be saved after the next step.",
  pause: "The job is being paused.",
  resume: "The job resumes.",
  cancel: "The job is being cancelled.",
};

/** Whether the same request may be let in later. If it was carried out and only the answer is lost, its version is old then. */
const mayGoBetter = ({ status }) => status === 0 || status === 429 || status >= 500;

/** Ask, and do it if that is confirmed. `given`: `worker` of a drain or loss, `workers` at which a scale begins. */
export function askFor(act, job, given, onDone) {
  const dialog = new ActDialog(act, job, given, onDone);
  dialog.open();
}

class ActDialog {
  constructor(act, job, given, onDone) {
    Object.assign(this, { act, job, given: { ...given }, onDone, kind: ACTS[act], version: null, asked: 0 });
    this.sentence = element("p", { class: "act-sentence", id: "act-sentence", "aria-live": "polite" }, "Asking the controller what that will do…");
    this.problem = element("p", { class: "problem", role: "alert" });
    this.confirm = element("button", { type: "button", class: this.kind.danger ? "danger" : "primary", disabled: true, onclick: () => this.carryOut() }, this.kind.press);
    this.leave = element("button", { type: "button", onclick: () => this.dialog.close() }, "Leave it");
    this.dialog = element(
      "dialog", { class: "act", "aria-labelledby": "act-title", "aria-describedby": "act-sentence", onclose: () => this.dialog.remove() },
      element("h2", { id: "act-title" }, `${this.kind.title} `, foreign(given.worker ?? job)),
      act === "scale" ? this.sizeField() : null,
      this.sentence,
      this.problem,
      element("div", { class: "dialog-buttons" }, this.leave, this.confirm),
    );
  }

  sizeField() {
    const again = atMostEvery(200, () => this.preview());
    const input = element("input", { type: "number", id: "act-workers", min: 1, step: 1, value: this.given.workers, required: true });
    input.addEventListener("input", () => {
      this.given.workers = Number(input.value);
      setText(this.problem, ""); // it was of another number
      this.asked += 1; // an answer that is under way is of another number
      this.confirm.disabled = true;
      again();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !this.confirm.disabled) this.carryOut();
    });
    return element("p", { class: "field" }, element("label", { for: "act-workers" }, "Workers wanted"), input);
  }

  open() {
    document.body.append(this.dialog);
    this.dialog.showModal();
    if (this.act === "scale") this.dialog.querySelector("input").select();
    this.preview();
  }

  path(rest) {
    return `/v1/jobs/${encodeURIComponent(this.job)}${rest}`;
  }

  /** The sentence, and the version for which it holds. */
  async preview() {
    const { act, given } = this;
    const asked = ++this.asked;
    if (act === "scale" && !(Number.isInteger(given.workers) && given.workers >= 1)) return void setText(this.sentence, "Give a whole number of workers, 1 or more.");
    const more = [["act", act], ...Object.entries(given)].map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
    try {
      const found = await get(this.path(`/preview?${more}`));
      if (asked !== this.asked) return;
      this.version = found.version;
      this.confirm.disabled = !found.possible;
      this.sentence.replaceChildren(foreignText(found.sentence));
      if (found.possible && act !== "scale" && document.activeElement === this.leave) this.confirm.focus();
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (asked !== this.asked) return;
      setText(this.sentence, "");
      this.refuse(error);
    }
  }

  async carryOut() {
    const { method, path, body } = this.kind;
    const { asked } = this;
    this.confirm.disabled = true;
    setText(this.problem, "");
    let answer;
    try {
      answer = await request(method, this.path(path(this.given)), { body: body?.(this.given), version: this.version });
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (asked === this.asked) this.confirm.disabled = !mayGoBetter(error); // else another number was typed meanwhile
      return this.refuse(error);
    }
    announce(DONE[this.act]);
    this.dialog.close();
    this.onDone(DONE[this.act], [this.version, answer.version]);
    return undefined;
  }

  /** What the controller has against it; after a conflict the sentence is asked for again, and may be confirmed again. */
  async refuse(problem) {
    if (problem.code !== "version_mismatch") return setText(this.problem, problem.message);
    setText(this.problem, "The job has changed since this question was shown, so nothing was done. The request would now do this:");
    await this.preview();
    return undefined;
  }
}
