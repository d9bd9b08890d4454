// The page's beginning: who asks, which view the address names, the banner while the connection is lost, and another
// version of the page. Each view ends with the signal that it was given.

import { clock, refreshAges, utc } from "./amounts.js";
import { announce } from "./announce.js";
import { known, letIn } from "./access.js";
import { connection } from "./connection.js";
import { element, foreign, setText, visible } from "./elements.js";
import { showJobs } from "./jobs_view.js";
import { ABOUT, Problem, get, pause } from "./rest.js";

const RELOADED = "shoal-reloaded-for"; // in sessionStorage: the version for which this tab has loaded itself anew
const VERSION_MILLISECONDS = 60000; // between two looks whether the controller has another page by now

let shown = new AbortController();
let entering = false; // the token is being tried, or asked for
let jobView = null;

/** The view of one job, loaded once: the first paint, and the list of all jobs, do not wait for it. */
const loadJobView = () => (jobView ??= import("./job_view.js").catch(() => (jobView = null)));

function place() {
  return document.getElementById("view");
}

/** Show what the address names, in place of what was shown. */
async function route() {
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  const [, kind, job, worker] = location.hash.split("/").map(decoded);
  const isJob = kind === "jobs" && job;
  showTrail(isJob ? job : null);
  if (isJob) loadJobView();
  await enter(signal);
  if (signal.aborted) return;
  if (!isJob) return void showJobs(place(), signal);
  const loaded = await loadJobView();
  if (signal.aborted) return;
  if (loaded) loaded.showJob(place(), job, worker ?? "", signal);
  else place().replaceChildren(element("p", { class: "sentence" }, "The controller did not answer when this part of the page was loaded. Load the page again."));
}

/** Returns when the reader is let in, or wants to see something else. */
async function enter(signal) {
  const way = connection.way(signal);
  while (!signal.aborted) {
    entering = true;
    try {
      await letIn(place());
      return connection.answered(way);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      if (signal.aborted) return undefined;
      connection.failed(way, error);
      place().replaceChildren(element("p", { class: "sentence" }, visible(error.message)));
    } finally {
      entering = false;
    }
    await pause(1500, signal);
  }
  return undefined;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function showTrail(job) {
  document.title = job === null ? "Jobs · Shoal" : `${job} · Shoal`;
  const here = job === null ? [] : [element("a", { href: "#/" }, "Jobs"), " / ", foreign(job, { "aria-current": "page" })];
  document.getElementById("trail").replaceChildren(...here);
}

const TROUBLES = {
  lost: (since) => `No connection to the controller since ${since}. Training goes on without it; this page shows what was known then, and catches up by itself.`,
  partly: (since, why) => `Since ${since} a part of this page is not up to date: ${visible(why).replace(/(; try again|\.)?$/, "")}. It catches up by itself.`,
  unsteady: (since) => `The connection to the controller has come and gone since ${since}: what this page shows may be some seconds old.`,
};

/** `state`: what is wrong with the connection; null: nothing. */
function showConnection(state) {
  const banner = document.getElementById("banner");
  const wasShown = !banner.hidden;
  banner.hidden = state === null;
  document.body.classList.toggle("disconnected", state?.kind === "lost");
  banner.title = state ? `since ${utc(state.since)}` : "";
  if (state) setText(banner, TROUBLES[state.kind](clock(state.since), state.why));
  else if (wasShown) announce("Connected again; this page has caught up.");
}

/** A controller of another version has another page: load it, once; not while somebody is asked something. */
function checkVersion(about) {
  if (document.querySelector("dialog[open]")) return;
  const own = document.querySelector('meta[name="shoal-page"]').content;
  if (!about?.page || about.page === own || sessionStorage.getItem(RELOADED) === about.page) return;
  sessionStorage.setItem(RELOADED, about.page);
  location.reload();
}

/** It may have been replaced between two requests, so that nothing has failed. */
function lookAtVersion() {
  if (!document.hidden && known()) get(ABOUT).then(checkVersion, () => {});
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  place().focus();
});
connection.listeners.add(showConnection);
connection.mended.addEventListener("whole", lookAtVersion);
window.addEventListener("hashchange", route);
window.addEventListener("shoal-unauthorized", () => entering || route());
setInterval(refreshAges, 1000);
setInterval(lookAtVersion, VERSION_MILLISECONDS);
route().then(() => checkVersion(known())).then(loadJobView);
