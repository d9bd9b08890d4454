// Whether the controller answers, as one steady state: every poll and every stream says how its last request ended, and
// the banner is made of all of them together. Shows nothing, asks nothing.
// Fed by poll.js, rest.js and main.js; heard by main.js, and by polls and streams that wait.

const GRACE = 2000; // milliseconds: a refusal, or a stream that breaks off, is said only if it lasts
const AGAIN = 30000; // trouble that comes back so soon makes an unsteady connection
const HOLD = 10000; // for which the banner then stays
const TICK = 500;

export class Connection {
  constructor({ now = () => performance.now(), clock = () => Date.now() / 1000 } = {}) {
    Object.assign(this, { now, clock, failing: new Map(), answeredAt: -Infinity, state: null, timer: null });
    this.listeners = new Set();
    this.mended = new EventTarget(); // "answers": after a loss; "whole": nothing fails any more
    this.calmSince = -Infinity; // when the banner was last taken away
    this.troubledAt = -Infinity;
    this.hold = 0;
  }

  /** Whoever asks again and again, or follows a stream, until `signal`. What failed then stays so until another one asks. */
  way(signal, isStream = false) {
    const way = { isStream, isOver: false };
    signal.addEventListener("abort", () => (way.isOver = true));
    return way;
  }

  answered(way) {
    const now = this.now();
    const isBack = !way.isStream && this.lost !== undefined;
    if (!way.isStream) this.answeredAt = now;
    if (isBack) for (const one of this.failing.values()) one.waits = now; // they have not been asked since
    const wasFailing = this.failing.delete(way);
    const isMended = this.inherited(way).length > 0 || wasFailing;
    this.update();
    if (isBack) this.mended.dispatchEvent(new Event("answers"));
    if (isMended && !this.failing.size) this.mended.dispatchEvent(new Event("whole"));
  }

  /** `problem`: with its `status`, 0 where there was no answer at all, and a `message`. */
  failed(way, problem) {
    const now = this.now();
    const before = [this.failing.get(way), ...this.inherited(way)].find(Boolean) ?? { at: now, waits: now, clock: this.clock() };
    this.failing.set(way, { ...before, way, status: problem.status, message: problem.message });
    this.update();
  }

  /** What failed of those that were in this one's place, and ask no more: taken away here. */
  inherited(way) {
    const over = [...this.failing.values()].filter((one) => one.way.isOver && one.way.isStream === way.isStream);
    for (const one of over) this.failing.delete(one.way);
    return over;
  }

  /** What nobody has answered since; undefined: somebody has. */
  get lost() {
    return [...this.failing.values()].find((one) => !one.way.isStream && one.status === 0 && one.at > this.answeredAt);
  }

  /** What is wrong now: nothing (null), "lost" where nobody answers, "partly", or still what it was. */
  trouble(now) {
    if (!this.failing.size) return null;
    const { lost } = this;
    if (lost) return { kind: "lost", since: lost.clock, why: lost.message };
    const lasting = [...this.failing.values()].find((one) => now - one.waits >= GRACE);
    return lasting ? { kind: "partly", since: lasting.clock, why: lasting.message, lasts: now - lasting.waits } : this.state;
  }

  update() {
    const now = this.now();
    const found = this.trouble(now);
    if (found) this.troubledAt = now;
    if (found && !this.state) this.hold = now - this.calmSince < AGAIN ? HOLD : 0;
    this.become(this.steady(found, now), now);
    clearTimeout(this.timer);
    this.timer = this.state || this.failing.size ? setTimeout(() => this.update(), TICK) : null;
  }

  /** What is shown of it: what comes and goes is one state, until it has gone or stayed for a while. */
  steady(found, now) {
    if (!this.hold) return found;
    if (found?.kind === "lost" && now - this.answeredAt >= HOLD) return found;
    if (found?.kind === "partly" && found.lasts >= HOLD) return found;
    if (!found && now - this.troubledAt >= this.hold) return null;
    return { kind: "unsteady", since: this.state?.since ?? found.since, why: found?.why ?? this.state.why };
  }

  /** A state of the same kind stays as it was first said. */
  become(state, now) {
    const before = this.state;
    if (before?.kind === state?.kind) return;
    this.state = state;
    if (!state) this.calmSince = now;
    for (const listener of this.listeners) listener(state);
  }
}

/** The page's one. */
export const connection = new Connection();
