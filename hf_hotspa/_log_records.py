"""Log records of this package hold no character that a terminal acts on: paths and names in them may come from anywhere."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hf_hotspa.errors import printable

_PACKAGE = __name__.partition(".")[0]
_AT_EVERY_START = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # a kernel that another package would bring
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",  # an advice for authors of libraries
}
"""By logger: a part of a record that says nothing to a user, and that importing libraries of the Trainer logs."""
_OF_OTHER_DEVICES = "Could not load this library"
"""Of libraries' kernels for devices that this machine does not have. Dropped only where nobody has set up logging."""


def install() -> None:
    """Makes the records of our loggers printable; of others, drops those that every start would show."""
    before = logging.getLogRecordFactory()

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        if record.name.partition(".")[0] == _PACKAGE:
            with suppress(Exception):  # a record whose arguments do not fit is reported where it is shown
                _clean(record)
        return record

    logging.setLogRecordFactory(record_of)
    for name, text in _AT_EVERY_START.items():
        logging.getLogger(name).addFilter(_without(text))
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_without(_OF_OTHER_DEVICES))


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()


def _clean(record: logging.LogRecord) -> None:
    text = record.getMessage()
    if (shown := printable(text)) != text:
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = logging.Formatter().formatException(record.exc_info)
        if (shown := printable(trace)) != trace:
            record.exc_text = shown  # which formatters then use
