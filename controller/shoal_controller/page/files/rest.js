// The same REST as everybody's: requests with the token, problems as exceptions, and streams of events that go on by
// themselves. Called by the views and acts. Shows nothing.

import { noteClock } from "./amounts.js";

const TOKEN = "shoal-token"; // in sessionStorage: of this tab, gone with it
export const ABOUT = "/v1/about"; // where a token is tried
const REQUEST_MILLISECONDS = 15000;
const SILENT_MILLISECONDS = 25000; // the controller says something every 10 s at least
const FIRST_WAIT = 400;
const LONGEST_WAIT = 8000;

/** What the controller answered instead (RFC 9457), or that it did not (`status` 0). */
export class Problem extends Error {
  constructor(status, code, detail, version = null) {
    super(detail);
    this.status = status;
    this.code = code;
    this.version = version; // of the job, where it was changed meanwhile
  }
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

export function keepToken(given) {
  if (given) sessionStorage.setItem(TOKEN, given);
  else sessionStorage.removeItem(TOKEN);
}

const listeners = new Set();
let lostSince = null;

/** Call `listener(null)` whenever the controller answers, `listener(since)` whenever it does not. */
export function onConnection(listener) {
  listeners.add(listener);
  listener(lostSince);
}

function noteConnection(answers) {
  const before = lostSince;
  lostSince = answers ? null : (lostSince ?? Date.now() / 1000);
  if (before !== lostSince) for (const listener of listeners) listener(lostSince);
}

function headersWith(more) {
  const shown = token();
  return shown ? { Authorization: `Bearer ${shown}`, ...more } : more;
}

/** The JSON that the controller answers; raises Problem. */
export async function request(method, path, { body, version, signal } = {}) {
  const headers = headersWith({ Accept: "application/json" });
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (version) headers["If-Match"] = `"${version}"`;
  const limit = AbortSignal.timeout(REQUEST_MILLISECONDS);
  const either = signal ? AbortSignal.any([signal, limit]) : limit;
  const answer = await fetched(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: either });
  const found = await answer.json().catch(() => undefined);
  if (!answer.ok) throw problemOf(answer, found);
  if (found === undefined) {
    noteConnection(false); // it broke off: what half of it says is not known
    throw new Problem(0, "unreachable", "The controller's answer broke off.");
  }
  return found;
}

export const get = (path, signal) => request("GET", path, { signal });

async function fetched(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    noteConnection(false);
    throw new Problem(0, "unreachable", "The controller does not answer.");
  }
  if (answer.status === 401 && path !== ABOUT) window.dispatchEvent(new Event("shoal-unauthorized"));
  const leads = answer.status !== 503 && answer.status !== 502 && answer.status !== 504;
  noteConnection(leads);
  if (answer.headers.get("Date")) noteClock(answer.headers.get("Date"));
  return answer;
}

function problemOf(answer, found) {
  const detail = typeof found?.detail === "string" ? found.detail : `The controller answered ${answer.status}.`;
  const version = answer.headers.get("ETag")?.replace(/^W?\/?"|"$/g, "") ?? null;
  return new Problem(answer.status, found?.code ?? "", detail, version);
}

/**
 * Follow server-sent events until `signal`: `onEvent(event, kind)` for each, in order and once; `onProblem(problem)` where
 * the controller refuses. A connection that ends is made again, from the last event on.
 */
export async function follow(path, { after, onEvent, onProblem, signal }) {
  const place = { id: after === undefined ? null : String(after), wait: FIRST_WAIT };
  while (!signal.aborted) {
    try {
      await followOnce(path, place, onEvent, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status >= 400 && error.status < 500) return void onProblem(error);
      noteConnection(false);
    }
    await pause(place.wait * (0.75 + Math.random() / 2), signal);
    place.wait = Math.min(LONGEST_WAIT, 2 * place.wait);
  }
}

async function followOnce(path, place, onEvent, signal) {
  const silence = new AbortController();
  const either = AbortSignal.any([signal, silence.signal]);
  const headers = headersWith({ Accept: "text/event-stream", ...(place.id === null ? {} : { "Last-Event-ID": place.id }) });
  let timer = setTimeout(() => silence.abort(), SILENT_MILLISECONDS);
  try {
    const answer = await fetched(path, { headers, signal: either });
    if (!answer.ok) throw problemOf(answer, await answer.json().catch(() => null));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const lines = new EventLines(place, onEvent);
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MILLISECONDS);
      place.wait = FIRST_WAIT;
      noteConnection(true);
      lines.feed(part.value);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Cuts what a stream brings into events. */
class EventLines {
  constructor(place, onEvent) {
    this.place = place;
    this.onEvent = onEvent;
    this.rest = "";
    this.id = null;
    this.kind = "message";
    this.data = [];
  }

  feed(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  line(line) {
    if (line.startsWith("data:")) this.data.push(line.slice(5).trimStart());
    else if (line.startsWith("event:")) this.kind = line.slice(6).trim();
    else if (line.startsWith("id:")) this.id = line.slice(3).trim();
    else if (line === "") this.dispatch();
  }

  dispatch() {
    const { data, id, kind } = this;
    this.data = [];
    this.kind = "message";
    if (id !== null) this.place.id = id;
    if (data.length) this.onEvent(JSON.parse(data.join("\n")), kind);
  }
}

/** Resolves after so many milliseconds, or at once where `signal` is given up. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
    if (signal?.aborted) done();
    else signal?.addEventListener("abort", done);
  });
}
