"""What `shoal doctor` finds here: of the machine, of what a controller needs (ports, store, token), of one that runs.

Standard library only at the head, so that it says what is missing where anything is. Nothing is left behind: no folder
is made, no store opened for writing.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from shoal_protos.addresses import split_address
from shoal_protos.errors import ShoalError
from shoal_protos.finding import Check, Finding, Given, Verdict
from shoal_protos.limits import LEAST_OPEN_FILES
from shoal_protos.release import RELEASE
from shoal_protos.text import of_shoal

from shoal_controller.cli.endings import EXTRAS

PYTHONS = ((3, 11), (3, 13))
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 1 << 30
"""What a few workers of a DataLoader need; containers have 64 MB where nothing is said."""
OPEN_FILES = 4096
"""A controller has several for each worker."""
NOT_BEFORE = 1_767_225_600.0
"""2026-01-01: no clock that is set is behind it."""
TIMEX_BYTES = 512
"""More than the kernel's structure has."""
NOT_SYNCHRONIZED = 5
"""What adjtimex returns where no time service keeps the clock."""
STORE_BYTES = 1 << 30
ETCD_SECONDS = 5.0
PROBE_SECONDS = 2.0
MOST_BYTES = 4096
SKEW_SECONDS = 5.0
"""More of it between two clocks is more than a request under way explains."""
REMOTE = "another store, such as etcd"


def python(_: Given) -> Finding:
    """The interpreter and the system."""
    found = f"Python {platform.python_version()} on {platform.system()} ({platform.machine()})"
    expected = "Python 3.11 to 3.13 on Linux"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Finding("python", Verdict.FAILED, found, expected, "make an environment with another Python")
    if sys.platform != "linux":
        todo = "a script runs alone here, without a controller; for more use Linux"
        return Finding("python", Verdict.WARNING, found, expected, todo)
    return Finding("python", Verdict.OK, found, expected)


def packages(given: Given) -> Finding:
    """What the extras bring that are needed here."""
    lacking = {
        extra: [module for module in sorted(EXTRAS[extra]) if importlib.util.find_spec(module) is None]
        for extra in given["extras"]
    }
    needed = " and ".join(given["extras"]) or "shoal"
    missing = {extra: modules for extra, modules in lacking.items() if modules}
    if missing:
        named = "; ".join(f"no {', '.join(modules)}" for modules in missing.values())
        return Finding("packages", Verdict.FAILED, named, needed, f"install {' and '.join(missing)}")
    return Finding("packages", Verdict.OK, f"{of_shoal(RELEASE)}, all of {needed}", needed)


def clock(_: Given) -> Finding:
    """Whether it is set, and kept by a time service."""
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < NOT_BEFORE:
        return Finding("clock", Verdict.FAILED, shown, "the time of today", "set the clock: certificates depend on it")
    if _is_adrift():
        todo = "start a time service (chrony, systemd-timesyncd); logs and certificates of machines must agree"
        return Finding("clock", Verdict.WARNING, f"{shown}, not synchronized", "a clock kept by NTP", todo)
    return Finding("clock", Verdict.OK, shown, "a clock kept by NTP")


def _is_adrift() -> bool:
    """Whether the kernel says that nothing keeps the clock. It is only asked."""
    if sys.platform != "linux":
        return False
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    return int(ctypes.CDLL(None).adjtimex(buffer)) == NOT_SYNCHRONIZED


def shared_memory(_: Given) -> Finding:
    """For the workers of a DataLoader."""
    expected = "1 GB or more in /dev/shm"
    todo = "give containers more (docker run --shm-size=4g, kubernetes.shmSize of a spec), or read without workers"
    if not SHARED_MEMORY.is_dir():
        return Finding("shared memory", Verdict.WARNING, "there is no /dev/shm", expected, todo)
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / 1e9:.1f} GB free in /dev/shm"
    if free < SHARED_BYTES or not os.access(SHARED_MEMORY, os.W_OK):
        return Finding("shared memory", Verdict.WARNING, found, expected, todo)
    return Finding("shared memory", Verdict.OK, found, expected)


