// All jobs, one line each, as the controller sorts them: who needs attention first. The figures come every two seconds
// and with every event, the pictures of the last hour every half minute.
// Called by main.js for `#/`.

import { count, duration, figure, moment, percent, plural, since } from "./amounts.js";
import { announce } from "./announce.js";
import { atMostEvery, element, foreign, foreignText, keyed, setText } from "./elements.js";
import { phaseBadge } from "./phases.js";
import { poll } from "./poll.js";
import { follow, get } from "./rest.js";
import { curve, world } from "./sparkline.js";

const FIGURES_SECONDS = 2;
const HOUR_SECONDS = 30;

export function showJobs(place, signal) {
  const view = new JobsView(place);
  const figures = poll({
    ask: async () => view.show(await get(`/v1/overview?series=${view.wantsHour()}`, signal)),
    seconds: () => FIGURES_SECONDS,
    signal,
    onProblem: (problem) => view.refuse(problem),
  });
  const soon = atMostEvery(500, () => figures.soon());
  follow("/v1/events", { onEvent: soon, onProblem: (problem) => view.refuse(problem), signal });
}

class JobsView {
  constructor(place) {
    this.rows = [];
    this.hours = new Map();
    this.hourAsked = 0;
    this.wanted = "";
    this.summary = element("p", { class: "quiet", id: "jobs-summary" });
    this.list = element("ul", { class: "jobs", "aria-label": "Jobs, those that need attention first" });
    this.problem = element("p", { class: "problem", role: "alert" });
    this.filter = element("input", {
      type: "search", id: "filter", placeholder: "Name or phase", "aria-label": "Show only jobs whose name or phase has this text",
      oninput: () => this.filtered(),
    });
    const head = element("div", { class: "headline" }, element("h1", {}, "Jobs"), this.summary, this.filter);
    const titles = ["Job", "World", "Step", "Loss", "Last change", "Checkpoint"].map((title) => element("span", {}, title));
    place.replaceChildren(head, this.problem, element("div", { class: "job-titles", "aria-hidden": "true" }, ...titles), this.list);
  }

  wantsHour() {
    const due = performance.now() - this.hourAsked > 1000 * HOUR_SECONDS || !this.hourAsked;
    if (due) this.hourAsked = performance.now();
    return due;
  }

  show(overview) {
    this.rows = overview.jobs;
    for (const row of this.rows) if (row.hour) this.hours.set(row.job.job, row.hour);
    setText(this.problem, "");
    const urgent = this.rows.filter((row) => row.attention.level === "act").length;
    const more = overview.more ? `; ${plural(overview.more, "further job")} not shown` : "";
    const sentence = this.rows.length
      ? `${plural(this.rows.length, "job")}, ${urgent ? `${count(urgent)} ${urgent === 1 ? "needs" : "need"} attention` : "none needs attention"}${more}`
      : "No jobs yet. Start one: shoal run script.py";
    setText(this.summary, sentence);
    announce(sentence);
    keyed(this.list, this.rows, (row) => row.job.job, jobLine, (line, row) => updateLine(line, row, this.hours.get(row.job.job)));
    this.lines = this.list.keyedChildren;
    this.filtered();
  }

  /** Hide what the filter leaves out: lines that stay cost nothing. */
  filtered() {
    const wanted = this.filter.value.trim().toLowerCase();
    const fits = ({ job }) => !wanted || job.job.toLowerCase().includes(wanted) || job.phase.includes(wanted);
    for (const row of this.rows) this.lines?.get(row.job.job)?.toggleAttribute("hidden", !fits(row));
  }

  refuse(problem) {
    setText(this.problem, problem.message);
  }
}

const cell = (name, ...children) =>
  element("div", { class: `cell ${name}` }, element("span", { class: "cell-title" }, CELL_TITLES[name]), ...children);
const CELL_TITLES = { world: "World", step: "Step", loss: "Loss", change: "Last change", checkpoint: "Checkpoint" };

