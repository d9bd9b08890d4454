"""`make cluster`: the tests of resources, unchanged, against a cluster that a kubeconfig names. Here that is the API
server of the tests, in another process than theirs: it gets the requests of kubectl and of the proxy.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from api_faults import served
from api_server import RESOURCES, kubeconfig
from asynchronous import asynchronous
from cluster_choice import NAMESPACE
from ports import free_port
from whole_api import DEFINITIONS, NAMESPACES, WholeCluster

ROOT = Path(__file__).resolve().parents[2]
CASES = "whatever_the_cluster_answers or without_definition"
SUITE_SECONDS = 200


@pytest.mark.timeout(240)
@asynchronous
async def test_tests_of_resources_run_unchanged_against_a_cluster_that_is_named_and_leave_nothing_in_it(
    tmp_path: Path,
) -> None:
    cluster = WholeCluster()
    cluster.remove(NAMESPACES, NAMESPACE)
    async with served(cluster, free_port()) as url:
        (tmp_path / "kubeconfig").write_text(kubeconfig(url))
        command = ["make", "-o", f"{sys.prefix}/.ready", "cluster", f"VENV={sys.prefix}", f"NAMESPACE={NAMESPACE}"]
        command += [f"KUBECONFIG={tmp_path / 'kubeconfig'}", "TESTS=tests/unit/test_elastic_jobs.py"]
        command += [f"ARGS=-v -p no:cacheprovider --basetemp={tmp_path / 'inner'} -k '{CASES}'"]
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=given, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(SUITE_SECONDS):
            printed, _ = await process.communicate()
        assert process.returncode == 0, printed.decode()
        assert "2 passed" in printed.decode()
        assert not cluster.objects[RESOURCES] and cluster.objects[DEFINITIONS]
        assert NAMESPACE not in cluster.objects[NAMESPACES]
        assert len([one for one in cluster.requests if one[1].startswith(RESOURCES)]) > 20, "they asked this one"
