// One job: what it does and why, its world over time, its curves, who holds what, workers, checkpoints, events; and what
// may be done with it. Everything is asked for again as long as it is shown, and at once where an event says so.
// Called by main.js for `#/jobs/JOB` and `#/jobs/JOB/WORKER` (with that worker's log open).

import { known, mayOperate } from "./access.js";
import { askFor } from "./acts.js";
import { bytes, count, duration, figure, percent, plural, since } from "./amounts.js";
import { announce } from "./announce.js";
import { Changes, isCostKnown } from "./changes.js";
import { Charts } from "./charts.js";
import { Checkpoints } from "./checkpoints.js";
import { atMostEvery, element, foreign, foreignText, setText, visible } from "./elements.js";
import { Events } from "./events.js";
import { Holdings } from "./holdings.js";
import { sentencesOf } from "./jobs_view.js";
import { LogTail } from "./log_tail.js";
import { isOver, phaseBadge, reasonWord } from "./phases.js";
import { poll } from "./poll.js";
import { get } from "./rest.js";
import { Series } from "./series.js";
import { TimeAxis } from "./time_axis.js";
import { WorkerSeconds } from "./worker_seconds.js";
import { Workers } from "./workers.js";
import { WorldPicture } from "./world_picture.js";

const SPOKEN = new Set(["lost", "failed", "stalled", "resized", "succeeded", "cancelled", "paused", "resumed", "waiting", "anew", "coordinate_missing"]);
const SAID_MILLISECONDS = 20000; // for which it says what was done
const FRESH_AFTER = 250; // milliseconds from an event to what it changed

export function showJob(place, job, worker, signal) {
  const view = new JobView(place, job, signal);
  view.start();
  if (worker) view.log.open(worker);
}

class JobView {
  constructor(place, job, signal) {
    Object.assign(this, { job, signal, axis: new TimeAxis(), series: new Series(job), worlds: [], row: null });
    this.problem = element("p", { class: "sentence", role: "alert", hidden: true });
    this.head = element("header", { class: "job-head" });
    this.content = element("div", { class: "job" });
    this.makeHead();
    this.makeSections();
    place.replaceChildren(this.problem, this.head, this.content);
  }

  makeHead() {
    this.badge = element("span", { id: "phase" });
    this.why = element("p", { class: "why", id: "reason" });
    this.attention = element("p", { class: "attention" });
    this.done = element("p", { class: "done", role: "status" });
    const press = (act, label, danger = false) =>
      element("button", { type: "button", class: danger ? "danger-quiet" : "", "data-act": act, onclick: () => this.ask(act), hidden: true }, label);
    this.buttons = {
      scale: press("scale", "Scale…"),
      checkpoint: press("checkpoint", "Save a checkpoint…"),
      pause: press("pause", "Pause…"),
      resume: press("resume", "Resume…"),
      cancel: press("cancel", "Cancel…", true),
    };
    this.acts = element("div", { class: "acts-bar", role: "group", "aria-label": "Actions" }, ...Object.values(this.buttons));
    this.facts = new Facts();
    this.head.append(element("div", { class: "headline" }, element("h1", {}, foreign(this.job)), this.badge, this.acts), this.why, this.attention, this.done, this.facts.list);
  }

  makeSections() {
    const world = section("World over time", "world");
    const curves = section("Curves", "curves");
    const holdings = section("Holdings", "holdings");
    const workers = section("Workers", "workers");
    const saved = section("Checkpoints", "checkpoints");
    const events = section("Events", "events");
    this.history = element("p", { class: "quiet note" });
    world.append(this.axis.controls());
    this.picture = new WorldPicture(world, this.axis, (chosen) => this.changes.choose(chosen), this.signal);
    this.seconds = new WorkerSeconds(world);
    this.changes = new Changes(world, this.job, this.signal);
    this.changes.onChosen((generation) => this.picture.choose(generation));
    const grid = element("div", { class: "charts" });
    curves.append(this.history, grid);
    this.charts = new Charts(grid, this.axis, this.signal);
    this.holdings = new Holdings(holdings, this.signal);
    this.workers = new Workers(workers, this.job, this.signal, { mayAct: () => mayOperate(), onLog: (worker) => this.log.open(worker), onAct: (act, worker) => this.ask(act, { worker }) });
    this.log = new LogTail(workers, this.job, this.signal);
    this.checkpoints = new Checkpoints(saved);
    this.eventsPlace = events;
    const main = element("div", { class: "column" }, world, curves, holdings);
    const side = element("div", { class: "column" }, workers, saved, events);
    this.content.append(main, side);
  }

