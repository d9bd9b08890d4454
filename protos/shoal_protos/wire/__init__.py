"""The wire: messages and plans to bytes and back.

`encode_worker` and `decode_controller` are the worker's, `encode_controller` and `decode_worker` the controller's.
Writing trusts its own side; reading trusts nobody: `UserError` with one sentence is all that comes out of bytes that
are not a message within bounds (bounds.py).
"""

from shoal_protos.wire.controller import decode_controller, encode_controller
from shoal_protos.wire.plan import plan_from_bytes, plan_to_bytes
from shoal_protos.wire.worker import decode_worker, encode_worker, job_of_hello

__all__ = [
    "decode_controller",
    "decode_worker",
    "encode_controller",
    "encode_worker",
    "job_of_hello",
    "plan_from_bytes",
    "plan_to_bytes",
]
