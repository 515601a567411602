"""Mini-batches from a stream: an iterable dataset, with or without a length, of which nothing is known in advance.

Owns how a stream becomes mini-batches. Promises:

* Every rank reads the same stream from its beginning and takes `mini_batch_size` rows at a time, in the order of the
  stream; each then builds the packs of its own replica. Nothing is scanned: the lengths of a mini-batch are known when
  its rows have been read. A digest of the tokens is agreed on before they are trained, so streams that differ between
  ranks are an error.
* A resumed run goes on where the checkpoint was written, in whichever pass: the stream of that pass is read again up to
  there. Where the stream has no `set_epoch`, so are the passes before it, on which its order may depend. The last
  mini-batch that was trained is compared: a stream that gives other rows this time is an error.
* An epoch ends on all ranks at once; a stream that ends earlier on one of them is an error on all.
* What is wrong with rows comes back in `MiniBatch.error`; it is never raised on some ranks only.

The loader has the shape that accelerate's `skip_first_batches` expects: the batch sampler yields the numbers of
mini-batches, and the dataset turns a number into a mini-batch by reading on.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_hotspa.data.collator import MiniBatch, PackedBucketCollator, content_digest
from hf_hotspa.data.prepare import check_masks
from hf_hotspa.errors import DataError, HotspaConfigError, HotspaError, PlanMismatchError, ResumeError
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.rows.features import Row, read_row
from hf_hotspa.stragglers.speeds import SpeedHistory
from hf_hotspa.trainer.per_row import PerRow
from hf_hotspa.trainer.rows import as_it_is, tokenized_rows, unreadable
from hf_hotspa.trainer.stream_place import StreamPlace


class StreamRows(Dataset[Any]):
    """The rows of a stream as mini-batches, by number. Numbers must grow; a smaller one begins the stream again.

    Args:
        tokenizer: Tokenises rows without `input_ids`.
        any_rank: Whether any rank says so; a collective call.
        speeds: By which the packs of each mini-batch are divided over replicas; None divides evenly.

    Attributes:
        ended: The passes, counted from 0, in which the stream was read to its end.
        whole: Items also hold all rows of the mini-batch, `{"rows": {number of the row: Row, ...}}`.
    """

    def __init__(
        self,
        dataset: Any,
        collator: PackedBucketCollator,
        *,
        mini_batch_size: int,
        any_rank: Callable[[bool], bool],
        collate: PerRow | None = None,
        drop_last: bool = False,
        tokenizer: Any = None,
        speeds: SpeedHistory | None = None,
    ) -> None:
        if mini_batch_size < 1:
            raise HotspaConfigError(f"a mini-batch of {mini_batch_size} sequences", fix="use at least one")
        self.dataset, self.mini_batch_size, self.whole = dataset, mini_batch_size, False
        self._collator, self._rank, self._rules = collator, collator.rank, collator.rules
        self._any_rank, self._drop_last = any_rank, drop_last
        self._tokenizer, self._collate, self._speeds = tokenizer, collate, speeds
        self._made = 0  # mini-batches of the run, over all passes
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self._epoch, self.ended = 0, set[int]()
        self._resumed: StreamPlace | None = None

    def __len__(self) -> int:
        """Rows of the stream, where it has a length."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Begins again, in the order of this epoch where the stream has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._stream, self._next, self._epoch = None, 0, epoch

    def go_on_from(self, place: StreamPlace) -> None:
        """The mini-batch that is asked for next is the one behind this place."""
        self._resumed, self.ended = place, set(place.ended)
        self._made = sum(place.mini_batches)

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        """The mini-batch of this number; torch's fetcher calls this with what the batch sampler yields.

        Raises:
            StopIteration: on all ranks, at the end of the stream.
            PlanMismatchError: on all ranks, where only some of the streams have ended.
        """
        [number] = numbers
        if self._stream is None and 0 < self._next <= number:
            raise StopIteration  # the Trainer asks on; the stream would be read all over again, each time
        error: HotspaError | None = None
        examples: list[Any] = []
        try:
            if self._resumed is not None:
                self._replay(self._resumed)
            elif self._stream is None or number < self._next:
                self._stream, self._next = iter(self.dataset), 0
            assert self._stream is not None
            skipped = (number - self._next) * self.mini_batch_size
            examples = list(itertools.islice(self._stream, skipped, skipped + self.mini_batch_size))
        except Exception as failure:  # whatever a stream raises is carried to all ranks
            error = unreadable(failure, "the stream", f"mini-batch {number + 1} of the stream, rank {self._rank}")
        self._next = number + 1
        if error is None and number == 0 and not examples:
            error = DataError("the stream is empty", fix="check the split and the filters that were applied to it")
        short = not examples or (self._drop_last and len(examples) < self.mini_batch_size)
        self._agree_on_the_end(ended=short and error is None, number=number)
        rows: list[Row] = []
        if error is None:
            try:
                rows = self._read(examples)
                mini_batch = self._collator.of_rows(
                    rows, self._speeds.of(self._made) if self._speeds is not None else None
                )
            except HotspaError as cause:
                error = self._located(cause, number)
        if error is not None:
            mini_batch = MiniBatch(MiniBatchPlan((), 0, len(examples)), (), error)
        self._made += 1
        item: dict[str, Any] = {"mini_batch": mini_batch, "place": (self._epoch, number)}
        if self.whole and mini_batch.error is None:
            item["rows"] = dict(enumerate(rows))
        return item

    def _agree_on_the_end(self, ended: bool, number: int) -> None:
        if not self._any_rank(ended):
            return
        if self._any_rank(not ended):
            raise PlanMismatchError(
                "the stream ends on some ranks and goes on on others",
                where=f"rank {self._rank}, mini-batch {number + 1} of the stream",
                why="every rank must read the same rows",
                fix="give every rank the same stream: do not split it by rank",
            )
        self._stream = None
        self.ended.add(self._epoch)
        raise StopIteration

    def _replay(self, place: StreamPlace) -> None:
        """Reads again what was trained before the checkpoint, and compares the last mini-batch of it."""
        self._resumed = None
        # a set_epoch says on what the order of a pass depends; without one, it may be on the passes before
        first = place.epoch if hasattr(self.dataset, "set_epoch") else 0
        for epoch in range(first, place.epoch + 1):
            self._stream, self._next = iter(self.dataset), place.mini_batches[epoch]
            compared = place.content and epoch == place.last and self._next > 0
            self._pass_over(self._stream, self._next - bool(compared))
            if compared:
                rows = self._read(list(itertools.islice(self._stream, self.mini_batch_size)))
                if content_digest(rows) != place.content:
                    raise self._other_rows(epoch, self._next)
            if epoch < place.epoch and epoch in place.ended:
                self._pass_over(self._stream, None)  # what it does at its end may count, too

    def _pass_over(self, stream: Iterator[Any], mini_batches: int | None) -> None:
        rows = None if mini_batches is None else mini_batches * self.mini_batch_size
        deque(itertools.islice(stream, rows), maxlen=0)

    def _other_rows(self, epoch: int, mini_batches: int) -> ResumeError:
        return ResumeError(
            "the stream gives other rows than it did before the checkpoint was written",
            where=f"mini-batch {mini_batches} of pass {epoch + 1} of the stream, rank {self._rank}",
            why="the run cannot go on exactly: sequences would be trained twice or not at all",
            fix="give the stream the same source, and an order that depends on set_epoch(epoch), or on how often it was "
            "iterated, alone; or say hotspa_allow_data_order_change=True",
        )

    def _read(self, examples: list[Any]) -> list[Row]:
        if self._collate is not None:
            self._collate.check(dict(enumerate(examples)), self._rules)
            examples = [self._collate(example, row) for row, example in enumerate(examples)]
        elif self._tokenizer is not None:
            examples = tokenized_rows(examples, self._tokenizer, self._rules)
        for example in examples:
            if isinstance(example, Mapping):
                check_masks(example)
        return [read_row(example, row, self._rules) for row, example in enumerate(examples)]

    def _located(self, error: HotspaError, number: int) -> HotspaError:
        data = error.to_dict()
        first = number * self.mini_batch_size
        data["where"] = f"{data['where'] or 'a row'}, counted from row {first} of the stream"
        return HotspaError.from_dict(data)


