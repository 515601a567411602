"""Agreement between ranks: no rank starts what another cannot finish, and all ranks raise an error of one.

`Agreement.run` runs a step that may fail on some ranks: all ranks get its value, or all raise one error. It uses
`Agreement.check`, the one small collective at the start of the set-up and of a mini-batch, which compares named digests,
exchanges errors, and names the ranks outside the majority. If a rank fails while its peers wait inside a collective, it leaves
its error in the rendezvous store (`Mailbox`), where the peers find it when their connection breaks. A peer that vanishes without
an error is a `PeerError`. Ranks that time out meet at a monitored barrier in the store, which names the rank that does not
answer (`SilentPeerError`). The next agreement of all ranks clears an error that a script has caught.
"""

import contextlib
import errno
import functools
import hashlib
import json
import queue
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from hf_hotspa.data.collator import MicroBatch, MiniBatch
from hf_hotspa.errors import (
    DataError,
    HotspaConfigError,
    HotspaError,
    PeerError,
    PlanMismatchError,
    SilentPeerError,
    TransferError,
)
from hf_hotspa.parallel.mesh import known_nodes
from hf_hotspa.strategy import Strategy

T = TypeVar("T")

# -- the barrier ------------------------------------------------------------------------------------------------------

# A rank that hangs reports nothing. Its peers see a collective that times out or, if another rank gave up earlier, a
# closed connection. Each writes its name to the rendezvous store. Ranks that timed out wait a few seconds for all other
# names. Ranks that wait for each other give up at about the same moment, so a rank whose name is still missing hangs, is
# stopped, or does something that takes longer than the timeout. Nothing is written before a collective fails.


ANSWER_S = 3.0  # how long to wait for an answer after the timeout of the collective
_STORE_S = 10.0  # time limit for all of that: if the store's machine is frozen or cut off, a call would never return
_GRACE_S = 0.5  # between the closed connection of a rank that gave up, and that rank's call
_POLL_S = 0.05
_TIMED_OUT = re.compile("[Tt]imed? ?out")
_CALLED = "hotspa_barrier"


