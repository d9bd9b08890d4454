"""REST on a real port of this machine, over a shell with a small machine."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
from shoal_controller.access.client_tls import ClientTls
from shoal_controller.access.token_register import TokenRegister
from shoal_controller.api.app import ApiSettings, build_app
from shoal_controller.api.neighbours import Neighbours
from shoal_controller.api.web import Web
from shoal_controller.jobs.shell import Shell
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.introductions import Introductions
from shoal_controller.process import logs
from shoal_controller.store.open import open_store
from small_machine import SmallMachine, Written


class Api:
    """A shell with a small machine behind a real port."""

    def __init__(self, controller, machine, client, web) -> None:
        self.controller, self.shell = controller, controller.shell
        self.machine = machine
        self.client = client
        self.web = web
        self.port = web.port

    async def ask(self, method, path, status=200, **given):
        answer = await self.client.request(method, path, **given)
        assert answer.status_code == status, answer.text
        return answer.json()


class LeadingAlone(ControllerState):
    """As it is of a controller that has its store for itself."""

    def __init__(self, shell: Shell, introductions: Introductions | None = None) -> None:
        super().__init__()
        self.shell, self.introductions = shell, introductions


async def figures() -> bytes:
    return b"figures 1\n"


@asynccontextmanager
async def serving(directory, settings=None, machine=None, token=None, tls=None, introductions=None):
    logs.configure("warning")
    store = await open_store(f"embedded:{directory}")
    machine = machine or SmallMachine()
    shell = Shell(store, step=machine.step, view=machine.view)
    shell.connect(Written().outside())
    await shell.start()
    web = Web("127.0.0.1", 0, tls)
    tokens = TokenRegister(token)
    await tokens.start(store, shell.give_up)
    settings = settings or ApiSettings(default_workers=2)
    alone, neighbours = LeadingAlone(shell, introductions), Neighbours(ClientTls(None))
    await web.start(build_app(alone, figures, settings, tokens, neighbours), shell.give_up)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{web.port}", trust_env=False, verify=False, timeout=100
        ) as client:
            yield Api(alone, machine, client, web)
    finally:
        await shell.stop()
        await web.stop()
        await tokens.stop()
        await store.close()


NO_JOBS = {"jobs": [], "next": None}
TRAIN = {"job": "train", "workers": {"wanted": 3, "min": 2, "max": 6}, "lanes": 8}
