"""The error family of hf_hotspa: one class per kind of failure, each with a stable code.

A message states what is wrong, where (rank, step, strategy), why, and how to fix it. Errors travel between ranks as
plain dictionaries (`to_dict` / `from_dict`), so that every rank raises the first failing rank's class. No imports.
"""

_ACTING = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_AS_TEXT = {code: ascii(chr(code))[1:-1] for code in (*_ACTING, *range(0xD800, 0xE000))}


def printable(text: str) -> str:
    """Escapes characters that a terminal acts on (except tabs and line ends) or cannot show: files may come from
    anywhere."""
    return text.translate(_AS_TEXT)


class HotspaError(Exception):
    """Base of all errors of the package.

    Args:
        what: What is wrong, with the numbers.
        where: Rank, step, strategy, sample; None if obvious.
        why: Why it is a failure, or what it would have caused.
        fix: What the user can do.
    """

    code = "HSP-000"
    is_internal = False
    """Whether it is a fault of the program, which a traceback helps to find."""
    is_echo = False
    """Whether it only reports that another rank failed."""
    usual_fix: str | None = None
    """The default fix of a kind of error; a given `fix` replaces it."""
    _by_code: dict[str, type["HotspaError"]] = {}

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix or self.usual_fix
        super().__init__(str(self))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in vars(cls):  # else it travels as its base class
            HotspaError._by_code[cls.code] = cls

    def __str__(self) -> str:
        return printable(" | ".join(self._parts()))

    def lines(self) -> str:
        """The message with one line for each part, for a terminal."""
        return printable("\n  ".join(self._parts()))

    def _parts(self) -> list[str]:
        named = (("Where", self.where), ("Why", self.why), ("Fix", self.fix))
        head = f"{self.code} {type(self).__name__.removesuffix('Error')}: {self.what}"
        return [head, *(f"{label}: {text}" for label, text in named if text)]

    def to_dict(self) -> dict[str, str | None]:
        return {"code": self.code, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}

    @staticmethod
    def from_dict(data: dict[str, str | None]) -> "HotspaError":
        """The inverse of `to_dict`; an unknown code gives a plain `HotspaError`."""
        cls = HotspaError._by_code.get(str(data["code"]), HotspaError)
        return cls(str(data["what"]), where=data.get("where"), why=data.get("why"), fix=data.get("fix"))

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments would be lost by the default pickling
        return HotspaError.from_dict, (self.to_dict(),)


class HotspaConfigError(HotspaError, ValueError):
    """The user's configuration cannot be run; always raised before training."""

    code = "HSP-010"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Checks that a value is one of the choices. Raises `HotspaConfigError`: naming them."""
    if value not in choices:
        raise HotspaConfigError(f"{name} is {value!r}", fix=f"use one of {', '.join(choices)}")


class LaunchError(HotspaConfigError):
    """The configuration needs another number of processes (usually the wrong launch line)."""

    code = "HSP-001"


class StrategyError(HotspaConfigError):
    """A strategy does not parse, or does not fit the world or the model."""

    code = "HSP-020"


class UnsupportedError(HotspaConfigError):
    """A setting cannot be honoured exactly; it is named, never ignored."""

    code = "HSP-030"


class ModelError(HotspaConfigError):
    """The model's family or state cannot be laid out (no plan, unknown style, changed structure)."""

    code = "HSP-040"


class DeviceMemoryError(HotspaConfigError):
    """The strategies need more memory than the device has; found before anything is allocated."""

    code = "HSP-050"


class PlanError(HotspaError):
    """A switch plan failed its own validation: a bug of the planner. Nothing was sent."""

    code = "HSP-201"
    is_internal = True


class PlanMismatchError(HotspaError):
    """Ranks computed different plans or hold different configurations; nothing was sent."""

    code = "HSP-203"


class TransferError(HotspaError):
    """A transfer failed or timed out; the process group must not be used again."""

    code = "HSP-204"
    is_internal = True


class CheckpointError(HotspaError):
    """A checkpoint could not be written; no part of it remains, and older ones are untouched."""

    code = "HSP-210"


class UnsavableError(CheckpointError):
    """Something other than the weights cannot be written to any disk: no save can succeed."""

    code = "HSP-213"


class DamagedCheckpointError(HotspaError):
    """A checkpoint is incomplete, was changed, or is not a checkpoint; nothing was loaded."""

    code = "HSP-211"
    usual_fix = (
        "take another checkpoint (resume_from_checkpoint=True takes the newest complete one, and hf-hotspa verify "
        "OUTPUT_DIR lists the complete ones), or copy this one again from where it was written"
    )


class CheckpointLockError(HotspaError):
    """Another run writes checkpoints into the same directory."""

    code = "HSP-212"


class ResumeError(HotspaError, ValueError):
    """A run cannot resume exactly: there is no checkpoint, or the model, the optimizer or the data changed."""

    code = "HSP-220"


class DataError(HotspaError, ValueError):
    """A sample or a data set cannot be trained as it is."""

    code = "HSP-301"


class OverlongError(DataError):
    """A sequence is longer than the longest bucket and the policy is `error`."""

    code = "HSP-302"


class TokenRangeError(DataError):
    """A token id or label lies outside the vocabulary."""

    code = "HSP-303"


FIX_OF_NON_FINITE = "lower the learning rate, clip gradients, or look for broken samples in this mini-batch"


class NonFiniteError(HotspaError):
    """A loss or a gradient is NaN or infinite; the weights are unchanged (except if stages update after every pack)."""

    code = "HSP-310"


class CallbackError(HotspaError):
    """A callback raised; it is named. The previous mini-batch was trained, the next one was not."""

    code = "HSP-320"


class PhaseMemoryError(HotspaError):
    """A rank ran out of memory inside a phase; the next launch learns of it."""

    code = "HSP-401"


class RunLogError(HotspaError, ValueError):
    """The record of a run is missing, malformed, or was changed by hand; names file and line."""

    code = "HSP-330"


class PeerError(HotspaError):
    """Another rank failed with an error from outside this package, whose text is included."""

    code = "HSP-112"
    is_echo = True


class SilentPeerError(PeerError):
    """A rank hangs: the waiting ranks miss it at a barrier."""

    code = "HSP-110"
