"""Log records of this package hold no character that a terminal acts on: paths and names in them may come from anywhere."""

import logging
from contextlib import suppress
from typing import Any

from hf_hotspa.errors import printable

_PACKAGE = __name__.partition(".")[0]


def install() -> None:
    """Makes the records of our loggers printable; of others, drops one of bitsandbytes, which every start would show."""
    before = logging.getLogRecordFactory()

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        if record.name.partition(".")[0] == _PACKAGE:
            with suppress(Exception):  # a record whose arguments do not fit is reported where it is shown
                _clean(record)
        return record

    logging.setLogRecordFactory(record_of)
    # about a kernel for CPUs that another package would bring; nothing here needs it
    kernels = logging.getLogger("bitsandbytes.backends.cpu.ops")
    kernels.addFilter(lambda record: not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward"))


def _clean(record: logging.LogRecord) -> None:
    text = record.getMessage()
    if (shown := printable(text)) != text:
        record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = logging.Formatter().formatException(record.exc_info)
        if (shown := printable(trace)) != trace:
            record.exc_text = shown  # which formatters then use
