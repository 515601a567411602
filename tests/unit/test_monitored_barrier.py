"""The monitored barrier: threads in place of ranks, and a store in memory."""

import errno
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from hf_hotspa.errors import HotspaConfigError, HotspaError, PeerError, SilentPeerError
from hf_hotspa.parallel import agreement
from hf_hotspa.parallel.agreement import MonitoredBarrier, lost_peer, typed_failures

TIMED_OUT = "another rank is gone, or did not answer in time: Timed out waiting 4000ms for recv operation to complete"
CLOSED = "another rank is gone, or did not answer in time: Connection closed by peer [127.0.0.1]:41234"
OUTCOME = "first error"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ANSWER_S", 2.0)
    monkeypatch.setattr(agreement, "_GRACE_S", 1.0)


class Waits:
    """Counts the polls of the module under test, instead of measuring seconds."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.polls = 0

    def sleep(self, seconds: float) -> None:
        self.polls += 1
        time.sleep(seconds)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    counted = Waits()
    monkeypatch.setattr(agreement, "time", counted)
    return counted


def call(texts: dict[int, str], world_size: int, late_s: float = 0.0) -> dict[int, HotspaError]:
    """What the ranks make of what they have seen; the last one is late."""
    store = dist.HashStore()

    def rank_main(rank: int) -> HotspaError:
        if rank == max(texts):
            time.sleep(late_s)
        error = MonitoredBarrier(store, rank, world_size, OUTCOME).named(PeerError(texts[rank], where=f"rank {rank}"))
        if isinstance(error, SilentPeerError):
            store.set(OUTCOME, str(error))
        return error

    with ThreadPoolExecutor(len(texts)) as ranks:
        return dict(zip(texts, ranks.map(rank_main, texts), strict=True))


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_the_rank_that_does_not_answer_is_named(late_s: float) -> None:
    found = call(dict.fromkeys((0, 1, 3), TIMED_OUT), 4, late_s)
    first = next(error for error in found.values() if isinstance(error, SilentPeerError))
    assert "rank 2 is silent" in first.what
    assert "Timed out waiting 4000ms" in first.what
    assert first.code == "HSP-110"
    assert "ddp_timeout" in str(first.fix)
    assert all(isinstance(error, PeerError) for error in found.values())


def test_several_silent_ranks_share_the_blame() -> None:
    found = call({1: TIMED_OUT}, 4)
    assert "of the ranks 0, 2, 3, which are silent, at least one hangs" in str(found[1])


def test_nobody_is_named_where_all_answer(waits: Waits) -> None:
    store = dist.HashStore()
    for rank in (1, 2):  # they have answered already
        store.set(f"{agreement._CALLED}/{rank}", "here")
    assert type(MonitoredBarrier(store, 0, 3, OUTCOME).named(PeerError(TIMED_OUT))) is PeerError
    assert waits.polls == 0, "it waited for nothing"
    assert {type(error) for error in call(dict.fromkeys(range(3), TIMED_OUT), 3).values()} == {PeerError}


def test_a_rank_whose_connection_was_closed_waits_for_the_verdict() -> None:
    """Its peer has timed out and closed it: it must be there, and must not be the first to say something."""
    store, ended = dist.HashStore(), []

    def closed() -> None:
        MonitoredBarrier(store, 0, 3, OUTCOME).named(PeerError(CLOSED))
        ended.append(store.check([OUTCOME]))

    thread = threading.Thread(target=closed)
    thread.start()
    time.sleep(0.1)
    error = MonitoredBarrier(store, 1, 3, OUTCOME).named(PeerError(TIMED_OUT))
    assert "rank 2 is silent" in str(error)
    store.set(OUTCOME, "known")
    thread.join()
    assert ended == [True]


def test_a_dead_peer_costs_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(MonitoredBarrier, "_wait", lambda self, seconds, ready: waited.append(seconds))
    assert type(call({0: CLOSED}, 2)[0]) is PeerError
    assert waited == [agreement._GRACE_S], "and not for answers"


def test_nothing_is_waited_for_when_the_run_has_its_error(waits: Waits) -> None:
    store = dist.HashStore()
    store.set(OUTCOME, "known")
    for text in (CLOSED, TIMED_OUT):
        error = PeerError(text)
        assert MonitoredBarrier(store, 0, 4, OUTCOME).named(error) is error
    assert waits.polls == 0


def test_a_store_that_is_gone_changes_nothing() -> None:
    class Gone:
        def set(self, *args: Any) -> None:
            raise dist.DistNetworkError("the server is gone")

    error = PeerError(TIMED_OUT)
    store: Any = Gone()
    assert MonitoredBarrier(store, 0, 4, OUTCOME).named(error) is error


def test_the_store_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    del server

    def ask():
        for _ in range(3):
            client.set("key", "value")
            client.get("key")

    with (
        pytest.raises(PeerError, match="the store that all ranks share does not answer") as raised,
        typed_failures(3, "x"),
    ):
        ask()
    assert raised.value.where == "rank 3, x"
    assert "main node" in str(raised.value)
    assert "frame #" not in str(raised.value)
    assert not raised.value.is_echo


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.EMFILE, "Too many open files"), RuntimeError("[enforce fail] socket: Too many open files")],
)
def test_no_descriptors_are_left(failure):
    error = lost_peer(failure, 1, "set-up")
    assert isinstance(error, HotspaConfigError)
    assert f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} are allowed" in error.what
    assert "ulimit -n" in error.fix
    with pytest.raises(HotspaConfigError), typed_failures(1, "set-up"):
        raise failure


def test_other_failures_stay_as_they_are():
    for failure in (
        RuntimeError("shape mismatch"),
        OSError(errno.ENOENT, "no such file"),
        ValueError("Connection closed"),
    ):
        assert lost_peer(failure, 0, "x") is None
        with pytest.raises(type(failure)) as raised, typed_failures(0, "x"):
            raise failure
        assert raised.value is failure
