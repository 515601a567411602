"""What an error that nobody caught shows: once, last and short, whatever started the processes.

A launcher prints what it finds in the error files of its processes as the last lines of a failed launch. So a process
writes its error there, and prints nothing itself where the launcher does. Of the processes of a node that end with the
same error one says it. What the user can repair needs no traceback; a fault of another kind
keeps its own, from each rank that has one of its own. `HOTSPA_TRACEBACK=1` shows every traceback.
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

from hf_hotspa.errors import HotspaError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's launcher (`torchrun`, `accelerate launch`) looks for the error of this process."""
TRACEBACKS = "HOTSPA_TRACEBACK"
_WAIT_S = 5.0
"""How long a rank that has nothing of its own to say leaves the others to end before it."""

_signal_came = _interrupt_is_announced = False


def show_errors_once() -> None:
    """From now on what ends this process uncaught is shown as this file says. May be called again."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook()


def signal_came() -> None:
    """This process was told to end. So was its launcher, perhaps: that then shows no error."""
    global _signal_came
    _signal_came = True


def interrupt_is_announced() -> None:
    """The user has been told what Ctrl-C has ended: nothing is left to say of it."""
    global _interrupt_is_announced
    _interrupt_is_announced = True


class _Hook:
    """Stands in for `sys.excepthook`."""

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(TRACEBACKS, "0") not in ("", "0"):
            traceback.print_exception(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass on what the terminal has sent already
            if not _interrupt_is_announced and os.environ.get("RANK", "0") == "0":
                _print("Stopped by Ctrl-C.")
        else:
            _show(error)


def told(error: BaseException) -> str:
    """What is shown of an error: a few lines for one that names its fix, else its traceback."""
    if isinstance(error, HotspaError) and not error.is_internal:
        return error.lines()
    return "".join(traceback.format_exception(error)).rstrip()


def _show(error: BaseException) -> None:
    text = told(error)
    path = os.environ.get(ERROR_FILE)
    if path is None:
        _print(text)
        return
    name, is_first = f"hotspa_{hashlib.sha256(text.encode()).hexdigest()[:16]}", True
    try:  # the folders of the node's ranks lie side by side: has another one said the same?
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
        # a launcher shows who ends first, and then ends the others: this rank is to be among these
        time.sleep(_WAIT_S)


def _write(path: Path, text: str, repeats: bool) -> None:
    """Writes the file as `torch.distributed.elastic` reads it, which takes the earliest error for the cause."""
    at = int(time.time()) + (math.ceil(_WAIT_S) if repeats else 0)
    details = {"py_callstack": "\n" + text if "\n" in text else text, "timestamp": str(at)}
    path.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")


def _launcher_shows_it() -> bool:
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count != most:  # it says nothing of a failure after which it tries again
        return False
    try:
        mine, its = os.fstat(2), os.stat(f"/proc/{os.getppid()}/fd/2")
    except OSError:  # no such folder on this system
        return True
    return (mine.st_dev, mine.st_ino) == (its.st_dev, its.st_ino)


def _print(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