class MonitoredBarrier:
    """Like `torch.distributed.monitored_barrier`, but over the store of all ranks, and one rank's side of it. Waiting ends
    once the run's first error is under the key `outcome`. Several threads may use it at a time."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, outcome: str) -> None:
        self._store, self._rank, self._world_size, self._outcome = store, rank, world_size, outcome

    def named(self, error: HotspaError) -> HotspaError:
        """Returns a `SilentPeerError` that names the silent ranks if the wait timed out and some did not answer; else the
        error itself, also when the process that holds the store is gone."""
        with contextlib.suppress(RuntimeError):  # the only error that torch's stores raise
            self._store.set(self._key(self._rank), "here")
            if not _TIMED_OUT.search(str(error)):
                # its peer may be about to report why it gave up
                if self._wait(_GRACE_S, lambda: self._store.check([_CALLED])):
                    self._wait(ANSWER_S + _GRACE_S, lambda: False)
                return _with_node(error)
            self._store.set(_CALLED, "called")
            self._wait(ANSWER_S, lambda: not self._silent())
            silent = self._silent()
            if silent and not self._store.check([self._outcome]):
                return _silent_error(error, silent)
        return error

    def _key(self, rank: int) -> str:
        return f"{_CALLED}/{rank}"

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([self._key(rank)])]

    def _wait(self, seconds: float, ready: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not (so := ready()) and not self._store.check([self._outcome]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return so


def _with_node(error: HotspaError, else_why: str = "") -> HotspaError:
    nodes = known_nodes()
    remark = (nodes.behind(error.what) if nodes is not None else "") or else_why
    if not remark:
        return error
    named = HotspaError.from_dict({**error.to_dict(), "what": error.what + remark})
    named.is_echo = False  # perhaps no other rank is left to report more
    return named


def _without_store(error: HotspaError, rank: int) -> HotspaError:
    nodes = known_nodes()
    elsewhere = nodes is not None and nodes.names[0] != nodes.names[rank]
    where = f"the node of rank 0, {nodes.names[0]}" if nodes is not None and elsewhere else "the main node"
    return _with_node(error, f"; nor does the store that all ranks share answer, which is on {where}")


def _in_time(function: Callable[[], T], seconds: float) -> T:
    """Calls a function of a store in a separate thread, as nothing else can end its wait; raises its error or
    `TimeoutError`, and then leaves the thread running."""
    came: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            came.put((function(), None))
        except Exception as failure:
            came.put((None, failure))

    threading.Thread(target=call, name="hotspa-store", daemon=True).start()
    try:
        value, failure = came.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the store has not answered for {seconds:.0f} s") from None
    if failure is not None:
        raise failure
    return cast(T, value)


def _silent_error(error: HotspaError, silent: list[int]) -> SilentPeerError:
    names = ", ".join(map(str, silent))
    who = (
        f"rank {names} is silent" if len(silent) == 1 else f"of the ranks {names}, which are silent, at least one hangs"
    )
    nodes = known_nodes()
    where = nodes.shown(silent) if nodes is not None else ""
    return SilentPeerError(
        f"{who}{where}: the other ranks timed out and found each other, but not it. {error.what}",
        where=error.where,
        why="it hangs, is stopped, or does something that takes longer than the others wait; the master weights of the "
        "ranks are unchanged",
        fix="look at what that rank does (its log, py-spy dump), and start again with resume_from_checkpoint=True; where it "
        "is merely slow, raise ddp_timeout, or hotspa_switch_timeout in a switch",
    )


# -- agreement --------------------------------------------------------------------------------------------------------


_MAILBOX_KEY = "hotspa_first_error"
_MAX_LISTED, _MAX_RANKS, _MAX_SHOWN = 5, 8, 120
_HALF, _FLAGS = 1 << 63, 48
_LOST = re.compile(  # what gloo and NCCL report when a peer is gone or silent
    "[Cc]onnection (closed|reset|refused)|pair closure|[Bb]roken pipe|[Tt]imed? ?out|[Ss]ocket (closed|timeout)"
    "|failed to recv|does not answer"
)
_NO_FILES = "Too many open files"  # what the system says in the errors of gloo, NCCL and Python


def _word(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`; of many the first ones and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MAX_RANKS:
        return f"ranks {', '.join(map(str, ranks[:_MAX_RANKS]))} and {len(ranks) - _MAX_RANKS} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def packed_flags(flags: Iterable[bool]) -> list[float]:
    """Packs flags, 48 to a number (exact in fp64), for `Agreement.gather`."""
    words = list[float]()
    for number, flag in enumerate(flags):
        if number % _FLAGS == 0:
            words.append(0.0)
        words[-1] += flag << number % _FLAGS
    return words


def any_flag(gathered: torch.Tensor, number: int) -> list[bool]:
    """Which of `number` flags any rank has set, from fp64 [world size, n] `packed_flags`."""
    words = functools.reduce(torch.bitwise_or, gathered.long()).tolist()
    return [bool(words[place // _FLAGS] >> place % _FLAGS & 1) for place in range(number)]


def differing_ranks(columns: Sequence[Sequence[Hashable]]) -> list[int] | None:
    """The positions that differ from the majority in any column of values; None if a column has no majority."""
    odd = set[int]()
    for seen in columns:
        usual, count = Counter(seen).most_common(1)[0]
        if 2 * count <= len(seen):
            return None
        odd.update(at for at, value in enumerate(seen) if value != usual)
    return sorted(odd)


def _mismatch(seen: Mapping[str, list[Any]], where: str, shows_values: bool = False) -> PlanMismatchError:
    """The error for named values (one for each rank) that differ between ranks."""
    seen = {name: values for name, values in seen.items() if len(set(values)) > 1}
    sides = []
    for name, values in list(seen.items())[:_MAX_LISTED]:
        holders = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
        if shows_values:
            first = _first_difference(values)
            parts = (f"{_shown(value, first)} on {rank_names(ranks)}" for value, ranks in holders.items())
        else:
            parts = (f"ranks {ranks} agree" for ranks in holders.values())
        sides.append(f"{name}: {', '.join(parts)}")
    odd = differing_ranks(list(seen.values()))
    who = f"{rank_names(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others" if odd else "ranks differ"
    more = f" (and {len(seen) - _MAX_LISTED} more)" if len(seen) > _MAX_LISTED else ""
    return PlanMismatchError(
        f"{who} in the {'; in the '.join(sides)}{more}",
        where=where,
        why="every rank must compute the same from this; nothing was sent",
        fix="start every rank with the same script, arguments, files, environment and library versions",
    )


def _first_difference(values: Sequence[str | None]) -> int:
    texts = [value for value in values if value is not None]
    columns = enumerate(zip_longest(*texts)) if len(texts) == len(values) else ()
    return next((place for place, letters in columns if len(set(letters)) > 1), 0)


def _shown(value: str | None, first: int) -> str:
    if value is None:
        return "missing"
    if len(value) <= _MAX_SHOWN:
        return value
    begin = max(0, min(first - _MAX_SHOWN // 2, len(value) - _MAX_SHOWN + 3)) if first > _MAX_SHOWN // 2 else 0
    part = value[begin : begin + _MAX_SHOWN - 6]
    return f"{'...' if begin else ''}{part}{'...' if begin + len(part) < len(value) else ''}"


def as_hotspa_error(error: BaseException, where: str) -> HotspaError:
    """The error itself if a `HotspaError`, else a `PeerError` that quotes it or its first cause."""
    if isinstance(error, HotspaError):
        return error
    while error.__cause__ is not None:
        error = error.__cause__
    return PeerError(
        f"{type(error).__name__}: {error}",
        where=where,
        why="an error on one rank ends all ranks",
        fix="fix the error of this rank; its traceback is in its log",
    )


def hotspa_cause(error: BaseException) -> HotspaError | None:
    """The `HotspaError` that this is, or that a library wrapped (`raise RuntimeError from ours`)."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HotspaError):
        cause = cause.__cause__
    return cause


