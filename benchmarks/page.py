"""What the page costs in a browser: `python benchmarks/page.py`, part of `make page`.

Jobs of simulated workers over real gRPC (simulated_workers.py), 100 of 100 by default, on a controller in a process of
its own; Chromium shows them with a phone's viewport and its CPU slowed four times. Rows: bytes loaded, the first paint
and when all jobs are there; for each interaction the longest and the median time from the press to the next frame, and
the main thread's CPU; the controller's CPU, and what it sends, with one page open. Figures depend on the machine, so
nothing fails by them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from controller_process import Controller, controller
from simulated_workers import HOST_WORKERS, start_job
from tables import show, verdict

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from integration.browser import ARGUMENTS, CHROMIUM
from playwright.async_api import Browser, CDPSession, Locator, Page, async_playwright

SLOWER = 4
"""How many times slower the browser's CPU is for the first paint."""
PAINT_SECONDS, INTERACTION_SECONDS = 0.5, 0.1
TIMES, PAINTS = 8, 16
PAINTED = "(name) => performance.getEntriesByName(name)[0]?.startTime ?? -1"
HEARTBEAT_SECONDS = 15.0
"""Ten thousand sessions beat beside the browser."""
PROCESSES = 2
"""In which workers are simulated."""
SETTLE_SECONDS = 1.0
"""The browser clears a page away before the next one is loaded."""
FILLED_SECONDS = 5.0
"""What was lost with a host has copies again after that."""
WORKERS_ALONE = 8
"""Of the only job, for the first paint: simulated workers and the controller take little from the browser."""
WORKERS_A_LOSS = 20
"""The job that is looked at has lost a host for so many workers."""
PATIENCE = 120_000
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
TO_THE_NEXT_FRAME = """(press) => new Promise((resolve) => {
    const began = performance.now();
    press.click();
    requestAnimationFrame(() => setTimeout(() => resolve((performance.now() - began) / 1000)));
})"""


TYPED = """(input, given) => new Promise((resolve) => {
    const began = performance.now();
    input.value = given;
    input.dispatchEvent(new Event("input"));
    requestAnimationFrame(() => setTimeout(() => resolve((performance.now() - began) / 1000)));
})"""
OPEN_SECONDS = 20.0
"""For how long the controller is watched."""


def simulate(grpc: str, jobs: Connection) -> None:
    """A process with the workers of jobs whose numbers come, until its parent is gone: each keeps two files open, and
    ten thousand are too many for one process.
    """
    asyncio.run(_simulate(grpc, jobs))


async def _simulate(grpc: str, jobs: Connection) -> None:
    started = []
    with contextlib.suppress(EOFError):
        while True:
            number, workers, hosts_lost = await asyncio.to_thread(jobs.recv)
            job = await start_job(grpc, f"job{number}", workers, 4 * workers)
            started.append(job)
            for _ in range(hosts_lost):
                since = time.monotonic()
                await job.kill(HOST_WORKERS)
                await job.until_after(since, job.committed_at)
                await asyncio.sleep(FILLED_SECONDS)
            jobs.send(number)


