"""What the commands say of the page: where it is, who may see it, and how a browser is opened; a real controller."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import httpx
import pytest
from asynchronous import asynchronous
from shoal_controller.cli.page import check_flags, open_browser, page_sentence, show_page
from shoal_controller.cli.serve import Interrupts, Places, serving
from shoal_protos.bearer import kept_token
from shoal_protos.errors import UserError
from tiers import check

pytestmark = check("starts commands")


class Windowed(webbrowser.BaseBrowser):
    """A browser that notes what it is to open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
        self.opened.append(url)
        return True


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Windowed:
    found = Windowed()
    monkeypatch.setattr(webbrowser, "get", lambda *_: found)
    return found


@asynchronous
async def test_run_prints_the_address_of_a_page_that_is_there_and_opens_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    places = Places("127.0.0.1:0", "127.0.0.1:0", f"embedded:{tmp_path}", tmp_path)
    async with serving(places, own=True, signals=Interrupts()) as here:
        show_page(here.server, tmp_path, open_page=True)
        printed = capsys.readouterr().err
        assert printed == f"page: {here.server.page} (asks for the token in {tmp_path / 'token'})\n"
        assert browser.opened == [here.server.page] and kept_token(tmp_path) not in printed
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert "<title>" in (await client.get(here.server.page)).text
            assert (await client.get(f"{here.server.page}v1/about")).status_code == 401


@asynchronous
async def test_without_a_page_nothing_is_printed_and_nothing_can_be_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = Places("127.0.0.1:0", "127.0.0.1:0", f"embedded:{tmp_path}", tmp_path, no_page=True)
    async with serving(places, own=True, signals=Interrupts()) as here:
        show_page(here.server, tmp_path, open_page=False)
        assert capsys.readouterr().err == "" and here.server.page == ""
        with pytest.raises(UserError, match="SHOAL_PAGE is false"):
            show_page(here.server, tmp_path, open_page=True)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.get(f"{here.server.url}/")).status_code == 404


def test_two_flags_that_exclude_each_other_get_one_sentence() -> None:
    with pytest.raises(UserError, match="--open-page and --no-page exclude each other"):
        check_flags(no_page=True, open_page=True)
    check_flags(no_page=False, open_page=True)


def test_a_token_of_the_environment_is_named_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    assert page_sentence("http://h:1/", tmp_path) == "page: http://h:1/ (asks for SHOAL_TOKEN)"


def test_a_machine_without_a_browser_with_windows_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "get", lambda *_: webbrowser.GenericBrowser("lynx"))
    assert not open_browser("http://h:1/")

    def none(*_: object) -> webbrowser.BaseBrowser:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    assert not open_browser("http://h:1/")


@pytest.mark.parametrize("everywhere", [{"grpc": "0.0.0.0:7071"}, {"http": "0.0.0.0:7070"}])
def test_a_command_that_makes_its_token_may_listen_for_other_machines_before_the_token_is_made(
    tmp_path: Path, everywhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    places = Places(**{"http": None, "grpc": None, "store": None, "data": tmp_path / "data", **everywhere})
    places.check()
    assert list(tmp_path.iterdir()) == []
    settings = places.settings(own=True)
    assert settings.token is not None and settings.token.get_secret_value() == kept_token(tmp_path / "data")
    with pytest.raises(UserError, match="can be reached from other machines without a token: set SHOAL_TOKEN"):
        places.settings(own=False)
