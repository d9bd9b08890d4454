"""A Python client of a controller's REST API, for scripts, schedulers and notebooks.

    from shoal.client import Client

    with Client() as shoal:
        job = shoal.create_job({"job": "train", "launcher": "local", "command": ["python", "train.py"]})
        shoal.scale_job("train", workers=4)
        print(shoal.wait_for_job("train").reason)

Needs httpx and pydantic, which come with the package without extras, and no torch. See docs/client.md.
"""

from shoal_protos.errors import NoController
from shoal_protos.rest import RestProblem

from shoal.client.rest_answers import (
    CheckpointInfo,
    EventInfo,
    EventOfJobInfo,
    GenerationInfo,
    JobInfo,
    ReportInfo,
    TokenInfo,
    WorkerInfo,
    WorkerNumbers,
)
from shoal.client.rest_client import Client

__all__ = [
    "CheckpointInfo",
    "Client",
    "EventInfo",
    "EventOfJobInfo",
    "GenerationInfo",
    "JobInfo",
    "NoController",
    "ReportInfo",
    "RestProblem",
    "TokenInfo",
    "WorkerInfo",
    "WorkerNumbers",
]
