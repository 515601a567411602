"""How a thing ended that one rank does for all, told through the rendezvous store: the others wait, the one does not.

For calls that scripts may make on every rank or on the first one alone, as the stock Trainer's `save_model`. A
collective would hang there; this only makes those who come wait for the one that works.
"""

import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hf_hotspa.errors import HotspaError, PeerError

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 1.0

_announced: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()
"""How many verdicts this process has announced or heard of, by the store that all ranks share."""


def settled(what: str, function: Callable[[], object], decides: bool, timeout_s: float) -> None:
    """Does a thing, and tells or hears how it ended. The n-th call of a rank is about the n-th thing.

    Args:
        what: What is done, such as the path of a file. An error is heard of only by who was about the same.
        function: What this rank does; it may raise a `HotspaError`.
        decides: Whether this rank does it for the others.
        timeout_s: How long to wait for the one that does.

    Raises:
        HotspaError: the error, on every rank that calls; or `PeerError`, where the one that decides never came.
    """
    error: HotspaError | None = None
    try:
        function()
    except HotspaError as failure:
        error = failure
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # the store behind the default group: private in torch, and the only channel that needs no partner
        store = dist.distributed_c10d._get_default_store()
        number = _announced[store] = _announced.get(store, 0) + 1
        key = f"hotspa_verdict/{number}"
        if decides:
            store.set(key, json.dumps([what, error.to_dict() if error is not None else None]))
        else:
            _await(store, key, what, timeout_s)
            same, told = json.loads(store.get(key))
            if error is None and told is not None and same == what:
                error = HotspaError.from_dict(told)
    if error is not None:
        raise error


def _await(store: dist.Store, key: str, what: str, timeout_s: float) -> None:
    deadline, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
    while not store.check([key]):  # not store.wait: nothing could interrupt it
        if time.monotonic() > deadline:
            raise PeerError(
                f"the main process did not say within {timedelta(seconds=timeout_s)} how this ended: {what}",
                fix="look at its log; call this on every rank, or on the main process alone",
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)