def open_files(_: Given) -> Finding:
    """The limit that a controller can raise for itself."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "no limit" if most == resource.RLIM_INFINITY else f"at most {most}"
    if most != resource.RLIM_INFINITY and most < LEAST_OPEN_FILES:
        todo = "raise the hard limit (ulimit -n 1024, LimitNOFILE=)"
        return Finding("open files", Verdict.FAILED, found, f"{OPEN_FILES} or more", todo)
    if most != resource.RLIM_INFINITY and most < OPEN_FILES:
        todo = "raise the hard limit (ulimit -Hn, LimitNOFILE=); a controller serves fewer workers"
        return Finding("open files", Verdict.WARNING, found, f"{OPEN_FILES} or more", todo)
    return Finding("open files", Verdict.OK, found, f"{OPEN_FILES} or more")


# ---- what a controller needs


def ports(given: Given) -> Finding:
    """Whether the two ports of a controller are free."""
    expected = "both free, where a controller is to be started"
    taken: dict[str, str] = {}
    for name in ("http", "grpc"):
        try:
            why = _why_not(*split_address(str(given[name])))
        except ValueError as error:
            return Finding("ports", Verdict.FAILED, f"--{name}: {error}", "HOST:PORT", f"give another --{name}")
        if why:
            taken[name] = f"{given[name]} ({why})"
    if not taken:
        return Finding("ports", Verdict.OK, f"{given['http']} and {given['grpc']} are free", expected)
    if "http" in taken and _is_controller(*split_address(str(given["http"]))):
        return Finding("ports", Verdict.OK, f"a controller is running at {given['http']}", expected)
    todo = "end what has them, or give others: --http HOST:PORT, --grpc HOST:PORT (port 0 picks a free one)"
    return Finding("ports", Verdict.FAILED, f"not free: {' and '.join(taken.values())}", expected, todo)


def _is_controller(host: str, port: int) -> bool:
    """Whether what has the port is a controller of Shoal."""
    asked = HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        asked.request("GET", "/healthz")
        return bool(json.loads(asked.getresponse().read(MOST_BYTES)).get("status") == "ok")
    except (OSError, HTTPException, ValueError, AttributeError):
        return False
    finally:
        asked.close()


def _why_not(host: str, port: int) -> str:
    """Why a port cannot be listened on; empty where it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
            door.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def store(given: Given) -> Finding:
    """Whether the store can be used."""
    url = str(given["store"])
    if url.startswith("etcd://"):
        return _etcd(url)
    folder = Path(url.removeprefix("embedded:"))
    if not url.startswith("embedded:") or not folder.name:
        return Finding("store", Verdict.FAILED, url, "embedded:DIR or etcd://HOST:PORT/PREFIX", "give another --store")
    return _embedded(folder)


def _embedded(folder: Path) -> Finding:
    expected = "a folder of a local disk, writable, with 1 GB of room"
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is no folder" if not place.is_dir() else "cannot be written"
        return Finding("store", Verdict.FAILED, f"{place} {why}", expected, "give --store embedded:DIR")
    free = shutil.disk_usage(place).free
    found = f"{folder}, {'new' if place != folder.absolute() else 'in use' if _is_held(folder) else 'not in use'}"
    found += f", {free / 1e9:.1f} GB free"
    if free < STORE_BYTES:
        return Finding("store", Verdict.WARNING, found, expected, f"free some space, or give {REMOTE}")
    return Finding("store", Verdict.OK, found, expected)


def _is_held(folder: Path) -> bool:
    """Whether a controller has it. Its lock is not tried, for it could not be taken by one that starts meanwhile."""
    try:
        number = (folder / "lock").stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any("FLOCK" in line and f":{number} " in line for line in locks.splitlines())