@contextlib.asynccontextmanager
async def started_jobs(there: Controller, sizes: Sequence[int]) -> AsyncIterator[None]:
    """One after the other, as in control_plane.py, in turn in each of the processes; the first has lost some hosts.
    Their workers live until the end.
    """
    spawn, ends = multiprocessing.get_context("spawn"), []
    for _ in range(PROCESSES):
        end, far_end = spawn.Pipe()
        spawn.Process(target=simulate, args=(there.grpc, far_end), daemon=True).start()
        far_end.close()
        ends.append(end)
    for number, workers in enumerate(sizes):
        await there.submit(f"job{number}", workers, heartbeat_seconds=HEARTBEAT_SECONDS)
        end = ends[number % PROCESSES]
        end.send((number, workers, 0 if number else workers // WORKERS_A_LOSS))
        await asyncio.to_thread(end.recv)
    yield
    for end in ends:
        end.close()


async def first_paint(page: Page, url: str) -> tuple[float, float, float, int]:
    """Seconds to the first paint on a slowed phone, to the first with contents and to all jobs, and bytes loaded until
    then. The browser itself has started: it has shown something else.
    """
    await page.goto(f"{url}/healthz")
    slowing = await page.context.new_cdp_session(page)
    await slowing.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    loaded: list[int] = []
    page.on("response", lambda answer: loaded.append(int(answer.headers.get("content-length", 0))))
    await page.goto(url)
    await page.locator(".job-line").first.wait_for()
    first, contents = [await page.evaluate(PAINTED, name) / 1000 for name in ("first-paint", "first-contentful-paint")]
    shown = await page.evaluate("new Promise((done) => requestAnimationFrame(() => done(performance.now() / 1000)))")
    return first, contents, shown, sum(loaded)


async def first_paints(browser: Browser, url: str) -> list[str]:
    """A row: each time a phone that has nothing in its cache."""
    paints = []
    for _ in range(PAINTS):
        phone = await browser.new_context(**PHONE)
        paints.append(await first_paint(await phone.new_page(), url))
        await phone.close()
        await asyncio.sleep(SETTLE_SECONDS)
    *seconds, files = zip(*paints, strict=True)
    first, contents, shown = map(median, seconds)
    judged = f"{first:.3f} ({verdict(first, PAINT_SECONDS)})"
    return [judged, f"{max(seconds[0]):.3f}", f"{contents:.3f}", f"{shown:.3f}", f"{max(files):,}"]


@dataclass
class Pressed:
    """What presses have cost, in seconds: from each to the frame after it, and of the main thread's CPU."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """A name, the median and the longest, and the longest CPU: that one does not depend on who else computes."""
        wall, cpu = max(self.walls), max(self.cpus)
        judged = (f"{one:.3f} ({verdict(one, INTERACTION_SECONDS)})" for one in (wall, cpu))
        return [name, f"{median(self.walls):.3f}", *judged]


async def pressed(
    page: Page, places: list[Locator], act: str = TO_THE_NEXT_FRAME, given: Sequence[str] = ()
) -> Pressed:
    """Press each place, or give each what is given, one after the other."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = Pressed()
    for number, place in enumerate(places):
        handle = await place.element_handle(timeout=PATIENCE)
        before = await _thread_seconds(session)
        found.walls.append(await handle.evaluate(act, given[number] if given else None))
        found.cpus.append(await _thread_seconds(session) - before)
        await page.wait_for_timeout(300)
    return found


async def _thread_seconds(session: CDPSession) -> float:
    """CPU of the page's main thread in tasks so far."""
    listed = (await session.send("Performance.getMetrics"))["metrics"]
    return float({one["name"]: one["value"] for one in listed}["TaskDuration"])


async def interactions(page: Page, url: str) -> list[list[str]]:
    """Rows: what was pressed, the median and the longest."""
    await page.goto(url)
    await page.locator(".job-line").nth(1).wait_for()
    letters = ("job1", "", "job2", "", "running", "", "j", "")
    filtering = await pressed(page, [page.locator("#filter")] * len(letters), TYPED, letters)
    await page.goto(f"{url}/#/jobs/job0")
    await page.locator(".workers tbody tr").nth(1).wait_for()
    await page.locator(".chart canvas").nth(3).wait_for()
    buttons = page.locator(".axis-controls button")
    kinds = {
        "another span of time": [buttons.nth(number % 5) for number in range(TIMES)],
        "closer, wider": [buttons.nth(7 + number % 2) for number in range(TIMES)],
        "gone workers shown, hidden": [page.locator("#show-gone")] * TIMES,
        "a change chosen": [page.locator(".changes button").first] * TIMES,
    }
    others = [(await pressed(page, places)).row(name) for name, places in kinds.items()]
    return [filtering.row("jobs filtered"), *others]


async def open_page(there: Controller, page: Page, name: str, place: str) -> list[str]:
    """A row: the controller's CPU while a page is open, in percent of a core, and what it sends to it in a second."""
    await page.goto("about:blank")
    received: list[int] = []
    session = await page.context.new_cdp_session(page)
    await session.send("Network.enable")
    session.on("Network.dataReceived", lambda part: received.append(int(part["dataLength"])))
    await page.goto(place)
    await page.wait_for_timeout(2000)
    received.clear()
    before = there.cpu_seconds()
    await page.wait_for_timeout(1000 * OPEN_SECONDS)
    cpu = (there.cpu_seconds() - before) / OPEN_SECONDS
    await session.detach()
    return [name, f"{100 * cpu:.1f} %", f"{sum(received) / OPEN_SECONDS / 1000:,.0f} kB/s"]


async def measure(given: argparse.Namespace) -> None:
    others = given.others or given.each
    async with browser_beside([WORKERS_ALONE]) as (browser, there):
        alone = await first_paints(browser, f"http://{there.http}")
    async with browser_beside([given.each] + [others] * (given.jobs - 1)) as (browser, there):
        url = f"http://{there.http}"
        painted = await first_paints(browser, url)
        page = await browser.new_page(viewport={"width": 1440, "height": 1000})
        pressed_rows = await interactions(page, url)
        places = {"nothing": "about:blank", "the list of jobs": url, "one job": f"{url}/#/jobs/job0"}
        open_rows = [await open_page(there, page, name, place) for name, place in places.items()]
    size = f"{given.jobs} jobs, one of {given.each} workers, the others of {others}"
    titles = ["jobs", "first paint, s", "longest", "with contents, s", "all jobs shown, s", "bytes loaded"]
    rows = [["one", *alone], [f"{given.jobs}, on the browser's cores", *painted]]
    show(f"A phone with its CPU {SLOWER} times slower, medians of {PAINTS}", titles, rows)
    show(
        f"From a press to the next frame, seconds, {size}",
        ["pressed", "median", "longest", "longest CPU"],
        pressed_rows,
    )
    show(f"The controller while a page is open, {size}", ["open", "CPU", "sent"], open_rows)


@contextlib.asynccontextmanager
async def browser_beside(sizes: Sequence[int]) -> AsyncIterator[tuple[Browser, Controller]]:
    """A browser, and a controller that has jobs of so many workers."""
    with controller("embedded") as there:
        async with started_jobs(there, sizes), async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
            yield browser, there
            await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="First paint and interactions of the page with many jobs.")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--each", type=int, default=100, help="workers of a job")
    parser.add_argument("--others", type=int, default=0, help="workers of each job but the one that is looked at")
    os.environ["OMP_NUM_THREADS"] = "1"
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
