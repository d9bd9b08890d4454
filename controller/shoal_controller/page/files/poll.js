// Something that is asked again and again while its view is shown: at once, then every so often, sooner when an event
// says so, and not while the tab is hidden. A failure is shown by the view or by the banner; asking goes on.
// Called by the views.

import { connection } from "./connection.js";
import { Problem } from "./rest.js";

const LATE = 5000; // milliseconds: a controller that says nothing for so long may be frozen

/**
 * Ask `ask()` every `seconds()` until `signal`; `soon()` of what is returned asks now. `onProblem(problem)` hears what
 * the controller refuses (4xx); what it does not answer is the banner's business.
 */
export function poll({ ask, seconds, signal, onProblem }) {
  const way = connection.way(signal);
  let timer = null;
  let busy = false;
  let again = false;

  async function run() {
    clearTimeout(timer);
    if (signal.aborted) return;
    if (busy) return void (again = true);
    busy = true;
    const late = setTimeout(() => connection.failed(way, new Problem(0, "late", "The controller takes long to answer.")), LATE);
    try {
      if (document.hidden) return;
      await ask();
      connection.answered(way);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      if (error.status >= 500 || error.status === 0) return void connection.failed(way, error);
      connection.answered(way);
      onProblem(error);
    } finally {
      clearTimeout(late);
      busy = false;
      timer = signal.aborted ? null : setTimeout(run, again ? 150 : 1000 * seconds());
      again = false;
    }
  }

  const shown = () => !document.hidden && run();
  document.addEventListener("visibilitychange", shown);
  connection.mended.addEventListener("answers", run, { signal });
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", shown);
  });
  run();
  return { soon: run };
}