def _etcd(url: str) -> Finding:
    expected = "an etcd that answers"
    shown = url.partition("@")[2] if "@" in url else url
    todo = "look at its address, its certificates and SHOAL_ETCD_… (docs/availability.md)"

    async def asked() -> None:
        from shoal_controller.settings import Settings
        from shoal_controller.store.open import open_store

        settings = Settings(store=url)
        async with asyncio.timeout(ETCD_SECONDS):
            opened = await open_store(url, None, settings.etcd)
            await opened.get("/doctor")
            await opened.close()

    try:
        asyncio.run(asked())
    except TimeoutError:
        return Finding("store", Verdict.FAILED, f"{shown} has not answered for {ETCD_SECONDS:g} s", expected, todo)
    except ShoalError as error:
        return Finding("store", Verdict.FAILED, str(error), expected, todo)
    return Finding("store", Verdict.OK, f"{shown} answers", expected)


def token(given: Given) -> Finding:
    """The file with the token of this folder's controllers, and whether others can read it."""
    file = Path(given["data"]) / "token"
    expected = "SHOAL_TOKEN, or a file that only you can read"
    if os.environ.get("SHOAL_TOKEN"):
        return Finding("token", Verdict.OK, "SHOAL_TOKEN is set", expected)
    if not file.exists():
        return Finding("token", Verdict.OK, f"none yet; `shoal run` makes {file}", expected)
    if not file.is_file():
        return Finding("token", Verdict.FAILED, f"{file} is not a regular file", expected, f"remove {file}")
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077 or not os.access(file, os.R_OK):
        return Finding("token", Verdict.FAILED, f"{file} has mode {mode:o}", expected, f"chmod 600 {file}")
    return Finding("token", Verdict.OK, str(file), expected)


def controller(given: Given) -> Finding:
    """The controller that commands would ask: whether it answers, whether it takes the token, its clock."""
    from shoal_protos.errors import NoController

    from shoal_controller.cli.client import Client

    url, expected = str(given["url"]), "a controller that answers"

    async def asked() -> tuple[int, str]:
        async with Client(url) as client:
            return len(await client.jobs()), client.date

    try:
        count, date = asyncio.run(asked())
    except NoController as error:
        if given["is_url_given"]:
            return Finding("controller", Verdict.FAILED, str(error), expected, "start it, or give another --url")
        found = f"none at {url}"
        return Finding("controller", Verdict.OK, found, "none is needed for `shoal run`, which brings its own")
    except ShoalError as error:
        todo = "set SHOAL_TOKEN, or run this in the folder of its token (docs/security.md)"
        return Finding("controller", Verdict.FAILED, f"{url}: {error}", "a controller that takes the token", todo)
    apart = _seconds_apart(date)
    found = f"{url} answers, {count} job{'s'[: count != 1]}"
    if apart is not None and abs(apart) > SKEW_SECONDS:
        todo = "keep the clocks of both machines by NTP"
        return Finding("controller", Verdict.WARNING, f"{found}; its clock is {apart:+.0f} s off", "equal clocks", todo)
    return Finding("controller", Verdict.OK, found, expected)


def session(_: Given) -> Finding:
    """The controllers that a worker started here would join: whether something answers there."""
    given = os.environ.get("SHOAL_CONTROLLER", "")
    expected = "SHOAL_CONTROLLER=HOST:PORT of a controller, unless a launcher sets it"
    if not given:
        return Finding("session", Verdict.OK, "SHOAL_CONTROLLER is not set: a script trains alone", expected)
    away = []
    for address in given.split(","):
        try:
            socket.create_connection(split_address(address.strip()), PROBE_SECONDS).close()
        except (OSError, ValueError) as error:
            away.append(f"{address.strip()} ({error})")
    if not away:
        return Finding("session", Verdict.OK, f"{given} can be reached", expected)
    todo = "look at the address (the controller's --grpc) and at firewalls (docs/network.md)"
    verdict = Verdict.FAILED if len(away) == len(given.split(",")) else Verdict.WARNING
    return Finding("session", verdict, f"not reached: {', '.join(away)}", expected, todo)


def _seconds_apart(date: str) -> float | None:
    """By how much another clock is ahead; None where it does not say."""
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(date).timestamp() - time.time()
    return None


CHECKS: Mapping[str, Check] = {
    "python": python,
    "packages": packages,
    "clock": clock,
    "shared memory": shared_memory,
    "open files": open_files,
    "ports": ports,
    "store": store,
    "token": token,
    "controller": controller,
    "session": session,
}
