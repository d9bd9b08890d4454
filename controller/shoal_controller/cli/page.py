"""What `shoal run` and `shoal demo` say of their controller's page, and how a browser is opened at it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_protos.errors import UserError
from shoal_protos.log_stream import LogStream

if TYPE_CHECKING:
    from shoal_controller.server import Server


def check_flags(no_page: bool, open_page: bool) -> None:
    """Raises `UserError` where a page is to be opened that there is not."""
    if no_page and open_page:
        raise UserError("--open-page and --no-page exclude each other; leave one of them out")


def show_page(server: Server, data: Path | None, open_page: bool) -> None:
    """Print where the page is, and where its reader finds the token; open a browser where that is asked for."""
    if not server.page:
        if open_page:
            raise UserError("--open-page was given, but SHOAL_PAGE is false: no page is served; leave one of them out")
        return
    say = LogStream()  # the job begins after this
    say.write(f"{page_sentence(server.page, data)}\n")
    if open_page and not open_browser(server.page):
        say.write("no browser could be opened on this machine; open that address in one yourself\n")


def page_sentence(page: str, data: Path | None) -> str:
    """One line. The token itself is printed nowhere: terminals are recorded and shared."""
    from shoal_protos.bearer import TOKEN_FILE

    from shoal_controller.settings import data_folder

    where = "SHOAL_TOKEN" if os.environ.get("SHOAL_TOKEN") else f"the token in {data_folder(data) / TOKEN_FILE}"
    return f"page: {page} (asks for {where})"


def open_browser(page: str) -> bool:
    """Whether a browser with windows was found. One that runs in a terminal would take this one."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if type(browser) is webbrowser.GenericBrowser:
        return False
    return browser.open(page)
