// The same REST as everybody's: requests with the token, problems as exceptions, and streams of events that go on by
// themselves. Called by the views and acts. Shows nothing.

import { noteClock } from "./amounts.js";
import { connection } from "./connection.js";

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
  if (found === undefined) throw new Problem(0, "unreachable", "The controller's answer broke off."); // half of it says nothing
  return found;
}

export const get = (path, signal) => request("GET", path, { signal });

async function fetched(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "unreachable", "The controller does not answer.");
  }
  if (answer.status === 401 && path !== ABOUT) window.dispatchEvent(new Event("shoal-unauthorized"));
  noteClock(answer.headers.get("Shoal-Clock"), answer.headers.get("Date"));
  return answer;
}

function problemOf(answer, found) {
  const detail = typeof found?.detail === "string" ? found.detail : `The controller answered ${answer.status}.`;
  const version = answer.headers.get("ETag")?.replace(/^W?\/?"|"$/g, "") ?? null;
  return new Problem(answer.status, found?.code ?? "", detail, version);
}

/**
 * Follow server-sent events until `signal`: `onEvent(event, kind)` for each, in order and once; `onProblem(problem)` where
 * the controller refuses. A connection that ends is made again, from the last event on. Where none comes about,
 * `missed(id)` may ask otherwise for what came after that event, and returns the id of the last one.
 */
export async function follow(path, { after, onEvent, onProblem, missed, signal }) {
  const place = { id: after === undefined ? null : String(after), wait: FIRST_WAIT, way: connection.way(signal, true) };
  while (!signal.aborted) {
    try {
      await followOnce(path, place, onEvent, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status >= 400 && error.status < 500) {
        connection.answered(place.way);
        return void onProblem(error);
      }
      connection.failed(place.way, error instanceof Problem ? error : new Problem(0, "unreachable", "Events do not come."));
      if (missed) place.id = String(await missed(place.id).catch(() => place.id));
    }
    await pause(place.wait * (0.75 + Math.random() / 2), signal, connection.mended);
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
      connection.answered(place.way);
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

/** Resolves after so many milliseconds, or at once where `signal` is given up or `mended` says that there are answers. */
export function pause(milliseconds, signal, mended) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      mended?.removeEventListener("answers", done);
      resolve();
    }
    if (signal?.aborted) return done();
    signal?.addEventListener("abort", done);
    mended?.addEventListener("answers", done);
    return undefined;
  });
}
