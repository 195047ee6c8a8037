"""Ranks as tasks of a Ray cluster, on the nodes of the layout; the controller is Ray's driver and no rank."""

from __future__ import annotations

import logging
import socket
from typing import Any

from torch import distributed as dist

from moesaic.engine.launchers.door import Door, enter
from moesaic.engine.launchers.launcher import (
    END_S,
    JOIN_TIMEOUT_S,
    Address,
    Launcher,
    Member,
    open_store,
)
from moesaic.errors import ConfigError, MoesaicError

CONNECT_S = 5.0  # guess: a cluster that is there answers sooner; Ray itself would try for more than a minute


class Ray(Launcher):
    """Tasks over the nodes of a cluster."""

    name = "ray"

    def __init__(
        self,
        address: Address | None = None,
        *,
        cluster: str | None = None,
        ranks_per_node: int | None = None,
        num_threads: int | None = None,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        """`num_threads` are those of a node together, None all that Ray says it has.

        `cluster` is where RAY_ADDRESS says that it is; None: on this machine.

        Raises: ConfigError without Ray, without a cluster, and when a port is taken.
        """
        self._ray, self._owns_ray = _connect(cluster)
        self._per_node, self._num_threads, self._timeout_s = ranks_per_node, num_threads, timeout_s
        address = address or Address(host=self._ray.util.get_node_ip_address())
        self._store = open_store(address)
        self._door = Door(address, self._store)
        self._door.publish(self._store)
        self._tasks: list[Any] = []

    def start(self, num_ranks: int) -> list[Member]:
        """Start a task a rank and let them in."""
        nodes, per_node = self._nodes(num_ranks)
        on_node = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for rank in range(num_ranks):
            node = nodes[rank // per_node]
            here = min(per_node, num_ranks - rank // per_node * per_node)
            options = {
                "num_cpus": self._cpus(node, here),
                "max_retries": 0,
                "max_calls": 1,  # the process ends with its rank
                "name": f"moesaic rank {rank}",
                "scheduling_strategy": on_node(node["NodeID"], soft=False),
            }
            run = self._ray.remote(**options)(run_rank)
            self._tasks.append(run.remote(rank, self._store.host, self._store.port, self._timeout_s))
        pipes = self._door.let_in(range(num_ranks), self._timeout_s, self._check)
        return [Member(pipe=pipes[rank], process=None) for rank in range(num_ranks)]

    def close(self) -> None:
        """Ranks leave when their pipe closes; Ray kills those that do not."""
        self._door.close()
        _, left = (
            self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=END_S)
            if self._tasks
            else ([], [])
        )
        for task in left:
            self._ray.cancel(task, force=True)
        if self._owns_ray:
            self._ray.shutdown()

    def _nodes(self, num_ranks: int) -> tuple[list[dict[str, Any]], int]:
        """(nodes in the order of their ranks, ranks on each): the driver's first, the last may have fewer."""
        own = self._ray.get_runtime_context().get_node_id()
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        nodes.sort(key=lambda node: (node["NodeID"] != own, node["NodeID"]))
        per_node = self._per_node or -(-num_ranks // max(len(nodes), 1))
        needed = -(-num_ranks // per_node)
        if needed > len(nodes):
            raise ConfigError(
                f"{num_ranks} ranks, {per_node} a node, need {needed} nodes, and this Ray cluster has "
                f"{len(nodes)} with processors: add nodes with ray start, or ask for more --ranks-per-node"
            )
        return nodes[:needed], per_node

    def _cpus(self, node: dict[str, Any], num_ranks: int) -> int:
        """Processors to reserve for one rank of a node."""
        there = int(node["Resources"]["CPU"])
        wanted = max(1, (self._num_threads or there) // num_ranks)
        if wanted * num_ranks > there:
            raise ConfigError(
                f"{num_ranks} ranks of {wanted} processors need {wanted * num_ranks}, and Ray's node "
                f"{node['NodeManagerAddress']} has {there}: ask for fewer ranks or --threads, or add nodes"
            )
        return wanted

    def _check(self) -> None:
        ended, _ = self._ray.wait(self._tasks, num_returns=1, timeout=0)
        for task in ended:
            rank = self._tasks.index(task)
            try:
                self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                raise MoesaicError(
                    f"rank {rank} did not start on its node: {last}; every node needs the same moesaic"
                ) from error
            raise MoesaicError(f"rank {rank} ended before it came to the controller's door")


def run_rank(rank: int, host: str, port: int, timeout_s: float) -> None:
    """A rank's task."""
    pipe, store, address = enter(dist.TCPStore(host, port, is_master=False), rank, timeout_s)
    from moesaic.engine.rank import serve  # heavy: after the controller was found

    serve(pipe, store, rank, address)


def _connect(cluster: str | None) -> tuple[Any, bool]:
    """(the module, whether it was connected here)."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"launcher ray needs {missing.name}, which is not installed: pip install 'moesaic[ray]'"
        ) from missing
    if ray.is_initialized():
        return ray, False
    if cluster is not None:
        check_reachable(cluster)
    try:
        # What ranks print stays in Ray's own logs: here standard output is for results.
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ConfigError(
            "launcher ray found no cluster: start one with ray start --head, add nodes with ray start "
            "--address HOST:6379, or name one in RAY_ADDRESS"
        ) from error
    return ray, True


def check_reachable(cluster: str, timeout_s: float = CONNECT_S) -> None:
    """Whether anything listens where RAY_ADDRESS says that a cluster is.

    Raises: ConfigError with the reason, and what to do.
    """
    address = Address.parse(cluster.removeprefix("ray://"), "RAY_ADDRESS")
    try:
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except OSError as error:
        why = error.strerror or f"no answer within {timeout_s:g} s"
        raise ConfigError(
            f"RAY_ADDRESS {cluster} cannot be reached ({why}): start a cluster there with ray start --head "
            f"--port {address.port}, name another, or unset RAY_ADDRESS to take the one of this machine"
        ) from error
