// The workers of a job: state, host, step time, what the training thread does or waits for, memory; and what may be done
// with one. Where several train a lane together they stand by cell. Called by the job's view.

import { bytes, count, duration, percent, plural } from "./amounts.js";
import { element, foreign, foreignText, keyed, row, setText, table } from "./elements.js";
import { Evicted } from "./evicted.js";
import { showLanes } from "./holdings.js";
import { stateBadge } from "./phases.js";

const TITLES = ["Worker", "State", "Cell", "Activity", "Lanes", "A lane", "Step time", "Memory", "GPU", "Host", "Heartbeat", "Actions"];
const GONE = new Set(["lost", "left"]);
const SHOWN = 200; // rows before the rest is folded
const SLOW = 1.3; // times the median of what a lane takes
const STALE_SECONDS = 3; // at least: one look at the workers and a heartbeat
const STALE_HEARTBEATS = 2;

export class Workers {
  /** `onLog(worker)`, `onAct(act, worker)`: what the buttons do. */
  constructor(place, job, signal, { onLog, onAct, mayAct }) {
    Object.assign(this, { job, onLog, onAct, mayAct, workers: null, isWhole: false, stale: Infinity, evicted: new Evicted(job, signal) });
    this.gone = element("input", { type: "checkbox", id: "show-gone", onchange: () => this.draw() });
    this.summary = element("span", { class: "quiet" });
    this.body = element("tbody");
    this.more = element("button", { type: "button", class: "small", hidden: true, onclick: () => this.unfold() }, "Show all workers");
    const shown = (this.table = table("Workers by number", TITLES, this.body, { class: "workers" }));
    place.append(
      element("div", { class: "filters" }, this.summary, element("label", {}, this.gone, " Show workers that are gone")),
      element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Workers" }, shown),
      this.more,
    );
  }

  /** `isOver`: the job waits for nobody any more. */
  async show(workers, isOver) {
    this.workers = workers;
    this.draw();
    if (!isOver && (await this.evicted.look(workers))) this.draw();
  }

  /** Whether it is known how often they are to be heard. */
  get isExpected() {
    return this.stale < Infinity;
  }

  /** How often each of them says that it lives; until that is known nobody is called silent. */
  expect({ heartbeat_seconds: seconds }) {
    this.stale = Math.max(STALE_SECONDS, STALE_HEARTBEATS * (seconds ?? 1));
    this.draw();
  }

  /** Nobody waits for it any more. */
  isGone(worker) {
    return GONE.has(worker.state) && !this.evicted.has(worker);
  }

  unfold() {
    this.isWhole = true;
    this.draw();
  }

  draw() {
    if (this.workers === null) return; // nobody has said who is here
    const stay = this.workers.filter((worker) => !this.isGone(worker));
    this.table.classList.toggle("in-cells", this.workers.some((worker) => "cell" in worker));
    this.table.classList.toggle("on-gpus", this.workers.some((worker) => "gpu" in worker));
    const rows = byCell(this.gone.checked ? this.workers : stay);
    const evicted = stay.filter((worker) => this.evicted.has(worker)).length;
    const back = evicted ? `, ${count(evicted)} evicted, which may come back` : "";
    setText(this.summary, `${plural(stay.length - evicted, "worker")} here${back}, ${count(this.workers.length - stay.length)} gone`);
    this.more.hidden = this.isWhole || rows.length <= SHOWN;
    const takes = rows.map((worker) => worker.lane_seconds ?? 0).filter((seconds) => seconds > 0).sort((one, other) => one - other);
    const speed = { median: takes[Math.floor((takes.length - 1) / 2)] ?? 0, most: takes.at(-1) ?? 0 };
    keyed(this.body, this.isWhole ? rows : rows.slice(0, SHOWN), (worker) => worker.worker, (worker) => this.line(worker), (line, worker) => this.update(line, worker, speed));
  }

