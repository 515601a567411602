"""What rides on a replica without being a part of the model: it is told when steps, phases and forwards begin and end."""

from collections.abc import Mapping

from hf_hotspa.data.collator import MicroBatch


class Attachment:
    """Nothing, at every moment; a subclass overrides what it needs. `HotSPaEngine.attach` hangs it on.

    The calls come in this order: `begin_step` (once a mini-batch), `bind` (the weights of a phase are there), and for each
    forward `begin` and `end`.
    """

    def begin_step(self, step: int) -> None:
        """A mini-batch begins, of which `step` came before in the run."""

    def bind(self) -> None:
        """A phase begins."""

    def begin(self, micro_batch: MicroBatch, whole: MicroBatch, with_loss: bool) -> None:
        """A forward begins.

        Args:
            micro_batch: The tokens of this rank: its row of the pack under cp, padding under sequence parallelism included.
            whole: The pack, or the chunk of it.
            with_loss: Whether the last stage computes logits.
        """

    def end(self) -> None:
        """The forward is over; its backward may be still to come."""

    def measures(self) -> Mapping[str, float]:
        """What it counted since the last `bind`, by name."""
        return {}
