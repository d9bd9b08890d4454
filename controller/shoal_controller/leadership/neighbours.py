"""How a controller asks another one, and whether that one leads: for one that cannot ask the store.

A leader that is cut off from the store, and not from its workers, would keep them from the one that was elected in its
place. What a neighbour says ends a term; it begins none.
"""

from __future__ import annotations

import httpx
import structlog
from pydantic import ValidationError

from shoal_controller.api.answers import HealthAnswer
from shoal_controller.leadership.election import ControllerPlace
from shoal_controller.store.store import Revision

ANSWER_SECONDS = 1.0

log = structlog.get_logger("shoal.leadership")


def client_for(patience: httpx.Timeout) -> httpx.AsyncClient:
    """For requests to other controllers. They speak plain HTTP: to read all authorities for each client takes 30 ms."""
    return httpx.AsyncClient(verify=False, timeout=patience, trust_env=False)


async def term_of(place: ControllerPlace) -> Revision:
    """The term in which it surely leads; 0: it does not, or does not answer."""
    try:
        async with client_for(httpx.Timeout(ANSWER_SECONDS)) as client:
            answer = await client.get(f"http://{place.http}/healthz")
        return HealthAnswer.model_validate_json(answer.content).term
    except (httpx.HTTPError, ValidationError) as error:
        log.info("a neighbour does not say who leads", neighbour=place.http, error=str(error) or type(error).__name__)
        return 0