def lost_peer(error: BaseException, rank: int, where: str) -> HotspaError | None:
    """The typed error if communication broke because a peer, or the store that all ranks share, is gone or silent, or
    because this process may not open more files; else None."""
    if isinstance(error, HotspaError) or not isinstance(error, RuntimeError | OSError):
        return None
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    where = f"rank {rank}, {where}"
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or _NO_FILES in str(error):
        return _no_descriptors(text, where)
    if not isinstance(error, RuntimeError):
        return None
    if isinstance(error, dist.DistNetworkError) or "TCPStore" in str(error):
        gone = PeerError(
            f"the store that all ranks share does not answer: {text}",
            where=where,
            why="the main node, or the process on it that holds the store, is gone, or cannot be reached",
            fix="look at the log of the main node (the one of rank 0), and start again with resume_from_checkpoint=True",
        )
        gone.is_echo = False  # perhaps no rank is left to report more
        return gone
    if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
        return None
    return PeerError(
        f"another rank is gone, or did not answer in time: {text}",
        where=where,
        why="a process that dies or hangs leaves no message",
        fix="look at the logs of the other ranks, and start again with resume_from_checkpoint=True",
    )


def _no_descriptors(text: str, where: str) -> HotspaConfigError:
    limit = ""
    with contextlib.suppress(ImportError):  # not a Unix
        import resource

        limit = f", and {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} are allowed"
    return HotspaConfigError(
        f"the process has too many open files and connections{limit}: {text}",
        where=where,
        why="each process has connections to the others in every process group, and files of its loaders",
        fix="raise the limit before the launch, on every node: ulimit -n 65536 (LimitNOFILE in systemd, --ulimit nofile in docker)",
    )


