"""The launcher of `hf-hotspa train`: torch's, but a start that fails ends with what the failed process has said.

`python -m hf_hotspa.commands.own_launcher` takes what `torchrun` takes. Torch's own ends with a traceback of itself and a table.
Where all processes are of this machine (`--rdzv-backend loopback`), they meet at its loopback address, which no other reaches:
torch's `--standalone` listens on every address.
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

LOOPBACK = "loopback"
"""The value of `--rdzv-backend`."""
_TORCH = "torch.distributed.elastic"


class _Loopback(StaticTCPRendezvous):
    """The store of all processes of this machine, in the launcher, behind a socket that only this machine reaches."""

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
    """Starts the processes and waits for them.

    Args:
        words: As for `torchrun`.

    Returns:
        The exit code: 0, 1 where a process has failed, 128 and the signal where one has ended this launcher.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_TORCH)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # which process has failed is said below
    try:
        run(parse_args(list(words)))
    except ChildFailedError as error:
        print(told(error), file=sys.stderr, flush=True)
        return 1
    except SignalException as error:  # the processes heard it, too, and said what became of them
        return 128 + error.sigval
    return 0


def told(error: ChildFailedError) -> str:
    """What the process has said that failed first, or how it ended where it could say nothing."""
    rank, failure = error.get_first_failure()
    if Path(failure.error_file).is_file():
        said = failure.message
        return str(said["message"]) if isinstance(said, dict) else said
    if failure.exitcode < 0:
        name = failure.signal_name()
        memory = ": often the system does so when its memory is full" if name == "SIGKILL" else ""
        return f"process {rank} was ended by {name}{memory}"
    return f"process {rank} ended with exit code {failure.exitcode}; what it said stands above"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
