"""Ranks that would not compute the same are refused before a weight is read, an absent one is named."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import Forked
from torch import distributed as dist

from moesaic.engine import rank as rank_of_engine
from moesaic.engine import ranks as ranks_of_engine
from moesaic.engine.config import EngineConfig
from moesaic.engine.launch import _start_on_ranks
from moesaic.engine.launchers.door import KEY, Door, enter
from moesaic.engine.launchers.launcher import Address, open_store
from moesaic.engine.launchers.local import LOOPBACK
from moesaic.engine.layout import LayoutWish, arrange
from moesaic.errors import ConfigError, MoesaicError, PeerLost
from moesaic.models.build import read_spec
from moesaic.spec.locate import locate

DEMO = locate("demo").weights_folder()
CONFIG = EngineConfig(model=str(DEMO), layout=LayoutWish(num_ranks=2), backend=None, num_threads=1)

Ask = Callable[[int, Path], EngineConfig]


def other_level(rank: int, folder: Path) -> EngineConfig:
    os.environ["MOESAIC_CPU_LEVEL"] = ("portable", "reference")[rank]
    return CONFIG


def other_version(rank: int, folder: Path) -> EngineConfig:
    rank_of_engine.__version__ = f"9.{rank}"  # type: ignore[attr-defined]
    return CONFIG


def other_numerics(rank: int, folder: Path) -> EngineConfig:
    return replace(CONFIG, kv_format=(None, "int8")[rank])


def other_checkpoint(rank: int, folder: Path) -> EngineConfig:
    return replace(CONFIG, model=(str(DEMO), str(folder))[rank])


def other_layout(rank: int, folder: Path) -> EngineConfig:
    return replace(CONFIG, layout=LayoutWish(num_ranks=2, returns=(None, "subtrees")[rank]))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (other_level, "backend native/portable and reference"),
        (other_version, r"differ in version 9\.0 and 9\.1;"),
        (other_numerics, r"differ in numerics [0-9a-f]{8,} and [0-9a-f]{8,};"),
        (other_checkpoint, r"differ in checkpoint [0-9a-f]{8,} and [0-9a-f]{8,};"),
        (other_layout, "differ in layout .* and attention dp 2, experts ep 2, .*, returns subtrees,"),
    ],
)
def test_ranks_that_were_asked_for_something_else_are_refused_naming_both(
    tmp_path: Path, ask: Ask, message: str
) -> None:
    if ask is other_checkpoint:
        copy_with_one_more(tmp_path)
    with pytest.raises(ConfigError, match=f"ranks 0 and 1 {message}" if "differ" in message else message):
        start(Forked(lambda rank: ask(rank, tmp_path)))


def test_a_rank_that_says_nothing_is_named_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of_engine, "JOIN_TIMEOUT_S", 1.0)

    def sleep_once(rank: int) -> EngineConfig:
        if rank == 1:
            time.sleep(2.5)
        return CONFIG

    with pytest.raises(PeerLost, match=r"rank 1 did not answer within 1\.0 s \(stage join\)"):
        start(Forked(sleep_once))


def start(launcher: Forked) -> None:
    spec = read_spec(DEMO)
    _start_on_ranks(CONFIG, spec, arrange(CONFIG.layout, spec), launcher, "", None)


def copy_with_one_more(folder: Path) -> None:
    """The demo, its weights with an empty tensor more."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    header["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data) - 8 - size] * 2}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


# --- the door
# -------------------------------------------------------------------------------------------------------


def test_ranks_come_in_with_the_token_that_the_store_tells_and_no_other() -> None:
    store = open_store(LOOPBACK)
    door = Door(LOOPBACK, store)
    door.publish(store)
    liar = open_store(LOOPBACK)
    liar.set(KEY, json.dumps(json.loads(store.get(KEY)) | {"token": "00" * 32}))
    turned_away: list[MoesaicError] = []

    def come(meeting: dist.TCPStore, rank: int) -> None:
        try:
            pipe, _, address = enter(meeting, rank, 20.0)
        except MoesaicError as error:
            turned_away.append(error)
            return
        pipe.send((rank, address))

    comers = [threading.Thread(target=come, args=one) for one in ((liar, 2), (store, 2), (store, 1))]
    for comer in comers:
        comer.start()
    pipes = door.let_in((1, 2), 20.0, lambda: None)
    for comer in comers:
        comer.join(20)
    assert [pipes[rank].recv() for rank in (1, 2)] == [(1, "127.0.0.1"), (2, "127.0.0.1")]
    (error,) = turned_away
    assert "rank 2: the controller at 127.0.0.1" in str(error)
    assert "--rank-address HOST:PORT" in str(error)
    with pytest.raises(PeerLost, match=r"rank 3 did not answer within 0\.3 s \(stage join\)"):
        door.let_in((3,), 0.3, lambda: None)
    door.close()


def test_two_processes_of_one_number_are_refused() -> None:
    store = open_store(LOOPBACK)
    door = Door(LOOPBACK, store)
    door.publish(store)
    for _ in range(2):
        threading.Thread(target=enter, args=(store, 1, 20.0)).start()
    with pytest.raises(MoesaicError, match="two processes came as rank 1"):
        door.let_in((1, 2), 20.0, lambda: None)
    door.close()


def test_a_rank_without_a_controller_says_where_it_should_be() -> None:
    with pytest.raises(
        MoesaicError, match=r"rank 1: no controller within 0\.2 s; it is in the process of rank 0"
    ):
        enter(open_store(LOOPBACK), 1, 0.2)


def test_a_port_that_is_taken_is_named_with_the_next_step() -> None:
    store = open_store(LOOPBACK)
    with pytest.raises(
        ConfigError,
        match=rf"cannot be at 127\.0\.0\.1 port {store.port}: Address already in use; .*--rank-address",
    ):
        open_store(Address(host="127.0.0.1", port=store.port))
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.77 is no address of this machine; .*--rank-address HOST:PORT"
    ):
        open_store(Address(host="192.0.2.77"))
    with pytest.raises(
        ConfigError, match=r"the name foo\.invalid is not known here \(.+\); .*--rank-address HOST:PORT"
    ):
        open_store(Address(host="foo.invalid"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no port"),
        ("foo", "no port"),
        (":5", "no host"),
        ("host:", "no port from 0 to 65535 but ''"),
        ("host:99999", "no port from 0 to 65535 but '99999'"),
        ("host:x", "no port from 0 to 65535 but 'x'"),
    ],
)
def test_rank_addresses_are_checked(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"--rank-address '{text}' has {why}: it is HOST:PORT, as in "):
        Address.parse(text, "--rank-address")
    assert Address.parse("a:5", "") == Address(host="a", port=5)
    assert Address.parse("[::1]:5", "") == Address(host="::1", port=5)
