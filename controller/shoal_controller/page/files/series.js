// The controller's own history of one job as columns: the last hour at 1 s, the last day at 30 s. Knows no picture.
// Called by the job's view and the charts.

import { get } from "./rest.js";

const COLUMNS = ["step", "loss", "step_seconds", "samples_per_second", "goodput_ratio", "active", "wanted"];
const KEPT = { hour: 3700, day: 2900 };
const SLACK = 60; // seconds that the hour may lack at its beginning
const GAP = 3.5; // so many missing points are a gap, not a line

class Columns {
  constructor(span) {
    this.span = span;
    this.run = null;
    this.clear();
  }

  clear() {
    this.times = [];
    for (const name of COLUMNS) this[name] = [];
  }

  /** The clock was set back: what is now the future is measured once more. */
  forgetAfter(time) {
    const kept = this.times.findLastIndex((one) => one <= time) + 1;
    for (const name of ["times", ...COLUMNS]) this[name].length = kept;
  }

  add(answer) {
    const every = answer.every_seconds;
    answer.times.forEach((time, index) => {
      const before = this.times.at(-1);
      if (before !== undefined && time <= before) return;
      if (before !== undefined && time - before > GAP * every) this.push(before + every, () => null);
      this.push(time, (name) => answer[name][index] ?? null);
    });
    const surplus = this.times.length - KEPT[this.span];
    if (surplus > 0) for (const name of ["times", ...COLUMNS]) this[name].splice(0, surplus);
  }

  push(time, value) {
    this.times.push(time);
    for (const name of COLUMNS) this[name].push(value(name));
  }
}

export class Series {
  constructor(job) {
    this.job = job;
    this.hour = new Columns("hour");
    this.day = new Columns("day");
    this.sentence = "";
  }

  /** Ask for what is new since the last time. */
  async refresh(span, signal) {
    const columns = this[span];
    const last = columns.times.at(-1);
    const after = last === undefined ? "" : `&after=${last}`;
    const answer = await get(`/v1/jobs/${encodeURIComponent(this.job)}/series?span=${span}${after}`, signal);
    this.sentence = answer.sentence;
    if (answer.since === null) return undefined; // nobody records now; what was recorded stays
    const run = `${answer.run} ${answer.since}`;
    const isAnew = columns.run !== null && columns.run !== run; // another run, or another leader: its history begins anew
    columns.run = run;
    if (isAnew) columns.clear();
    else if (last > answer.time) columns.forgetAfter(answer.time);
    else return void columns.add(answer);
    return this.refresh(span, signal);
  }

  /** The columns that show the time from then on best: every second, unless the coarser ones go back further. */
  from(begin) {
    if (!this.day.times.length) return this.hour;
    const known = Math.max(begin, this.day.times[0]);
    return (this.hour.times[0] ?? Infinity) <= known + SLACK ? this.hour : this.day;
  }
}
