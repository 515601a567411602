"""The launcher of `hf-hotspa train`: torch's, but a failed start ends with the message of the failed process.

`python -m hf_hotspa.commands.own_launcher` takes the arguments of `torchrun`, which would end with its own traceback
and a table. With `--rdzv-backend loopback` all processes are on this machine and meet at its loopback address, which
other machines cannot reach: torch's `--standalone` listens on every address.
"""

import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

from hf_hotspa.errors import printable

LOOPBACK = "loopback"  # the value of `--rdzv-backend`
_TORCH = "torch.distributed.elastic"


class _Loopback(StaticTCPRendezvous):
    """The processes' store, in the launcher, behind a socket that only this machine reaches."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        super().__init__("127.0.0.1", port, 0, 1, run_id, timeout=600)
        self._store = TCPStore(
            self.master_addr, port, 1, True, self.timeout, multi_tenant=True, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return LOOPBACK


rendezvous_handler_registry.register(LOOPBACK, lambda parameters: _Loopback(parameters.run_id))


def main(words: Sequence[str]) -> int:
    """Starts the processes and waits for them. `words`: arguments of `torchrun`. Returns the exit code: 0; 1 if a
    process failed; 128 plus the signal that ended this launcher."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_TORCH)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the failed process is reported below
    try:
        run(parse_args(list(words)))
    except ChildFailedError as error:
        print(printable(message_of(error)), file=sys.stderr, flush=True)
        return 1
    except SignalException as error:  # the processes received it, too, and reported it
        return 128 + error.sigval
    return 0


def message_of(error: ChildFailedError) -> str:
    """Returns the message of the process that failed first, or how it ended without a message."""
    rank, failure = error.get_first_failure()
    if Path(failure.error_file).is_file():
        message = failure.message
        return str(message["message"]) if isinstance(message, dict) else message
    if failure.exitcode < 0:
        name = failure.signal_name()
        memory = ": often because the system's memory is full" if name == "SIGKILL" else ""
        return f"process {rank} was ended by {name}{memory}"
    return f"process {rank} ended with exit code {failure.exitcode}; its output is above"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
