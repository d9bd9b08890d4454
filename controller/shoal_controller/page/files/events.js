// A job's events as they come, newest first, filtered by kind and worker; each with its sentence. As many as a page can
// hold are kept. Called by the job's view, which hears every event too.

import { moment } from "./amounts.js";
import { element, foreign, foreignText, keyed } from "./elements.js";
import { kindBadge } from "./phases.js";
import { Problem, follow, get } from "./rest.js";

const KEPT = 2000;
const FIRST = 300;
const SHOWN = 60;
const EVERY_MILLISECONDS = 200;
const ALL = "";

export class Events {
  constructor(place, job, signal, onEvent) {
    Object.assign(this, { job, signal, onEvent, events: [], shown: SHOWN, timer: null });
    this.kinds = element("select", { id: "kind", onchange: () => this.refill() });
    this.workers = element("select", { id: "worker", onchange: () => this.refill() });
    this.options = new Map([[this.kinds, new Set()], [this.workers, new Set()]]);
    this.list = element("ol", { class: "events", "aria-label": "Events, newest first" });
    this.none = element("p", { class: "quiet" }, "No event is like that.");
    this.more = element("button", { type: "button", class: "small", onclick: () => this.widen() }, "Show older ones");
    this.kinds.append(element("option", { value: ALL }, "all kinds"));
    this.workers.append(element("option", { value: ALL }, "all workers"));
    const filters = element("div", { class: "filters" }, element("label", { for: "kind" }, "Kind"), this.kinds, element("label", { for: "worker" }, "Worker"), this.workers);
    place.append(filters, this.none, this.list, this.more);
    this.start();
  }

  async start() {
    const path = `/v1/jobs/${encodeURIComponent(this.job)}/events`;
    let after = 0;
    try {
      const found = await get(`${path}?after=${await this.place()}`, this.signal);
      for (const event of found.events) this.take(event);
      after = found.events.at(-1)?.revision ?? 0;
      this.draw();
    } catch (error) {
      if (this.signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      if (error.status >= 400 && error.status < 500) return; // the job's view says it
    }
    const missed = (id) => this.catchUp(`${path}?after=${id}`, id);
    follow(path, { after, onEvent: (event) => this.add(event), onProblem: () => {}, missed, signal: this.signal });
  }

  /** Where they do not come by themselves, ask for them. Returns the revision of the last one. */
  async catchUp(path, id) {
    const found = await get(path, this.signal);
    for (const event of found.events) this.add(event);
    return found.events.at(-1)?.revision ?? id;
  }

  /** The revision from which on the newest events are asked for: a long job has thousands. */
  async place() {
    const newest = await get(`/v1/events?job=${encodeURIComponent(this.job)}`, this.signal);
    return Math.max(0, (newest.events.at(-1)?.revision ?? 0) - FIRST);
  }

  take(event) {
    if (event.revision <= (this.events.at(-1)?.revision ?? 0)) return;
    this.events.push(event);
    if (this.events.length > KEPT) this.events.splice(0, this.events.length - KEPT);
    this.offer(this.kinds, event.kind, event.kind.replaceAll("_", " "));
    if (event.worker) this.offer(this.workers, event.worker, event.worker);
  }

  add(event) {
    this.take(event);
    this.onEvent(event);
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, EVERY_MILLISECONDS);
  }

  /** One more choice in a filter, in the order of names. */
  offer(select, value, words) {
    const known = this.options.get(select);
    if (known.has(value)) return;
    known.add(value);
    const option = element("option", { value }, words.length > 40 ? `${words.slice(0, 40)}…` : words);
    const order = (one, other) => one.localeCompare(other, undefined, { numeric: true });
    const next = [...select.options].slice(1).find((one) => order(one.value, value) > 0);
    select.insertBefore(option, next ?? null);
  }

  refill() {
    this.shown = SHOWN;
    this.draw();
  }

  widen() {
    this.shown += 4 * SHOWN;
    this.draw();
  }

  draw() {
    if (this.signal.aborted) return;
    const kind = this.kinds.value;
    const worker = this.workers.value;
    const fitting = this.events.filter((event) => (kind === ALL || event.kind === kind) && (worker === ALL || event.worker === worker));
    this.none.hidden = fitting.length > 0;
    this.more.hidden = fitting.length <= this.shown;
    keyed(this.list, fitting.slice(-this.shown).reverse(), (event) => event.revision, eventLine);
  }
}

function eventLine(event) {
  return element(
    "li", { "data-kind": event.kind },
    moment(event.time),
    kindBadge(event.kind),
    element("span", { class: "message" }, event.worker ? element("b", {}, foreign(event.worker), " ") : null, foreignText(event.message)),
  );
}
