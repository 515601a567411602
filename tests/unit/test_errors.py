"""The error family: messages, stable codes, and the way between ranks."""

import json
import logging
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_hotspa import errors
from hf_hotspa.errors import HotspaConfigError, HotspaError, StrategyError

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HotspaError)]
OPTIONAL_TEXT = st.none() | st.text(max_size=30)


# Codes are written in logs and searched for: a change here breaks somebody's search. A new error gets a line.
CODES = {
    "HotspaError": "HSP-000",
    "LaunchError": "HSP-001",
    "HotspaConfigError": "HSP-010",
    "StrategyError": "HSP-020",
    "UnsupportedError": "HSP-030",
    "ModelError": "HSP-040",
    "DeviceMemoryError": "HSP-050",
    "PeerError": "HSP-112",
    "SilentPeerError": "HSP-110",
    "PlanError": "HSP-201",
    "PlanMismatchError": "HSP-203",
    "TransferError": "HSP-204",
    "CheckpointError": "HSP-210",
    "DamagedCheckpointError": "HSP-211",
    "CheckpointLockError": "HSP-212",
    "UnsavableError": "HSP-213",
    "ResumeError": "HSP-220",
    "DataError": "HSP-301",
    "OverlongError": "HSP-302",
    "TokenRangeError": "HSP-303",
    "NonFiniteError": "HSP-310",
    "CallbackError": "HSP-320",
    "RunLogError": "HSP-330",
    "PhaseMemoryError": "HSP-401",
}


def test_codes_do_not_change() -> None:
    assert {cls.__name__: cls.code for cls in CLASSES} == CODES
    assert len(set(CODES.values())) == len(CODES)
    of_users = {cls.__name__ for cls in CLASSES if issubclass(cls, HotspaConfigError) and issubclass(cls, ValueError)}
    wrong = {"LaunchError", "StrategyError", "UnsupportedError", "ModelError", "DeviceMemoryError"}
    assert of_users == {"HotspaConfigError", *wrong}


def test_message() -> None:
    assert str(HotspaError("it broke")) == "HSP-000 Hotspa: it broke"
    full = StrategyError("tp3 does not fit", where="rank 2", why="8 heads", fix="use tp4")
    assert str(full) == "HSP-020 Strategy: tp3 does not fit | Where: rank 2 | Why: 8 heads | Fix: use tp4"
    assert full.args == (str(full),)
    assert str(StrategyError("x", fix="y")) == "HSP-020 Strategy: x | Fix: y"


def test_log_records_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    evil, ours = "a\x1b[2J", logging.getLogger("hf_hotspa.anything")
    ours.warning("%s is skipped", evil)
    try:
        raise OSError(evil)
    except OSError:
        ours.exception("%d of %d", 1, 2)
    logging.getLogger("other").warning("%s", evil)
    clean, failed, other = caplog.records
    assert clean.getMessage() == r"a\x1b[2J is skipped"
    assert (failed.msg, failed.args) == ("%d of %d", (1, 2))  # nothing in it acts on a terminal
    assert failed.exc_text is not None
    assert failed.exc_text.endswith(r"OSError: a\x1b[2J")
    assert other.getMessage() == evil


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: %s"),
        ("torch.utils._pytree", "%s is an Enum subclass and is now natively supported by torch.compile"),
    ],
)
def test_what_libraries_log_at_every_start_does_not_appear(
    caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    logging.getLogger(name).warning(text, "this")
    logging.getLogger(name).warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_kernels_of_other_devices_are_not_missed() -> None:
    program = (
        "import hf_hotspa, logging; log = logging.getLogger('any')\n"
        "log.warning('Failed to load %s: Could not load this library: %s', 'a', 'b'); log.warning('kept')"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert shown == "kept\n"


@pytest.mark.parametrize("cls", CLASSES)
@given(what=st.text(max_size=30), where=OPTIONAL_TEXT, why=OPTIONAL_TEXT, fix=OPTIONAL_TEXT)
def test_round_trips(cls: type[HotspaError], what: str, where: str | None, why: str | None, fix: str | None) -> None:
    error = cls(what, where=where, why=why, fix=fix)
    plain = json.loads(json.dumps(error.to_dict()))
    for copy in (HotspaError.from_dict(plain), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert str(copy) == str(error)
        assert copy.to_dict() == error.to_dict()


def test_an_unknown_code_is_a_plain_error() -> None:
    error = HotspaError.from_dict({"code": "HSP-999", "what": "from a newer version"})
    assert type(error) is HotspaError
    assert error.what == "from a newer version"
    assert (error.where, error.why, error.fix) == (None, None, None)


def test_a_kind_of_an_error_travels_as_that_error() -> None:
    class Kind(errors.DataError):
        """Without a code of its own."""

    copy = HotspaError.from_dict(Kind("x").to_dict())
    assert type(copy) is errors.DataError
    assert str(copy) == "HSP-301 Data: x"
