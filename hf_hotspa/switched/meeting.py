"""Before ranks do something together they say what: where that differs, all of them raise, and none waits for another."""

import zlib
from collections.abc import Callable

from hf_hotspa.errors import HotspaError, PlanMismatchError
from hf_hotspa.parallel.agreement import Agreement, rank_names


class Meeting:
    """Where all ranks meet before a collective call.

    Args:
        was_cleared: Whether this rank's caller has cleared gradients that others may still count on.
        drop: Forgets the calls that were not flushed: on all ranks, before they raise, or where one has cleared its gradients.

    Attributes:
        num_announced: Steps that this rank has announced; None where that is over.
        sizes: What each rank said of its `size` last.
    """

    def __init__(self, agreement: Agreement, was_cleared: Callable[[], bool], drop: Callable[[], None]) -> None:
        self._agreement, self._was_cleared, self._drop = agreement, was_cleared, drop
        self.num_announced: int | None = 0
        self.sizes: list[int] = []

    def __call__(
        self, what: str, where: str, error: HotspaError | None = None, flag: bool = False, size: int = 0
    ) -> list[bool]:
        """Returns when all ranks are about to do the same. Collective.

        Args:
            what: What this rank is about to do, in words.
            error: What it found wrong.
            flag: Something that others are to know.
            size: How many numbers this rank is about to send; for `sizes`.

        Returns:
            The flag of each rank.

        Raises:
            HotspaError: on every rank: the error of the first rank that has one, or that they are about to do different things.
        """
        code = float(zlib.crc32(what.encode()))
        values = [code, error is not None, self._was_cleared(), self.num_announced or 0, flag, size]
        codes, failed, cleared, announced, flags, sizes = self._agreement.gather([float(v) for v in values]).T.tolist()
        self.sizes = [int(number) for number in sizes]
        if any(failed):  # before all else: where a rank has an error, the others may have more to do
            self._drop()
            self._agreement.check({}, error, where)
        if len(set(codes)) > 1:
            self._drop()
            raise self._different(what, where)
        if len(set(announced)) > 1:
            self._drop()
            self.num_announced = None
            raise PlanMismatchError(
                f"ranks have announced {', '.join(str(int(n)) for n in announced)} steps",
                where=where,
                why="what is announced is exchanged by all ranks together",
                fix="call announce on all ranks, or on none",
            )
        if any(cleared):
            self._drop()
        return [bool(said) for said in flags]

    def _different(self, what: str, where: str) -> PlanMismatchError:
        texts = self._agreement.texts(what)
        by_text = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        return PlanMismatchError(
            "ranks are about to do different things: "
            + "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items()),
            where=where,
            why="each call of a switched model is a part of what all ranks do together",
            fix="make the same calls on all ranks; `for batch in model.batches(loader)` gives batches without rows to ranks "
            "whose loaders have ended",
        )