class StreamProgress:
    """How far this run has come in its stream."""

    def __init__(self, rows: StreamRows) -> None:
        self._rows, self._place = rows, StreamPlace()

    def trained(self, inputs: Mapping[str, Any]) -> None:
        """A mini-batch of the loader is trained."""
        epoch, number = inputs["place"]
        self._place = self._place.behind(epoch, number, inputs["mini_batch"].content)

    def state(self, steps_a_pass: int, pass_is_over: bool) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON-ready plain data.

        Args:
            steps_a_pass: The most steps of a pass.
            pass_is_over: Whether a callback ends the pass here.
        """
        place = dataclasses.replace(self._place, ended=frozenset(self._rows.ended))
        if pass_is_over or place.epoch in place.ended or place.mini_batches[-1] >= steps_a_pass:
            place = dataclasses.replace(place, mini_batches=(*place.mini_batches, 0))
        return place.state()

    def go_on(self, state: Any, *, skip: bool, compare: bool) -> tuple[int, int]:
        """Goes on from `state`.

        Args:
            skip: Whether the mini-batches of the pass that were trained are left out (not `ignore_data_skip`).
            compare: Whether the stream must give the last of them again.

        Returns:
            The pass, and the mini-batches that were trained in it.

        Raises:
            ResumeError: the checkpoint does not say where to go on.
        """
        self._place = place = StreamPlace.from_state(state)
        if not skip:
            self._place = dataclasses.replace(place, mini_batches=(*place.mini_batches[:-1], 0))
            return place.epoch, 0
        self._rows.go_on_from(place if compare else dataclasses.replace(place, content=""))
        return place.epoch, place.mini_batches[-1]


class StreamSampler(Sampler[list[int]]):
    """The numbers of mini-batches, without an end: the stream ends the iteration."""

    def __init__(self, rows: StreamRows) -> None:
        self._rows = rows

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""
        self._rows.set_epoch(epoch)

    def __len__(self) -> int:
        """Mini-batches, where the stream has a length."""
        full, rest = divmod(len(self._rows), self._rows.mini_batch_size)
        return full + (rest > 0 and not self._rows._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in itertools.count())


class StreamLoader(DataLoader[dict[str, Any]]):
    """The dataloader of a stream on one rank.

    Raises:
        HotspaConfigError: workers are asked for.
    """

    dataset: StreamRows

    def __init__(self, rows: StreamRows, *, num_workers: int = 0, pin_memory: bool = False) -> None:
        if num_workers:
            raise HotspaConfigError(
                f"dataloader_num_workers is {num_workers}, and the dataset is a stream",
                why="workers would read the stream several times over, each from its beginning",
                fix="use dataloader_num_workers=0 with streams",
            )
        super().__init__(
            rows,
            batch_sampler=StreamSampler(rows),
            collate_fn=as_it_is,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration (called by the Trainer)."""
        self.dataset.set_epoch(epoch)

    def asks_for(self, logits: bool) -> None:
        """Whether the next iteration is for logits, whose rows are looked at, or for the loss alone."""
        self.dataset.whole = logits
