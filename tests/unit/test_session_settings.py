"""A worker's environment: what it means, and the sentence for each way in which it cannot work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rule import Edit, rule
from shoal.session.controller_link import ControllerLink
from shoal.session.link_choice import AloneLink, open_link
from shoal.session.settings import SessionSettings
from shoal_protos.errors import UserError
from tiers import check

pytestmark = check("starts processes")


def test_without_a_controller_a_script_trains_alone() -> None:
    link, faults = open_link({})
    assert isinstance(link, AloneLink) and link.alone and faults == ""


def test_with_a_controller_nothing_is_opened_before_the_hello() -> None:
    link, faults = open_link({"SHOAL_CONTROLLER": "127.0.0.1:1", "SHOAL_JOB": "j", "SHOAL_WORKER_ID": "w3",
                              "SHOAL_FAULT": "w3@1:vote:kill"})  # fmt: skip
    assert isinstance(link, ControllerLink) and not link.alone
    assert (link.worker, faults) == ("w3", "w3@1:vote:kill")
    link.close()


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"SHOAL_CONTROLLER": "somewhere"}, "SHOAL_CONTROLLER is 'somewhere'; expected HOST:PORT"),
        ({"SHOAL_CONTROLLER": "host:70000"}, "SHOAL_CONTROLLER is 'host:70000'; expected HOST:PORT"),
        ({"SHOAL_CONTROLLER": "host:1,"}, "SHOAL_CONTROLLER is 'host:1,'; expected HOST:PORT"),
        ({"SHOAL_CONTROLLER": "a:1,b"}, "'a:1,b'; expected HOST:PORT, such as 127.0.0.1:7071, or several separated by"),
        (
            {"SHOAL_GRACE_SECONDS": "soon"},
            "SHOAL_GRACE_SECONDS is 'soon'; expected a number of seconds from 0 to",
        ),
        ({"SHOAL_GRACE_SECONDS": "-1"}, "SHOAL_GRACE_SECONDS is '-1'; expected a number"),
        ({"SHOAL_GRACE_SECONDS": "nan"}, "SHOAL_GRACE_SECONDS is 'nan'; expected a number"),
        ({"SHOAL_CONTROLLER": "host:7071"}, "SHOAL_CONTROLLER is set and SHOAL_JOB is not; set it"),
        ({"SHOAL_TLS_KEY": "k"}, "SHOAL_TLS_CERTIFICATE and SHOAL_TLS_KEY are needed together; only one is set"),
        ({"SHOAL_TLS_KEY": "k", "SHOAL_TLS_CERTIFICATE": "c"}, "SHOAL_TLS_CA is not; mutual TLS needs both"),
    ],
)
def test_an_environment_that_cannot_work_is_told_so_in_one_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        SessionSettings.from_environment(environment)
    assert sentence in str(refused.value)


@rule(
    "N processes that another launcher started without a controller do not train N models",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.session.link_choice", "    _refuse_other_launchers(environment)\n", "    assert STARTERS\n"),
)
@pytest.mark.parametrize(
    ("variable", "starter"), [("WORLD_SIZE", "torchrun"), ("SLURM_NTASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_a_script_started_by_another_launcher_is_told_that_each_process_would_train_alone(
    variable: str, starter: str
) -> None:
    with pytest.raises(UserError) as refused:
        open_link({variable: "4"})
    assert str(refused.value).startswith(
        f"{variable} is 4: {starter} has started this script 4 times, and each would train by itself, since there is "
        "no SHOAL_CONTROLLER. Start it with `shoal run`"
    )
    for given in ("1", "", "many"):
        assert open_link({variable: given})[0].alone
    link, _ = open_link({variable: "4", "SHOAL_CONTROLLER": "127.0.0.1:1", "SHOAL_JOB": "j"})
    assert not link.alone
    link.close()


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (
            "os.environ.clear()",
            "SHOAL_CONTROLLER was 127.0.0.1:1 when this process started, and the script has taken it out of "
            "os.environ, without which this worker would train by itself. Leave the variables SHOAL_* where they are "
            "until shoal.initialize has returned; to train alone, set SHOAL_CONTROLLER to an empty text.",
        ),
        ("os.environ['SHOAL_CONTROLLER'] = ''", "alone"),
    ],
)
def test_a_script_that_takes_its_controller_out_of_the_environment_is_told_so(change: str, outcome: str) -> None:
    """Each worker trained by itself, to its end."""
    script = f"""
import os
{change}
from shoal.session.link_choice import open_link
from shoal_protos.errors import UserError
try:
    print("alone" if open_link()[0].alone else "with its controller")
except UserError as error:
    print(error)
"""
    environment = {**os.environ, "SHOAL_CONTROLLER": "127.0.0.1:1", "SHOAL_JOB": "job"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{outcome}\n"


def test_a_worker_beside_its_controller_is_reached_by_loopback() -> None:
    assert SessionSettings(controller="127.0.0.1:7071", job="j").own_host() == "127.0.0.1"
    assert SessionSettings(controller="localhost:7071", job="j").own_host() == "127.0.0.1"
    assert SessionSettings(controller="127.0.0.1:7071", job="j", host="10.1.2.3").own_host() == "10.1.2.3"


def test_a_controller_may_have_several_addresses_of_which_one_is_enough_to_find_ones_own() -> None:
    settings = SessionSettings(controller="no.such.host.invalid:1, 127.0.0.1:7071", job="j")
    assert settings.addresses == ("no.such.host.invalid:1", "127.0.0.1:7071")
    assert settings.own_host() == "127.0.0.1"
    with pytest.raises(UserError, match=r"no\.such\.host\.invalid cannot be routed to: .*; nor\.this\.invalid cannot"):
        SessionSettings(controller="no.such.host.invalid:1,nor.this.invalid:1", job="j").own_host()


def test_the_token_is_never_printed() -> None:
    settings = SessionSettings(controller="h:1", job="j", token="secret")
    assert settings.token is not None and settings.token.get_secret_value() == "secret"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("token", ["hush\n", "hushé", " hush"])
def test_a_token_that_cannot_be_sent_is_not_repeated(token: str) -> None:
    given = {"SHOAL_CONTROLLER": "localhost:1", "SHOAL_JOB": "a", "SHOAL_TOKEN": token}
    with pytest.raises(UserError) as refusal:
        SessionSettings.from_environment(given)
    assert str(refusal.value) == "SHOAL_TOKEN has characters that an HTTP header cannot carry; use printable ones"
