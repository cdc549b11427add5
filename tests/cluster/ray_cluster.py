"""Ray with several nodes on this machine, as Ray's own tests have it: each node is a raylet with its own workers and object store."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import psutil

STORE_BYTES = 100_000_000
"""Of each node's object store; Ray takes a third of the memory otherwise."""


def why_not() -> str | None:
    """Return why this machine cannot run Ray; None if it can."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed: pip install 'offbeat[ray]'"


class RayCluster:
    """Some nodes, the first one with Ray's head: ``with RayCluster() as cluster: ...``; the test is connected to it.

    Args:
        count: of nodes.
        cpus: of each node, as Ray sees it.
        environment: variables of the processes of all nodes.
    """

    def __init__(self, count: int = 3, cpus: int = 2, environment: Mapping[str, str] | None = None) -> None:
        # Other tests use this machine too: without its monitor Ray kills no workers where they use its memory, and with their niceness
        # (Ray's own is 15) its agents are not silent for seconds where they use its cores.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0", RAY_worker_niceness="0")
        self._options: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE_BYTES}
        self._environment, self._made = dict(environment or {}), 0
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={**self._next(), "include_dashboard": False})
        try:
            self.nodes = [self._cluster.head_node, *(self.add_node() for _ in range(count - 1))]
            self._cluster.wait_for_nodes()
            self._cluster.connect()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address of the cluster, for ``ray.init`` and RAY_ADDRESS."""
        return str(self._cluster.address)

    def _next(self) -> dict[str, Any]:
        """Return the options of one more node, which jobs take for a machine of its own."""
        self._made += 1
        return {**self._options, "env_vars": {**self._environment, "OFFBEAT_HOST": f"ray-{self._made}"}}

    def add_node(self) -> Any:
        """Start one more node."""
        return self._cluster.add_node(**self._next())

    def processes(self, node: Any) -> list[psutil.Process]:
        """Return all processes that a node's raylet has started, and those that they have."""
        return list(psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True))

    def remove_node(self, node: Any) -> None:
        """End a node as an autoscaler does."""
        self._cluster.remove_node(node, allow_graceful=True)

    def kill_node(self, node: Any) -> None:
        """Kill a node's raylet and its workers by SIGKILL; Ray learns of it from their silence."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