  start() {
    const path = `/v1/jobs/${encodeURIComponent(this.job)}`;
    const asking = (seconds, rest, show) =>
      poll({ ask: async () => show(await get(path + rest, this.signal)), seconds: () => this.pace(seconds), signal: this.signal, onProblem: (problem) => this.refuse(problem) });
    const toExpect = async () => this.workers.expect(await get(`${path}/spec`, this.signal));
    poll({ ask: toExpect, seconds: () => this.pace(this.workers.isExpected ? 3600 : 2), signal: this.signal, onProblem: () => {} });
    const polls = [
      asking(1, "/summary", (row) => this.show(row)),
      asking(4, "/worlds", (found) => this.showWorlds(found.worlds)),
      asking(2, "/workers", (found) => this.showWorkers(found.workers)),
      asking(4, "/holdings", (found) => this.holdings.show(found)),
      asking(6, "/checkpoints", (found) => this.checkpoints.show(found.checkpoints)),
    ];
    for (const [span, seconds] of [["hour", 1], ["day", 30]]) {
      poll({ ask: async () => this.showSeries(span), seconds: () => this.pace(seconds), signal: this.signal, onProblem: () => {} });
    }
    this.soon = atMostEvery(FRESH_AFTER, () => polls.forEach((one) => one.soon()));
    this.events = new Events(this.eventsPlace, this.job, this.signal, (event) => this.onEvent(event));
    const ticking = setInterval(() => document.hidden || this.axis.tick(), 1000);
    this.signal.addEventListener("abort", () => clearInterval(ticking));
  }

  /** A job that is over changes no more, but may be forgotten or begun anew. */
  pace(seconds) {
    return this.row && isOver(this.row.job.phase) ? Math.max(5, seconds) : seconds;
  }

  show(row) {
    if (this.isUnknown || (this.row && this.row.job.created !== row.job.created)) return void window.dispatchEvent(new HashChangeEvent("hashchange"));
    const before = this.row?.job.phase;
    this.row = row;
    this.problem.hidden = true;
    this.content.hidden = this.head.hidden = false;
    const { job } = row;
    if (before !== job.phase) {
      this.badge.replaceChildren(phaseBadge(job.phase));
      if (before) announce(`${visible(job.job)} is ${job.phase}: ${visible(job.reason)}`);
    }
    this.head.dataset.level = row.attention.level;
    this.sentences(sentencesOf(row));
    this.facts.show(row, this.worlds);
    this.seconds.show(row.worker_seconds);
    if (this.done.versions?.every((version) => version !== job.version)) this.say("");
    this.axis.suit(job.started, job.ended);
    this.offer(job);
    return undefined;
  }

  sentences({ why, more }) {
    if (this.why.shown !== why) this.why.replaceChildren(foreignText(why));
    this.why.shown = why;
    if (this.attention.shown !== more) this.attention.replaceChildren(foreignText(more));
    this.attention.shown = more;
  }

  /** Show the acts that make sense now, to those who have the right. */
  offer(job) {
    const may = mayOperate() && !isOver(job.phase);
    for (const act of ["scale", "checkpoint", "cancel"]) this.buttons[act].hidden = !may;
    const isPaused = job.paused ?? job.phase === "paused"; // one that waits or stands still may be paused as well
    this.buttons.pause.hidden = !may || isPaused;
    this.buttons.resume.hidden = !may || !isPaused;
    this.acts.hidden = !may;
  }

  showWorlds(worlds) {
    this.worlds = worlds;
    this.picture.show(worlds);
    this.changes.show(worlds);
    this.drawCurves();
  }

  showWorkers(workers) {
    this.events?.meet(workers.map((worker) => worker.worker));
    return this.workers.show(workers, this.row !== null && isOver(this.row.job.phase));
  }

  async showSeries(span) {
    await this.series.refresh(span, this.signal);
    setText(this.history, this.series.sentence || (known()?.history ?? ""));
    this.drawCurves();
  }

  drawCurves() {
    this.charts.show(this.series.from(this.axis.bounds[0]), this.worlds);
  }

  onEvent(event) {
    this.soon();
    if (SPOKEN.has(event.kind)) announce(visible(event.message));
  }

  ask(act, given = {}) {
    const more = act === "scale" ? { workers: this.row.job.workers.wanted } : given;
    askFor(act, this.job, more, (sentence, versions) => {
      this.say(sentence, versions);
      this.soon();
    });
  }

