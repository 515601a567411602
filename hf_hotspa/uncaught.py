"""Shows an uncaught error once, last and short, whatever started the processes.

A launcher ends a failed launch with its processes' error files. A process therefore writes its error there, and prints
it only if the launcher does not. If several processes of a node end with the same error, one reports it. Errors that
the user can repair show no traceback; others show one for each rank whose error differs. `HOTSPA_TRACEBACK=1` shows
every traceback.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from hf_hotspa.errors import HotspaError, printable
from hf_hotspa.exchanges import set_uncaught

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's launcher (`torchrun`, `accelerate launch`) looks for the error of this process."""
TRACEBACKS = "HOTSPA_TRACEBACK"
_WAIT_S = 5.0  # how long a rank whose error repeats another rank's waits, so that the others end first
_signal_came = _interrupt_is_announced = False


def show_errors_once() -> None:
    """Installs the hook for uncaught errors. May be called again."""
    if not isinstance(sys.excepthook, _Hook):
        set_uncaught(_Hook())


def signal_came() -> None:
    """Notes that a signal asked this process to end. A launcher that received it, too, shows no error."""
    global _signal_came
    _signal_came = True


def interrupt_is_announced() -> None:
    """Notes that the user knows what Ctrl-C ended, so that nothing more is printed."""
    global _interrupt_is_announced
    _interrupt_is_announced = True


class _Hook:
    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(TRACEBACKS, "0") not in ("", "0"):
            traceback.print_exception(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers forward what the terminal has already sent
            if not _interrupt_is_announced and os.environ.get("RANK", "0") == "0":
                _print("Stopped by Ctrl-C.")
        else:
            _show(error)


def message_of(error: BaseException) -> str:
    """Returns a few lines for an error that the user can repair, else its traceback."""
    if isinstance(error, HotspaError) and not error.is_internal:
        return error.lines()
    return printable("".join(traceback.format_exception(error)).rstrip())


def _show(error: BaseException) -> None:
    text = message_of(error)
    path = os.environ.get(ERROR_FILE)
    if path is None:
        _print(text)
        return
    name, is_first = f"hotspa_{hashlib.sha256(text.encode()).hexdigest()[:16]}", True
    try:  # the folders of the node's ranks lie side by side: has another rank reported the same error?
        (Path(path).parent.parent / name).open("x").close()
    except OSError as failure:
        is_first = not isinstance(failure, FileExistsError)
    is_echo = isinstance(error, HotspaError) and error.is_echo
    repeats = not is_first or is_echo
    try:
        _write(Path(path), text if is_first else "the same error as another rank of this node", repeats)
    except OSError:
        _print(text)
        return
    if is_first and (not _launcher_shows_it() or (_signal_came and not is_echo)):
        _print(text)
    if repeats:
        # a launcher shows the process that ends first, and ends the others; this rank should be ended
        time.sleep(_WAIT_S)


def _write(path: Path, text: str, repeats: bool) -> None:
    """Uses the format of `torch.distributed.elastic`, which takes the earliest error for the cause."""
    at = int(time.time()) + (math.ceil(_WAIT_S) if repeats else 0)
    details = {"py_callstack": "\n" + text if "\n" in text else text, "timestamp": str(at)}
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")


def _launcher_shows_it() -> bool:
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count != most:  # the launcher reports no failure after which it tries again
        return False
    try:
        mine, its = os.fstat(2), os.stat(f"/proc/{os.getppid()}/fd/2")
    except OSError:  # no /proc on this system
        return True
    return (mine.st_dev, mine.st_ino) == (its.st_dev, its.st_ino)


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
