"""What launchers decide before a process starts: which ranks there are, and on which node of a cluster."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.engine.config import EngineConfig, World, read_ray_address, read_world
from moesaic.engine.launchers.launcher import Address
from moesaic.engine.launchers.ray import Ray, check_reachable
from moesaic.errors import ConfigError

ALONE = EngineConfig(model="m")
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip


def test_what_torchrun_says_is_taken_where_nothing_else_is_asked_for() -> None:
    found = read_world(ALONE, TORCHRUN)
    assert found == World(
        rank=3, num_ranks=4, master_host="node0", master_port=29500, num_local=2, num_nodes=2, has_store=True,
        attempt="1",
    )  # fmt: skip
    assert found.started().ranks_per_node == 2
    for launcher in ("local", "ray"):
        assert read_world(EngineConfig(model="m", launcher=launcher), TORCHRUN) is None  # type: ignore[arg-type]
    assert read_world(ALONE, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert read_world(ALONE, {"RANK": "0"}) is None
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2: MASTER_ADDR, MASTER_PORT are not set"):
        read_world(ALONE, {"RANK": "0", "WORLD_SIZE": "2"})


def test_nodes_of_unlike_size_say_nothing_of_the_layout() -> None:
    found = read_world(ALONE, TORCHRUN | {"LOCAL_WORLD_SIZE": "3"})
    assert found is not None
    assert found.started().ranks_per_node is None
    few = {name: value for name, value in TORCHRUN.items() if "LOCAL" not in name and "TORCH" not in name}
    found = read_world(ALONE, few)
    assert found is not None
    assert not found.has_store
    assert found.started().ranks_per_node is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set; start the ranks by torchrun"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (TORCHRUN | {"RANK": "one"}, "environment variable RANK: 'one' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK 4 must be below WORLD_SIZE 4"),
    ],
)
def test_variables_that_do_not_fit_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_world(EngineConfig(model="m", launcher="torchrun"), environ)


def test_unknown_launchers_are_refused() -> None:
    with pytest.raises(ConfigError, match="launcher 'rey' is unknown; did you mean ray"):
        EngineConfig(model="m", launcher="rey")  # type: ignore[arg-type]


class FakeRay:
    """A cluster as Ray describes it: the driver's node is c."""

    def __init__(self, *cpus: int) -> None:
        self._nodes = [
            {
                "NodeID": "abcdef"[i], "Alive": True, "Resources": {"CPU": float(count)} if count else {},
                "NodeManagerAddress": f"10.0.0.{i}",
            }
            for i, count in enumerate(cpus)
        ]  # fmt: skip
        self._nodes.append({"NodeID": "z", "Alive": False, "Resources": {"CPU": 64.0}})
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "c")


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "per_node", "expected"),
    [
        ((4, 4, 4), 3, None, ("c", "a", "b")),
        ((4, 4, 4), 6, None, ("c", "a", "b")),
        ((4, 4, 4), 3, 2, ("c", "a")),
        ((4, 0, 4), 4, None, ("c", "a")),  # a node without processors is for others
    ],
)
def test_ray_nodes_are_filled_in_order_the_drivers_first(
    monkeypatch: pytest.MonkeyPatch,
    cpus: tuple[int, ...],
    num_ranks: int,
    per_node: int | None,
    expected: Any,
) -> None:
    launcher = on(monkeypatch, FakeRay(*cpus), ranks_per_node=per_node)
    nodes, found = launcher._nodes(num_ranks)
    assert tuple(node["NodeID"] for node in nodes) == expected
    assert found == (per_node or -(-num_ranks // len(expected)))
    launcher._door.close()


def test_ray_clusters_that_are_too_small_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = on(monkeypatch, FakeRay(4, 4, 2), ranks_per_node=1, num_threads=6)
    with pytest.raises(ConfigError, match="4 ranks, 1 a node, need 4 nodes, and this Ray cluster has 3"):
        launcher._nodes(4)
    node = launcher._nodes(3)[0][0]
    with pytest.raises(
        ConfigError, match=r"2 ranks of 3 processors need 6, and Ray's node 10\.0\.0\.2 has 2"
    ):
        launcher._cpus(node, 2)
    launcher._door.close()


def on(monkeypatch: pytest.MonkeyPatch, cluster: FakeRay, **options: Any) -> Ray:
    monkeypatch.setattr("moesaic.engine.launchers.ray._connect", lambda _: (cluster, False))
    return Ray(Address(host="127.0.0.1"), **options)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"launcher ray needs ray, .* pip install 'moesaic\[ray\]'"):
        Ray()


def test_a_cluster_that_cannot_be_reached_is_named_before_ray_tries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_reachable(f"127.0.0.1:{port}")
        check_reachable(f"ray://127.0.0.1:{port}")
    with pytest.raises(
        ConfigError,
        match=rf"RAY_ADDRESS 127\.0\.0\.1:{port} cannot be reached \(Connection refused\): .*--port {port}",
    ):
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(
        ConfigError, match=r"foo\.invalid:6379 cannot be reached \(.+\): start a cluster there"
    ):
        check_reachable("foo.invalid:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS 'foo' has no port"):
        check_reachable("foo")


def test_a_cluster_that_does_not_answer_is_given_up_soon() -> None:
    """A full queue of a socket that accepts nobody: what comes is neither let in nor turned away."""
    with socket.socket() as silent, socket.socket() as first, socket.socket() as second:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with pytest.raises(ConfigError, match=r"cannot be reached \(no answer within 0\.2 s\)"):
            check_reachable(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)


def test_ray_address_names_another_cluster() -> None:
    assert read_ray_address({"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    assert [read_ray_address({"RAY_ADDRESS": one}) for one in ("", "auto", "local")] == [None] * 3
    assert read_ray_address({}) is None
