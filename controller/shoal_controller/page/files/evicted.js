// Which workers that REST calls lost are not known to be dead: evicted for their silence, they may come back, and the job
// may wait for what they hold until somebody says that they are gone. The controller is asked what it would say to that.
// Called by the table of workers.

import { Problem, get } from "./rest.js";

const AT_ONCE = 4; // questions with each look: of many the others are asked about later
const EVERY_MILLISECONDS = 1500; // looks, however often events have workers shown

export class Evicted {
  constructor(job, signal) {
    this.path = `/v1/jobs/${encodeURIComponent(job)}/preview?act=lost&worker=`;
    this.signal = signal;
    this.answers = new Map(); // by worker: for which `why`, in which look, whether it may come back and be confirmed as lost
    this.looks = 0;
    this.looked = -Infinity;
  }

  /**
   * Look at these workers again: first at those that nobody has asked about, the youngest first. Who is dead stays so; what
   * is not answered is asked again. Returns whether anything was answered.
   */
  async look(workers) {
    if (performance.now() - this.looked < EVERY_MILLISECONDS) return false;
    this.looked = performance.now();
    this.looks += 1;
    const due = workers.filter((worker) => worker.state === "lost" && this.answerOf(worker)?.mayReturn !== false).reverse();
    const asked = due.sort((one, other) => this.lookAt(one) - this.lookAt(other)).slice(0, AT_ONCE);
    const found = await Promise.all(asked.map(({ worker }) => this.ask(worker)));
    asked.forEach(({ worker, why }, index) => {
      if (found[index] === null) return;
      const { possible, code } = found[index];
      this.answers.set(worker, { why, look: this.looks, possible, mayReturn: possible || code === "worker_alive" });
    });
    return found.some((answer) => answer !== null);
  }

  /** Null: it was not answered. */
  async ask(worker) {
    try {
      return await get(this.path + encodeURIComponent(worker), this.signal);
    } catch (error) {
      if (error instanceof Problem) return null;
      throw error;
    }
  }

  /** What was answered while it was lost for the reason for which it is now. */
  answerOf({ worker, state, why }) {
    const answer = this.answers.get(worker);
    return state === "lost" && answer?.why === why ? answer : undefined;
  }

  lookAt(worker) {
    return this.answerOf(worker)?.look ?? 0;
  }

  /** Whether it may come back. */
  has(worker) {
    return this.answerOf(worker)?.mayReturn === true;
  }

  /** Whether an operator may say that it will not. */
  mayBeConfirmed(worker) {
    return this.answerOf(worker)?.possible === true;
  }
}
