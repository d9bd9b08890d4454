"""Draws the pictures of the dashboards in these documents, of a real run: `make pictures`.

A controller, three workers and a Prometheus run as in tests/integration/test_dashboards.py: with saves, a kill, a
joiner, a drain and the controller killed; GPUs are a fake NVML's (tests/fake_nvml.py). Each panel's query is asked of
Prometheus, and Grafana's own panels (`page.jsx`, npm's @grafana/ui, which esbuild puts into one file) draw the answers
in a headless Chromium. All that costs 650 MB of packages, so no test does it. Needs npm and chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from charts.panels import DASHBOARDS, with_values  # noqa: E402
from charts.prometheus import MISSING, program  # noqa: E402
from integration.cluster import Cluster, warmed  # noqa: E402
from integration.test_dashboards import ON_GPUS, RATE, Prometheus, disturbed, prometheus  # noqa: E402

Json = dict[str, Any]
TOOLS = ("npm", "chromium", "node")
POINTS = 240
"""Of a curve."""
WIDTH, ROW, HEADER = 1456, 32, 56
"""Pixels, as in page.jsx."""
TOOL_SECONDS = 600
PAINT_MILLISECONDS = 8000
BUNDLED = ("--bundle", "--minify", "--loader:.svg=dataurl", "--loader:.ttf=empty",
           '--define:process.env.NODE_ENV="production"', "--log-level=error")  # fmt: skip


def main() -> int:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or program("prometheus") is None:
        sys.stderr.write(f"pictures need {', '.join(missing) or MISSING}; install it with your system's packages\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        boards = answered(place)
        bundle(place)
        for name, board in boards.items():
            take(place, name, board)
            sys.stdout.write(f"{HERE / name}.png\n")
    return 0


def answered(folder: Path) -> dict[str, Json]:
    """Both dashboards by name, with what Prometheus has answered of a run."""
    kept = {"offload": str(folder), "shoal": {"checkpoint": {"path": str(folder / "saves")}}}
    options = {"max_steps": 600, **kept}
    with (
        warmed(),
        Cluster(workers=3, options=options, script=ON_GPUS, pace=0.05) as cluster,
        prometheus(cluster.url, folder) as server,
    ):
        disturbed(cluster)
        cluster.wait_step(cluster.job()["step"] + 40)
        return {file.stem: asked(server, json.loads(file.read_text())) for file in DASHBOARDS}


def asked(server: Prometheus, board: Json) -> Json:
    """A dashboard's panels with the series of their queries."""
    end = time.time()
    span = {"start": server.began, "end": end, "step": max(0.25, (end - server.began) / POINTS)}
    for panel in board["panels"]:
        panel["series"] = [
            {
                "legend": legend(target["legendFormat"], one["metric"]),
                "row": one["metric"].get("worker", ""),
                "points": one["values"],
            }
            for target in panel.get("targets", ())
            for one in server.series(with_values(target["expr"], "job", RATE), span)
        ]
    marks = [
        mark for one in board["annotations"].get("list", ()) if "expr" in one for mark in marked(server, one, span)
    ]
    return {"title": board["title"], "panels": board["panels"], "marks": marks, "from": server.began, "to": end}


def marked(server: Prometheus, annotation: Json, span: dict[str, float]) -> list[Json]:
    """When an annotation begins, and its title; as long as its query has values without a gap it is one."""
    marks = []
    for one in server.series(with_values(annotation["expr"], "job", RATE), span):
        times = [float(moment) for moment, _ in one["values"]]
        begins = (now for before, now in pairwise([float("-inf"), *times]) if now - before > 1.5 * span["step"])
        title = legend(annotation["titleFormat"], one["metric"])
        marks += [{"time": begin, "title": title} for begin in begins]
    return sorted(marks, key=lambda mark: mark["time"])


def legend(form: str, labels: dict[str, str]) -> str:
    """A curve's name, as Grafana makes it of the legend."""
    for label, value in labels.items():
        form = form.replace(f"{{{{{label}}}}}", value)
    return form


def bundle(folder: Path) -> None:
    """Grafana's panels and the page as one script."""
    for file in ("package.json", "page.jsx"):
        shutil.copy(HERE / file, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
    subprocess.run(install, cwd=folder, check=True, timeout=TOOL_SECONDS)
    command = ["node", "node_modules/esbuild/bin/esbuild", "page.jsx", "--outfile=page.js", *BUNDLED]
    subprocess.run(command, cwd=folder, check=True, timeout=TOOL_SECONDS)


def take(folder: Path, name: str, board: Json) -> None:
    """One picture."""
    height = HEADER + ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    page = folder / f"{name}.html"
    given = json.dumps(board).replace("</", "<\\/")
    page.write_text(
        '<!doctype html><meta charset="utf-8"><body style="margin:0;background:#f4f5f5"><div id="board"></div>'
        f'<link rel="stylesheet" href="page.css"><script>window.BOARD = {given}</script><script src="page.js"></script>'
    )
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--hide-scrollbars", f"--user-data-dir={folder / 'chromium'}", f"--window-size={WIDTH},{height}",
        f"--virtual-time-budget={PAINT_MILLISECONDS}", f"--screenshot={HERE / name}.png", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=TOOL_SECONDS, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(main())
