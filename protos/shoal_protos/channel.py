"""What both ends of a session's gRPC channel agree on: the method's name, message bounds, keepalive.

The worker's session and the controller's service import it. The messages themselves are bytes to gRPC; `wire` makes and
reads them, so that a broken one is answered by a sentence and not by gRPC's own error.
"""

from __future__ import annotations

GRPC_VARIABLES = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
"""Variables for a worker's environment before gRPC is imported, which reads it then. gRPC's own fork handlers crash
children that are forked beside a busy stream, such as a DataLoader's workers; and it would print two lines of its own
whenever a handshake fails, once a second."""

CONTROLLER_GRPC_VARIABLES = {"GRPC_EXPERIMENTS": "-event_engine_listener", "GRPC_VERBOSITY": "ERROR"}
"""The same for a controller's. The thread that waits for streams reads them itself, as gRPC did for ten years, instead
of waking one of a pool for each message: that took a seventh of the CPU of a controller of 500 workers."""

SESSION_TOKEN = "shoal-session-token"
"""Header of a stream beside `authorization`: the session token of a process that shows its join token there again."""

METHOD = "/shoal.v1.Sessions/Session"
"""The one bidirectional stream; see session.proto."""

MAX_MESSAGE_BYTES = 8 << 20
"""Neither side takes a larger message. A plan for 1,000 workers and 65,536 blocks has less than 1 MiB."""

KEEPALIVE_SECONDS = 10
"""A channel without traffic is asked this often whether it still carries, so that a broken path is noticed by both."""

KEEPALIVE_TIMEOUT_SECONDS = 5
"""A question without an answer for so long breaks the channel. Heartbeats notice a silent worker much earlier."""

ALIVE_SECONDS = 3.0
"""A controller says so often on every stream that it is there."""

SILENT_SECONDS = 7.0
"""A stream of a controller that has said nothing for so long is given up: it has frozen, though its machine answers for
it. Another one may lead by now."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
)
"""Options of both ends."""
