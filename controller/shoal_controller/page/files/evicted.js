// Which workers that REST calls lost are not known to be dead: evicted for their silence, they may come back, and the job
// may wait for what they hold until somebody says that they are gone. The controller is asked what it would say to that.
// Called by the table of workers.

import { get } from "./rest.js";

const AT_ONCE = 8; // questions with each look: of a long list of dead workers the rest is asked about later

export class Evicted {
  constructor(job, signal) {
    this.path = `/v1/jobs/${encodeURIComponent(job)}/preview?act=lost&worker=`;
    this.signal = signal;
    this.dead = new Map(); // worker: why it was lost when the controller said that it is gone
    this.known = new Map(); // worker: whether its death can be confirmed now
  }

  /** Look at these workers again, the youngest first. */
  async look(workers) {
    const lost = workers.filter((worker) => worker.state === "lost" && this.dead.get(worker.worker) !== worker.why);
    const asked = lost.slice(-AT_ONCE);
    const answers = await Promise.all(asked.map(({ worker }) => get(this.path + encodeURIComponent(worker), this.signal)));
    this.known = new Map();
    asked.forEach(({ worker, why }, index) => {
      const { possible, code } = answers[index];
      if (possible || code === "worker_alive") this.known.set(worker, possible);
      else this.dead.set(worker, why);
    });
  }

  /** Whether it may come back. */
  has(worker) {
    return this.known.has(worker.worker);
  }

  /** Whether an operator may say that it will not. */
  mayBeConfirmed(worker) {
    return this.known.get(worker.worker) === true;
  }
}
