// The page's beginning: who asks, which view the address names, the banner while the connection is lost, and another
// version of the page. Each view ends with the signal that it was given.

import { refreshAges, clock } from "./amounts.js";
import { announce } from "./announce.js";
import { letIn } from "./access.js";
import { element, foreign } from "./elements.js";
import { showJob } from "./job_view.js";
import { showJobs } from "./jobs_view.js";
import { ABOUT, Problem, get, onConnection, pause } from "./rest.js";

const RELOADED = "shoal-reloaded-for"; // in sessionStorage: the version for which this tab has loaded itself anew

let shown = new AbortController();
let entering = false; // the token is being tried, or asked for

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
  try {
    entering = true;
    await letIn(place());
    entering = false;
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    place().replaceChildren(element("p", { class: "sentence" }, error.message));
    await pause(1500, signal);
    return signal.aborted ? undefined : route();
  }
  if (signal.aborted) return undefined;
  if (isJob) showJob(place(), job, worker ?? "", signal);
  else showJobs(place(), signal);
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

function showConnection(since) {
  const banner = document.getElementById("banner");
  const wasLost = !banner.hidden;
  banner.hidden = since === null;
  document.body.classList.toggle("disconnected", since !== null);
  if (since !== null) {
    banner.textContent = `No connection to the controller since ${clock(since)}. Training goes on without it; this page shows what was known then, and catches up by itself.`;
  } else if (wasLost) {
    announce("Connected again; this page has caught up.");
    checkVersion();
  }
}

/** A controller of another version has another page: load it, once. */
async function checkVersion() {
  const own = document.querySelector('meta[name="shoal-page"]').content;
  const about = await get(ABOUT).catch(() => null);
  if (!about?.page || about.page === own || sessionStorage.getItem(RELOADED) === about.page) return;
  sessionStorage.setItem(RELOADED, about.page);
  location.reload();
}

if (!window.shoalLacks) {
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    place().focus();
  });
  onConnection(showConnection);
  window.addEventListener("hashchange", route);
  window.addEventListener("shoal-unauthorized", () => entering || route());
  setInterval(refreshAges, 1000);
  route().then(checkVersion);
}
