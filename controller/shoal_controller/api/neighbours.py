"""How a controller asks another one, and whether that one leads: for one that cannot ask the store.

A leader that is cut off from the store, and not from its workers, would keep them from the one that was elected in its
place. What a neighbour says ends a term; it begins none.
"""

from __future__ import annotations

import httpx
import structlog
from pydantic import ValidationError

from shoal_controller.access.client_tls import ClientTls
from shoal_controller.api.answers import HealthAnswer
from shoal_controller.leadership.election import ControllerPlace
from shoal_controller.store.store import Revision

ANSWER_SECONDS = 1.0

log = structlog.get_logger("shoal.leadership")


class Neighbours:
    """The other controllers of the store."""

    def __init__(self, tls: ClientTls) -> None:
        self._tls = tls

    def client_for(self, place: ControllerPlace, patience: httpx.Timeout) -> httpx.AsyncClient:
        """For requests to it. One that serves plain HTTP needs no authorities: to read them takes 30 ms."""
        verify = self._tls.context() if place.scheme == "https" else False
        return httpx.AsyncClient(verify=verify, timeout=patience, trust_env=False)

    def why(self, error: Exception, place: ControllerPlace) -> str:
        """Why it does not answer."""
        return self._tls.trouble(error, place.url) or str(error) or type(error).__name__

    async def term_of(self, place: ControllerPlace) -> Revision:
        """The term in which it surely leads; 0: it does not, or does not answer."""
        try:
            async with self.client_for(place, httpx.Timeout(ANSWER_SECONDS)) as client:
                answer = await client.get(f"{place.url}/healthz")
            return HealthAnswer.model_validate_json(answer.content).term
        except (httpx.HTTPError, ValidationError) as error:
            log.info("a neighbour does not say who leads", neighbour=place.http, error=self.why(error, place))
            return 0