  line(worker) {
    const cells = Object.fromEntries(["state", "seat", "does", "lanes", "lane", "step", "memory", "gpu", "host", "heartbeat"].map((name) => [name, element("td", { class: name })]));
    const press = (label, words, act) => element("button", { type: "button", class: "small", onclick: act, "aria-label": words }, label);
    const name = worker.worker;
    const acts = this.mayAct()
      ? { drain: press("Drain…", `Drain ${name}`, () => this.onAct("drain", name)), lost: press("Lost…", `Confirm that ${name} is lost`, () => this.onAct("lost", name)) }
      : {};
    const log = press("Log", `Log of ${name}`, () => this.onLog(name));
    const line = row(TITLES, { "data-worker": name }, element("th", { scope: "row" }, foreign(name)), ...Object.values(cells), element("td", { class: "acts" }, log, ...Object.values(acts)));
    line.parts = cells;
    line.acts = acts;
    return line;
  }

  update(line, worker, speed) {
    updateLine(line, worker, speed, this.stale);
    const { drain, lost } = line.acts;
    const isAway = GONE.has(worker.state);
    line.classList.toggle("gone", this.isGone(worker));
    if (drain) drain.hidden = isAway || worker.state === "draining";
    if (lost) lost.hidden = isAway && !this.evicted.mayBeConfirmed(worker);
  }
}

/** Cell by cell, then the others; all as they were where a cell is one process. */
function byCell(workers) {
  const last = workers.length; // there are fewer cells
  return [...workers].sort((one, other) => (one.cell ?? last) - (other.cell ?? last));
}

/** The number of a worker's cell, and its place in it. */
function seat({ cell, coordinate, rank }) {
  const place = Object.entries(coordinate ?? {}).map(([dimension, index]) => `${dimension} ${index}`);
  const number = cell !== null && cell !== undefined ? [String(cell)] : rank === null ? [] : ["spare"];
  return [...number, ...place].join(" · ") || "–";
}

/** What a worker's GPU is at; empty where it has none, or tells nothing. */
function gpuFigures(gpu) {
  if (!gpu) return "";
  const { index, use_ratio: use, memory_bytes: used, memory_total_bytes: total, celsius, throttled } = gpu;
  const figures = [use !== null && percent(use), used !== null && `${bytes(used)} of ${bytes(total)}`, celsius !== null && `${count(celsius)} °C`, ...(throttled ?? [])].filter(Boolean);
  return figures.length ? `${index}: ${figures.join(" · ").replaceAll("_", " ")}` : "";
}

/** A bar of what a lane takes on a worker, as long as that of the slowest at most. */
function showLaneSeconds(place, seconds, { median, most }) {
  const slow = seconds > SLOW * median;
  place.classList.toggle("warn", slow);
  const bar = () => element("meter", { min: "0", max: String(most), value: String(seconds), "aria-hidden": "true" });
  once(place, `${seconds} ${most} ${slow}`, () => (seconds > 0 ? [bar(), ` ${duration(seconds)}${slow ? " (slow)" : ""}`] : ["–"]));
}

function updateLine(line, worker, speed, stale) {
  const { parts } = line;
  once(parts.state, worker.state, () => [stateBadge(worker.state)]);
  setText(parts.seat, seat(worker));
  const does = worker.why || worker.activity?.sentence || "";
  once(parts.does, does, () => [foreignText(does || "–")]);
  showLanes(parts.lanes, worker.lanes);
  showLaneSeconds(parts.lane, worker.lane_seconds ?? 0, speed);
  setText(parts.step, worker.step_seconds > 0 ? duration(worker.step_seconds) : "–");
  setText(parts.memory, worker.memory_bytes ? bytes(worker.memory_bytes) : "–");
  const gpu = gpuFigures(worker.gpu) || worker.gpu?.why || "–";
  once(parts.gpu, gpu + worker.gpu?.why, () => [foreign(gpu, { title: worker.gpu?.why || worker.gpu?.name || null })]);
  parts.gpu.classList.toggle("warn", worker.gpu?.throttled?.some((reason) => reason !== "power_cap") ?? false); // at full load a cap is usual
  const host = worker.domain && worker.domain !== worker.host ? `${worker.host} · ${worker.domain}` : worker.host;
  once(parts.host, host + worker.pid, () => [foreign(host || "–", { title: worker.pid ? `pid ${worker.pid}` : null })]);
  const heard = worker.heartbeat_age_seconds;
  setText(parts.heartbeat, heard === null || heard === undefined ? "–" : heard <= stale ? "fresh" : `${duration(heard)} ago`);
  parts.heartbeat.classList.toggle("warn", heard > stale);
}

function once(place, key, make) {
  if (place.shown === key) return;
  place.shown = key;
  place.replaceChildren(...make());
}
