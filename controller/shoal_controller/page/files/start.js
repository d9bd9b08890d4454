// Begins the page once its first frame is painted: on a slow machine asking for the modules takes longer than that.

const UNREACHED = "The controller did not answer when this page was loaded. Load the page again.";
/** What the list of jobs needs: all of it is asked for at once, not one file after the other that names it. */
const MODULES = [
  "access", "amounts", "announce", "connection", "elements", "jobs_view", "main", "phases", "poll", "rest",
  "sparkline",
];

async function begin() {
  for (const name of MODULES) {
    const link = document.createElement("link");
    link.rel = "modulepreload";
    link.href = `/page/${name}.js`;
    document.head.append(link);
  }
  try {
    await import("./main.js");
  } catch {
    document.getElementById("view").textContent = UNREACHED;
  }
}

if (!window.shoalLacks) {
  if (document.hidden) begin(); // a tab in the background paints no frame
  else requestAnimationFrame(() => setTimeout(begin));
}
