// A job's events as they come, newest first, filtered by kind and worker; each with its sentence. As many as a page can
// hold are kept; older ones, and those that a filter lets through, are asked for when they are wanted.
// Called by the job's view, which hears every event too.

import { moment } from "./amounts.js";
import { element, foreign, foreignText, keyed } from "./elements.js";
import { EVENT_KINDS, eventsBefore, newestPlace } from "./older_events.js";
import { kindBadge } from "./phases.js";
import { Problem, follow, get } from "./rest.js";

const KEPT = 2000;
const SHOWN = 60;
const EVERY_MILLISECONDS = 200;
const ALL = "";
const MOST_OLDER = 10000;
const ORDER = new Intl.Collator(undefined, { numeric: true });

export class Events {
  constructor(place, job, signal, onEvent) {
    Object.assign(this, { job, signal, onEvent, events: [], shown: SHOWN, timer: null });
    this.path = `/v1/jobs/${encodeURIComponent(job)}/events`;
    this.older = []; // those that fit the filter, before `events`
    this.reach = 0; // after this revision all that fit are here
    this.begin = 0; // after this one all are in `events`
    this.filler = null; // who asks for older ones now
    this.kinds = element("select", { id: "kind", onchange: () => this.refill() });
    this.workers = element("select", { id: "worker", onchange: () => this.refill() });
    this.options = new Map([[this.kinds, new Set()], [this.workers, new Set()]]);
    this.list = element("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" });
    this.none = element("p", { class: "quiet", role: "status", hidden: true }, "No event is like that.");
    this.more = element("button", { type: "button", class: "small", hidden: true, onclick: () => this.widen() }, "Show older ones");
    this.kinds.append(element("option", { value: ALL }, "all kinds"));
    this.workers.append(element("option", { value: ALL }, "all workers"));
    const filters = element("div", { class: "filters" }, element("label", { for: "kind" }, "Kind"), this.kinds, element("label", { for: "worker" }, "Worker"), this.workers);
    place.append(filters, this.none, this.list, this.more);
    this.start();
  }

  async start() {
    const { path } = this;
    let after = 0;
    try {
      const begin = await newestPlace(path, this.job, this.signal);
      const found = await get(`${path}?after=${begin}`, this.signal);
      this.begin = this.reach = begin;
      if (begin) for (const kind of EVENT_KINDS) this.offer(this.kinds, kind, kind.replaceAll("_", " "));
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

  /** Workers that may have events which are not here. */
  meet(workers) {
    if (this.begin) for (const worker of workers) this.offer(this.workers, worker, worker);
  }

  take(event) {
    if (event.revision <= (this.events.at(-1)?.revision ?? 0)) return;
    this.events.push(event);
    if (this.events.length > KEPT) this.forget(this.events.splice(0, this.events.length - KEPT));
    this.offerOf(event);
  }

  /** The oldest ones go, but where older ones were asked for. */
  forget(events) {
    const areKept = this.filler !== null || this.reach < this.begin;
    this.begin = events.at(-1).revision;
    if (!areKept) return void (this.reach = this.begin);
    this.older.push(...events.filter((event) => this.fits(event)));
    const over = this.older.length - MOST_OLDER;
    if (over > 0) this.reach = this.older.splice(0, over).at(-1).revision;
  }

  offerOf(event) {
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
    const last = select.options[select.options.length - 1]; // workers come in the order of their numbers
    const isLast = last.value === ALL || ORDER.compare(last.value, value) <= 0;
    const next = isLast ? null : [...select.options].slice(1).find((one) => ORDER.compare(one.value, value) > 0);
    select.insertBefore(option, next);
  }

  refill() {
    this.shown = SHOWN;
    this.older = [];
    this.reach = this.begin;
    this.filler?.abort(); // what is asked now is of another filter
    this.filler = null;
    this.fill();
  }

  widen() {
    this.shown += 4 * SHOWN;
    this.fill();
  }

  fits(event) {
    const kind = this.kinds.value;
    const worker = this.workers.value;
    return (kind === ALL || event.kind === kind) && (worker === ALL || event.worker === worker);
  }

  fitting() {
    return [...this.older, ...this.events.filter((event) => this.fits(event))];
  }

  /** Show what is here, and ask for older ones until there are as many as are to be shown. */
  async fill() {
    this.draw();
    if (this.filler) return;
    const filler = (this.filler = new AbortController());
    const signal = AbortSignal.any([this.signal, filler.signal]);
    this.list.setAttribute("aria-busy", "true");
    try {
      while (this.reach && this.fitting().length < this.shown) {
        const { reach } = this;
        const found = await eventsBefore(this.path, reach + 1, this.query(), signal);
        for (const event of found.events) this.offerOf(event);
        this.older.unshift(...found.events);
        this.reach = found.reach;
      }
    } catch (error) {
      if (filler.signal.aborted) return;
      if (!(error instanceof Problem) && !this.signal.aborted) throw error; // else the button stays
    }
    this.filler = null;
    this.list.setAttribute("aria-busy", "false");
    this.draw();
  }

  /** The filter as REST has it. */
  query() {
    return [this.kinds, this.workers].map((one) => (one.value === ALL ? "" : `&${one.id}=${encodeURIComponent(one.value)}`)).join("");
  }

  draw() {
    if (this.signal.aborted) return;
    const fitting = this.fitting();
    this.none.hidden = fitting.length > 0 || this.reach > 0;
    this.more.hidden = fitting.length <= this.shown && this.reach === 0;
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
