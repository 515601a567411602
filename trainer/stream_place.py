"""A place in a stream, so that a resumed run goes on there, in whichever pass that is.

The Trainer counts passes by their length, which a stream need not have. Here the mini-batches of each pass are counted
as they are trained, and go into the checkpoint with a digest of the last one.
"""

from dataclasses import dataclass
from typing import Any

from hf_hotspa.errors import ResumeError


@dataclass(frozen=True)
class StreamPlace:
    """A place in a stream: behind the last mini-batch that was trained.

    Args:
        mini_batches: Mini-batches trained in each pass; the last entry is the pass that is under way.
        ended: The passes, counted from 0, in which the stream was read to its end.
        content: The digest of the last mini-batch, as in `MiniBatch.content`; empty before the first.
    """

    mini_batches: tuple[int, ...] = (0,)
    ended: frozenset[int] = frozenset()
    content: str = ""

    @property
    def epoch(self) -> int:
        """The pass that is under way, counted from 0."""
        return len(self.mini_batches) - 1

    @property
    def last(self) -> int:
        """The pass of the last mini-batch that was trained."""
        return max((epoch for epoch, trained in enumerate(self.mini_batches) if trained), default=0)

    def behind(self, epoch: int, number: int, content: str) -> "StreamPlace":
        """The place behind a mini-batch, given its pass, its number in it and its digest."""
        earlier = (*self.mini_batches, *[0] * epoch)[:epoch]
        return StreamPlace((*earlier, number + 1), self.ended, content)

    def state(self) -> dict[str, Any]:
        """As JSON-ready plain data."""
        return {"mini_batches": list(self.mini_batches), "ended": sorted(self.ended), "content": self.content}

    @classmethod
    def from_state(cls, state: Any) -> "StreamPlace":
        """The inverse of `state`.

        Raises:
            ResumeError: it is none.
        """
        try:
            numbers, ended = ([int(number) for number in state[key]] for key in ("mini_batches", "ended"))
            if not numbers or min(numbers) < 0:
                raise ValueError(numbers)
            return cls(tuple(numbers), frozenset(ended), str(state["content"]))
        except (KeyError, TypeError, ValueError):
            raise ResumeError(
                "the checkpoint does not say how far its run has come in the stream",
                why="the rows of a stream have no numbers: sequences would be trained twice or not at all",
                fix="resume a checkpoint that HotSPaTrainer wrote while it trained a stream, or use a data set with random "
                "access",
            ) from None
