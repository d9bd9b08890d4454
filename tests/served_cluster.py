"""Serves the tests' API server to a command, as if it were a cluster without nodes: `make cluster NODES=fake` where no
KUBECONFIG is given.

    python -m served_cluster COMMAND …        the command finds KUBECONFIG in its environment
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from api_faults import served
from api_server import kubeconfig
from ports import free_port
from whole_api import WholeCluster


async def serve(command: list[str]) -> int:
    with TemporaryDirectory(prefix="shoal-cluster-") as folder:
        async with served(WholeCluster(), free_port()) as url:
            (file := Path(folder) / "kubeconfig").write_text(kubeconfig(url))
            environment = {**os.environ, "KUBECONFIG": str(file)}
            process = await asyncio.create_subprocess_exec(*command, env=environment)
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1:])))