@contextlib.contextmanager
def typed_failures(rank: int, where: str) -> Iterator[None]:
    """Inside, a failure of communication is a typed error (`lost_peer`)."""
    try:
        yield
    except (RuntimeError, OSError) as failure:
        error = lost_peer(failure, rank, where)
        if error is None:
            raise
        raise error from failure


def _located(error: HotspaError, rank: int) -> HotspaError:
    data = error.to_dict()
    if not re.match(rf"rank {rank}\b", data["where"] or ""):
        data["where"] = f"rank {rank}" + (f", {data['where']}" if data["where"] else "")
    return HotspaError.from_dict(data)


class Agreement:
    """Compares digests and exchanges errors over a host-side process group. `group`: a group of all ranks for host
    tensors; None with one rank. `mailbox`: asked for the reason when a peer is gone. If a peer is gone or silent,
    all methods raise `PeerError`, or the error that the peer left in the mailbox."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, mailbox: "Mailbox | None" = None) -> None:
        self.group, self.rank, self._mailbox = group, rank, mailbox

    def run(
        self,
        where: str,  # the place, for messages: `set-up`
        function: Callable[[], T],
        digests: Callable[[T], Mapping[str, str]] | None = None,  # what must be equal on all ranks, by name (`check`)
        *,
        facts: Callable[[T], Mapping[str, str]] | None = None,  # the same, with values that the message shows
        # converts other exceptions to an error for all ranks. If None, this rank alone raises them, at once (a broken
        # connection as a typed error), and the others find them in the mailbox.
        otherwise: Callable[[Exception], HotspaError] | None = None,
    ) -> T:
        """Calls the function on every rank; returns its value if it succeeds on all. A collective call. Raises
        `HotspaError`: on every rank, the error of the first rank on which one of the functions raised. Raises
        `PlanMismatchError`: on every rank, when something differs."""
        outcome: list[T] = []  # empty after an error: a value may be None
        error, compared, shown = None, dict[str, str](), dict[str, str]()
        try:
            value = function()
            compared |= digests(value) if digests is not None else {}
            shown |= facts(value) if facts is not None else {}
            outcome.append(value)
        except HotspaError as failure:
            error = failure
        except Exception as failure:
            if otherwise is None:
                if (broken := lost_peer(failure, self.rank, where)) is None:
                    raise
                raise self._explained(broken, where) from failure
            error = otherwise(failure)
        self.check(compared, error, where, facts=shown)
        return outcome[0]

    def check(
        self,
        digests: Mapping[str, str],  # what must be equal, by name
        error: HotspaError | None,  # this rank's error, or None
        where: str,  # the place, for messages: `mini-batch 12`
        *,
        # the same, with values that the message shows. Names may differ between ranks, too.
        facts: Mapping[str, str] | None = None,
        balance: int = 0,  # a number; its sum over all ranks must be 0 modulo 2^64 (see `check_mini_batch`)
        # the error if it is not. Called on every rank, so it may communicate.
        explain: Callable[[], HotspaError] | None = None,
    ) -> None:
        """Returns when no rank has an error and all digests are equal; this takes one small collective. Raises
        `HotspaError`: on every rank, the error of the first rank that has one. Raises `PlanMismatchError`: on every
        rank, when something differs. Nothing has been sent."""
        if self.group is None:
            if error is not None:
                raise error
            return
        text = json.dumps(error.to_dict()).encode() if error is not None else b""
        names = ", ".join(digests)
        # of a fixed size, whatever is compared: a gather needs equal sizes
        words = [
            len(text),
            _word(repr(sorted((facts or {}).items()))),
            _word(names),
            _word(repr(list(digests.values()))),
            (balance + _HALF) % (2 * _HALF) - _HALF,
            self._mailbox.next_era if self._mailbox is not None else 0,
        ]
        errors, shown, listed, compared, balances, eras = zip(
            *(row.tolist() for row in self._gather(torch.tensor(words, dtype=torch.int64))), strict=True
        )
        if self._mailbox is not None:  # all ranks are here, so earlier errors are over
            self._mailbox.begin_era(max(eras))
        if any(errors):
            self._raise_first(text, errors)
        if len(set(shown)) > 1:
            everyone = [json.loads(of_rank) for of_rank in self.texts(json.dumps(dict(facts or {})))]
            every_name = dict.fromkeys(name for of_rank in everyone for name in of_rank)
            raise _mismatch({name: [of_rank.get(name) for of_rank in everyone] for name in every_name}, where, True)
        if len(set(listed)) > 1:
            raise _mismatch({"list of what to compare": list(listed)}, where)
        if len(set(compared)) > 1:
            details = self._gather(torch.tensor([_word(digest) for digest in digests.values()], dtype=torch.int64))
            raise _mismatch({name: [int(row[i]) for row in details] for i, name in enumerate(digests)}, where)
        if explain is not None and sum(balances) % (2 * _HALF):
            raise explain()

    def gather(self, values: list[float]) -> torch.Tensor:
        """fp64 [world size, number of values] of every rank's values; a collective call."""
        own = torch.tensor(values, dtype=torch.float64)
        return own[None] if self.group is None else torch.stack(self._gather(own))

    def vectors(self, values: torch.Tensor, sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Every rank's 1-D tensor of one dtype in host memory; sizes may be unknown. Collective."""
        if self.group is None:
            return [values]
        if sizes is None:
            sizes = [int(size) for size in self._gather(torch.tensor([len(values)], dtype=torch.int64))]
        padded = values.new_zeros(max(max(sizes), 1))  # gathers need an element
        padded[: len(values)] = values
        return [part[:size] for part, size in zip(self._gather(padded), sizes, strict=True)]

    def all_to_all(self, send: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
        """What every rank sends to this one, in the order of ranks. `send`, 1-D in host memory, has each rank's elements in
        turn. Collective."""
        if self.group is None:
            return send
        received = send.new_empty(sum(receive_sizes))
        self._collective(lambda: dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group))
        return received

    def start_send(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Starts to send a contiguous host tensor to another rank, which gets it by `receive`."""
        work = dist.isend(tensor, dst=rank, group=self.group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> torch.Tensor:
        """Fills a contiguous host tensor with another rank's message of this tag."""
        self._collective(lambda: dist.recv(tensor, src=rank, group=self.group, tag=tag))
        return tensor

    def wait(self, works: Iterable[dist.Work]) -> None:
        for work in works:
            self._collective(work.wait)

    def barrier(self) -> None:
        if self.group is not None:
            self._collective(lambda: dist.barrier(group=self.group))

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as failure:
            error = lost_peer(failure, self.rank, "agreement of all ranks")
            if error is None:
                raise
            raise self._explained(error, "") from failure

    def _explained(self, error: HotspaError, where: str) -> Exception:
        return self._mailbox.explain(error, where) if self._mailbox is not None else error

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        if self.group is None:
            return [values]
        rows = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        self._collective(lambda: dist.all_gather(rows, values, group=self.group))
        return rows

    def texts(self, text: str) -> list[str]:
        """Every rank's text; a collective call."""
        return [raw.decode() for raw in self._bytes(text.encode())]

    def _bytes(self, data: bytes, sizes: Sequence[int] | None = None) -> list[bytes]:
        return [part.numpy().tobytes() for part in self.vectors(torch.tensor(list(data), dtype=torch.uint8), sizes)]

    def _raise_first(self, text: bytes, sizes: Sequence[int]) -> NoReturn:
        first, raw = next((rank, raw) for rank, raw in enumerate(self._bytes(text, sizes)) if raw)
        raise _located(HotspaError.from_dict(json.loads(raw)), first)


@dataclass
class _Era:
    """The number of the error that a store's mailboxes wait for, from 0, and whether this process knows it."""

    number: int = 0
    known: bool = False


_eras: weakref.WeakKeyDictionary[dist.Store, _Era] = weakref.WeakKeyDictionary()
"""Per process, so that an engine made after an error continues the count."""


class Mailbox:
    """The first error of a run, kept in the rendezvous store for ranks whose peers vanish.

    The next agreement of all ranks empties it, as a script may catch the error on all ranks and continue. `world_size`:
    with 1 nothing is posted."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        # the store behind the default group: private in torch, and the only channel that outlives a broken group
        self._store = dist.distributed_c10d._get_default_store() if world_size > 1 else None
        self._world_size = world_size
        self._era = _eras.setdefault(self._store, _Era()) if self._store is not None else _Era()
        self._mine: Exception | None = None

    @property
    def next_era(self) -> int:
        """The number of the first error that this rank does not know."""
        return self._era.number + self._era.known

    def begin_era(self, number: int) -> None:
        """Discards errors before this one, which all ranks have handled."""
        if number > self._era.number:
            self._era.number, self._era.known = number, False

    def explain(self, error: Exception, where: str) -> Exception:
        """Returns what to raise for an error of this rank: the error itself, or the peer's earlier error that caused it.

        May be called several times, and from any thread. Takes seconds for a lost peer: see `MonitoredBarrier`.
        """
        if self._store is None or error is self._mine:
            return error
        store = dist.PrefixStore(f"hotspa_era_{self._era.number}", self._store)
        lost = error if isinstance(error, PeerError | TransferError) and _LOST.search(str(error)) else None

        def exchange() -> tuple[Exception, str, str]:
            barrier = MonitoredBarrier(store, self.rank, self._world_size, _MAILBOX_KEY)
            reported = barrier.named(lost) if lost is not None else error
            mine = json.dumps(_located(as_hotspa_error(reported, where), self.rank).to_dict())
            return reported, mine, store.compare_set(_MAILBOX_KEY, "", mine).decode()  # keeps the first one

        try:
            error, mine, first = _in_time(exchange, _STORE_S)
        except Exception:
            return _without_store(lost, self.rank) if lost is not None else error
        self._era.known = True
        if first != mine:
            return HotspaError.from_dict(json.loads(first))
        self._mine = error
        return error

    def tell(self, error: Exception, where: str) -> Exception:
        """Returns what to raise for an error that ends training on this rank outside a phase.

        An agreed error is returned unchanged. A broken collective is explained. Any other error is this rank's own: left for
        the others, and returned unchanged.
        """
        if hotspa_cause(error) is not None:
            return error
        lost = lost_peer(error, self.rank, where)
        if lost is not None:
            return self.explain(lost, where)
        self.explain(error, where)
        return error


# -- the same rows ----------------------------------------------------------------------------------------------------

# The ranks of a replica (tp, pp) train each pack together, and each reads the rows for itself. If a data set gave them
# different crops or orders, activations of different rows would be mixed, with a plausible loss. The collator leaves a
# digest of each pack (`MicroBatch.content`). Ranks contribute their sums to an agreement that is made anyway, weighted so
# that the total is zero if every replica agrees. Only after a mismatch are the rows themselves compared and named.


_MODULUS = 1 << 64


def check_mini_batch(
    agreement: Agreement,
    mini_batch: MiniBatch,
    # returns what must be equal before a load. The others are as in `Agreement.check`.
    load_facts: Callable[[], Mapping[str, str]],
    error: HotspaError | None,
    where: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Returns when all ranks may begin a mini-batch: no error, one plan, and the same rows within each replica. Raises
    `HotspaError`: on every rank."""
    if agreement.group is None:  # alone
        if error is not None:
            raise error
        return
    rank = agreement.rank
    agreement.check(
        {**mini_batch.digests(), **load_facts()},
        error,
        where,
        facts=facts,
        balance=balance_of(mini_batch, rank),
        explain=lambda: rows_error(mini_batch, rank, agreement, where),
    )


def balance_of(mini_batch: MiniBatch, rank: int) -> int:
    """This rank's number; the sum over all ranks is 0 modulo 2^64 if the rows of each replica are equal."""
    total = 0
    for phase in mini_batch.phases:
        content = 0
        for micro_batch in phase.micro_batches:
            content = (content * 0x9E3779B97F4A7C15 + micro_batch.content + 1) % _MODULUS
        total += _weight(phase.bucket.strategy, rank) * content
    return total % _MODULUS


def rows_error(mini_batch: MiniBatch, rank: int, agreement: Agreement, where: str) -> DataError:
    """Names what differs if the sum is not 0 and the plan is equal on all ranks. A collective call."""
    mine = [[s for pack in phase.micro_batches for s in _sequences(pack)] for phase in mini_batch.phases]
    everyone = [json.loads(text) for text in agreement.texts(json.dumps(mine))]
    for index, phase in enumerate(mini_batch.phases):
        strategy = phase.bucket.strategy
        for replica in range(strategy.dp):
            ranks = replica_ranks(strategy, replica)
            places = zip(*(everyone[r][index] for r in ranks), strict=True)
            rows = [place for place in places if any(other != place[0] for other in place)]
            if rows:
                return _error(rows, ranks, strategy, f"{where}, strategy {strategy}, replica {replica}")
    return _error([], list(range(len(everyone))), None, where)


@lru_cache(maxsize=4096)
def replica_ranks(strategy: Strategy, replica: int) -> list[int]:
    """The ranks that train the packs of a replica together."""
    return [rank for rank in range(strategy.world_size) if strategy.coord(rank).dp == replica]


@lru_cache(maxsize=4096)
def _weight(strategy: Strategy, rank: int) -> int:
    """A weight; the sum over a replica's ranks is 0, also for a rank alone."""
    *others, last = replica_ranks(strategy, strategy.coord(rank).dp)
    return _odd(rank) if rank != last else -sum(map(_odd, others))


def _odd(rank: int) -> int:
    """An odd number of 64 bits: a product with it loses no bit."""
    return int.from_bytes(hashlib.sha256(str(rank).encode()).digest()[:8], "little") | 1


def _sequences(pack: MicroBatch) -> Iterator[tuple[int, int, str, str]]:
    ends = pack.cu_seqlens.tolist()
    for (row, start), begin, end in zip(pack.keys, ends[:-1], ends[1:], strict=True):
        ids, labels = (t[0, begin:end].cpu().numpy().tobytes() for t in (pack.input_ids, pack.labels))
        yield row, start, hashlib.sha256(ids).hexdigest()[:16], hashlib.sha256(labels).hexdigest()[:16]


def _error(rows: list[Any], ranks: list[int], strategy: Strategy | None, where: str) -> DataError:
    what, odd, names = "tokens or labels", None, ""
    if rows:
        what = "tokens" if any(len({sequence[2] for sequence in place}) > 1 for place in rows) else "labels"
        odd = differing_ranks([[tuple(sequence) for sequence in place] for place in rows])
        numbers = list(dict.fromkeys(place[0][0] for place in rows))
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        names = f", dataset row{'s' if len(numbers) > 1 else ''} {shown}"
    if odd:
        who = [ranks[at] for at in odd]
        text = f"{rank_names(who)} {'hold' if len(who) > 1 else 'holds'} other {what} than the ranks it trains with"
    else:
        text = f"{rank_names(ranks)} hold different {what} of the same rows"
    return DataError(
        text,
        where=where + names,
        why="the ranks of a replica train each row together, and each reads it for itself; nothing was sent",
        fix="give every rank the same rows: random crops and transforms must depend on the row and the epoch, not on the "
        "process; or train with dp alone, where each row is read by one rank",
    )
