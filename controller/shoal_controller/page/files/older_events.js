// Where in a job's history events are that nobody has yet: its newest, and those before one. REST gives events after a
// revision, oldest first, and of a long job there are thousands: they are asked for in pieces. Shows nothing.
// Called by events.js.

import { get } from "./rest.js";

const PIECE = 300; // events at first
/** All kinds that REST has (docs/events.md): of a long job a reader may look for one that is not here yet. */
export const EVENT_KINDS = [
  "anew", "audit", "begun", "cancelled", "cancelling", "checkpoint_damaged", "checkpoint_failed", "checkpoint_found",
  "checkpoint_passed_over", "checkpoint_saved", "checkpoint_skipped", "claim_refused", "coordinate_missing",
  "corrupt_block", "disconnected", "dismissed", "draining", "failed", "heard", "joined", "kept_out", "killed",
  "lanes_shared", "left", "lost", "micro_batches_skipped", "not_bit_exact", "not_finite", "open", "other_values",
  "paired", "parting", "paused", "pending", "plan", "prepare", "refused", "resized", "restoring", "resumed",
  "returned", "saving", "scaled", "seated", "silent", "slow", "stalled", "starting", "stays", "straggler",
  "succeeded", "survives", "suspected", "trains", "unreachable", "unreadable_event", "waiting",
];
const WIDER = 4; // times as many revisions, where nothing was in them: the oldest events are dropped
const MOST = 10000; // of one answer; all of them are read for a filter, however few it lets through

/** The revision after which the newest events are: `PIECE` of them at least, if there are so many. */
export async function newestPlace(path, job, signal) {
  const newest = await get(`/v1/events?job=${encodeURIComponent(job)}`, signal);
  const last = newest.events.at(-1)?.revision ?? (await lastBySearch(path, signal));
  return Math.max(0, last - PIECE);
}

/** The last revision but for `PIECE` at most, of a job that the feed of all jobs has forgotten. */
async function lastBySearch(path, signal) {
  let some = 0; // this revision there is
  let none = null; // there is nothing after this one
  while (none === null || none - some > PIECE) {
    const after = none === null ? Math.max(PIECE, 2 * some) : Math.floor((some + none) / 2);
    const [event] = (await get(`${path}?after=${after}&limit=1`, signal)).events;
    if (event) some = event.revision;
    else none = after;
  }
  return some;
}

/** The nearest events before a revision that fit `query` (`&kind=…&worker=…`), and after which one they are all of them. */
export async function eventsBefore(path, revision, query, signal) {
  for (let piece = query ? MOST : PIECE; ; piece *= WIDER) {
    const reach = Math.max(0, revision - 1 - piece);
    const found = await get(`${path}?after=${reach}&limit=${Math.min(piece, MOST)}${query}`, signal);
    const events = found.events.filter((event) => event.revision < revision);
    if (events.length || reach === 0) return { events, reach };
  }
}