  /** What was just done: for a while, and while the job has one of these versions, those before and after it. */
  say(sentence, versions = null) {
    clearTimeout(this.forgetting);
    setText(this.done, sentence);
    this.done.versions = versions;
    if (sentence) this.forgetting = setTimeout(() => this.say(""), SAID_MILLISECONDS);
  }

  refuse(problem) {
    if (problem.code !== "job_unknown" && this.row) return; // a part is not there; the others are
    this.isUnknown ||= problem.code === "job_unknown"; // one of that name, once there is one, is looked at anew
    this.content.hidden = this.head.hidden = true;
    this.problem.hidden = false;
    const sentence = problem.code === "job_unknown" ? ["There is no job ", foreign(this.job), this.row ? " any more: it was forgotten. " : " here. "] : [visible(problem.message), " "];
    this.problem.replaceChildren(...sentence, element("a", { href: "#/" }, "All jobs"));
  }
}

const section = (title, name) => element("section", { class: "card", id: `section-${name}`, "aria-labelledby": `title-${name}` }, element("h2", { id: `title-${name}` }, title));

/** The figures of a job that are read first. */
class Facts {
  constructor() {
    this.list = element("dl", { class: "tiles" });
    this.values = {};
    const titles = { step: "Step", world: "World", loss: "Loss", samples: "Samples", goodput: "Goodput", change: "Last change", saved: "Last checkpoint" };
    for (const [name, title] of Object.entries(titles)) {
      const value = element("dd", { "data-fact": name });
      const more = element("dd", { class: "quiet" });
      this.values[name] = { value, more };
      this.list.append(element("div", { class: `tile ${name}` }, element("dt", {}, title), value, more));
    }
    this.bar = element("progress", { max: 1, value: 0, "aria-label": "Steps done" });
    this.values.step.value.after(element("dd", { class: "bar" }, this.bar));
  }

  show(row, worlds) {
    const { job, last_resize: change, last_checkpoint: saved } = row;
    const put = (name, value, more) => {
      setText(this.values[name].value, value);
      if (typeof more === "string") setText(this.values[name].more, more);
      else this.values[name].more.replaceChildren(...more);
    };
    this.bar.hidden = !job.max_steps;
    this.bar.value = job.max_steps ? job.step / job.max_steps : 0;
    const open = job.max_steps === null && job.lanes !== null ? "until its scripts end" : "";
    const took = job.ended === null ? open : `took ${duration(job.ended - job.created)}`;
    put("step", job.max_steps === null ? count(job.step) : `${count(job.step)} of ${count(job.max_steps)}`, row.seconds_left === null ? took : `${duration(row.seconds_left)} left`);
    put("world", `${count(job.workers.active)} of ${plural(job.workers.wanted, "worker")}`, `${count(job.workers.min)} to ${job.workers.max === null ? "as many as lanes" : count(job.workers.max)}, ${job.lanes === null ? "lanes not known" : plural(job.lanes, "lane")}${job.cells ? `, ${count(job.cells.full)} of ${plural(job.cells.wanted, "cell")}` : ""}${job.idle_lanes ? `. ${job.idle_lanes}` : ""}`);
    const reported = Object.entries(job.reports ?? {}).map(([name, value]) => `${visible(name)} ${figure(value)}`);
    put("loss", figure(job.loss), [...reported, ...(row.step_seconds === null ? [] : [`${duration(row.step_seconds)} per step`])].join(", "));
    put("samples", row.samples_per_second === null ? "–" : `${figure(row.samples_per_second, 3)}/s`, job.samples === null ? "" : `${count(job.samples)} so far`);
    put("goodput", percent(row.goodput_ratio), job.goodput?.split("; ")[1] ?? "");
    put("change", change === null ? "–" : reasonWord(change.reason), change === null ? "" : costOf(change, worlds));
    put("saved", saved === null ? "none" : `step ${count(saved.step)}`, saved === null || saved.time === null ? "" : [since(saved.time)]);
  }
}

/** What the last change cost, as far as its members have said so by now. */
function costOf(change, worlds) {
  const world = worlds.find((one) => one.generation === change.generation);
  const isKnown = change.pause_seconds > 0 || isCostKnown(world);
  const pause = isKnown ? `${duration(change.pause_seconds)} pause` : "pause not known";
  const moved = isKnown ? `${bytes(change.bytes.pause)} in the pause, ` : "";
  return [`${pause}, ${change.lost_steps ? plural(change.lost_steps, "step") : "no step"} lost, ${moved}`, since(change.time)];
}