function jobLine({ job }) {
  const parts = {
    name: element("a", { class: "job-name", href: `#/jobs/${encodeURIComponent(job.job)}` }, foreign(job.job)),
    badge: element("span"),
    why: element("p", { class: "why" }),
    attention: element("p", { class: "attention" }),
    world: element("span", { class: "big" }),
    worldPicture: element("span", { class: "picture" }),
    step: element("span", { class: "big" }),
    bar: element("progress", { max: 1, value: 0, "aria-label": "Steps done" }),
    left: element("span", { class: "quiet" }),
    loss: element("span", { class: "big" }),
    lossPicture: element("span", { class: "picture" }),
    change: element("span"),
    checkpoint: element("span"),
  };
  const line = element(
    "li", { class: "job-line" },
    element("div", { class: "cell who" }, element("h2", {}, parts.name), parts.badge, parts.why, parts.attention),
    cell("world", parts.world, parts.worldPicture),
    cell("step", parts.step, parts.bar, parts.left),
    cell("loss", parts.loss, parts.lossPicture),
    cell("change", parts.change),
    cell("checkpoint", parts.checkpoint),
  );
  line.parts = parts;
  return line;
}

function updateLine(line, row, hour) {
  const { job } = row;
  const { parts } = line;
  line.dataset.level = row.attention.level;
  once(parts, "badge", job.phase, () => [phaseBadge(job.phase)]);
  const { why, more } = sentencesOf(row);
  once(parts, "why", why, (text) => [foreignText(text)]);
  once(parts, "attention", more, (text) => [foreignText(text)]);
  setText(parts.world, `${count(job.workers.active)}/${count(job.workers.wanted)}`);
  const last = job.lanes === null || job.max_steps !== null ? job.max_steps : "open";
  setText(parts.step, last === null ? count(job.step) : `${count(job.step)}/${last === "open" ? last : count(last)}`);
  parts.bar.hidden = job.max_steps === null;
  parts.bar.value = job.max_steps ? job.step / job.max_steps : 0;
  setText(parts.left, timeLeft(row));
  setText(parts.loss, figure(job.loss));
  once(parts, "worldPicture", hour, () => (hour ? [world(hour)] : []));
  once(parts, "lossPicture", hour, () => (hour ? [curve(hour, "loss")] : []));
  once(parts, "change", `${row.last_resize?.generation} ${row.last_resize?.sentence}`, () => lastChange(row.last_resize));
  once(parts, "checkpoint", `${row.last_checkpoint?.step} ${row.last_checkpoint?.time}`, () => lastCheckpoint(row.last_checkpoint));
}

/** Why it is in its phase, and what else is to be known; said once where one contains the other. */
export function sentencesOf({ job, attention }) {
  if (!job.reason || attention.sentence.includes(job.reason)) return { why: attention.sentence, more: "" };
  return { why: job.reason, more: job.reason.includes(attention.sentence) ? "" : attention.sentence };
}

/** Fill a part anew only where what it shows has changed. */
function once(parts, name, shown, make) {
  if (parts[name].shown === shown) return;
  parts[name].shown = shown;
  parts[name].replaceChildren(...make(shown));
}

function timeLeft({ job, seconds_left: left, goodput_ratio: goodput }) {
  if (job.ended !== null) return `took ${duration(job.ended - job.created)}`;
  const share = goodput > 0 ? ` · goodput ${percent(goodput)}` : "";
  return left === null ? share.slice(3) : `${duration(left)} left${share}`;
}

const lastChange = (resize) =>
  resize === null ? ["–"] : [element("span", {}, foreign(resize.sentence)), element("span", { class: "quiet" }, since(resize.time))];

const lastCheckpoint = (saved) =>
  saved === null
    ? [element("span", { class: "quiet" }, "none")]
    : [element("span", {}, `step ${count(saved.step)}`), element("span", { class: "quiet" }, saved.time === null ? "" : since(saved.time))];
