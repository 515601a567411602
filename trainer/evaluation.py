"""Evaluation and prediction of `HotSPaTrainer`: what replaces the stock Trainer's loop over an evaluation set.

Owns `EvaluationMixin`, whose `evaluation_loop` stands behind the stock `evaluate` and `predict`. Promises:

* The loss is the token mean over the whole set, however it is cut into mini-batches; a NaN is shown as NaN.
* Rows come in the order of the dataset, each exactly once, on every number of ranks.
* Logits exist only where `compute_metrics` or `predict` asks for them: then every rank holds those of one mini-batch on
  its device, and those of the set where the stock Trainer holds them (on the device, or on the host from
  `eval_accumulation_steps` on; what `preprocess_logits_for_metrics` made of them, where it is given).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.evaluation import EvaluationResult
from hf_hotspa.errors import DataError
from hf_hotspa.packing.bucketing import check_lengths
from hf_hotspa.rows.features import Row
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.dataloader import Planner
from hf_hotspa.trainer.evaluation_loader import EvaluationLoader, EvaluationRows, EvaluationSampler, evaluation_buckets
from hf_hotspa.trainer.failures import broadcast_error
from hf_hotspa.trainer.older_transformers import workers_context
from hf_hotspa.trainer.rows import is_stream, scanned
from hf_hotspa.trainer.same_data import data_facts
from hf_hotspa.trainer.streaming import StreamLoader, StreamRows
from hf_hotspa.trainer.worker_processes import worker_context

_DECIDE_LOGITS = ("compute_metrics", "preprocess_logits_for_metrics")
_IGNORED = -100
_SCANS_KEPT = 8


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last one."""
    held: list[Any] = []
    for item in items:
        if held:
            yield held.pop(), False
        held.append(item)
    if held:
        yield held.pop(), True


def _padded(result: EvaluationResult, rows: Mapping[int, Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, L, V], labels [B, L] and input ids [B, L] of a mini-batch; -100 where a row has nothing.

    Tokens stand where the data set has them, after its padding if there is some. What an over-long policy has cut off has
    no logits and is left out of all three, and so is padding at the end that every row has. Where documents of a packed
    row begin, the label is -100: nothing before it could predict it.
    """
    at = {row: index for index, row in enumerate(rows)}
    ends = [rows[row].first + start + piece.shape[0] for (row, start), piece in result.logits.items()]
    longest = max(ends, default=0)
    pieces = iter(result.logits.values())
    first = next(pieces, None)
    logits = (
        torch.empty(len(rows), 0, 0)
        if first is None
        else first.new_full((len(rows), longest, first.shape[-1]), float(_IGNORED))
    )
    labels = torch.full((len(rows), longest), _IGNORED, device=logits.device)
    inputs = labels.clone()
    for (number, start), piece in result.logits.items():
        index, row, stop = at[number], rows[number], start + piece.shape[0]
        own = np.array((row.ids if row.labels is None else row.labels)[start:stop])
        if start in row.cuts:
            own[0] = _IGNORED
        span = slice(row.first + start, row.first + stop)
        logits[index, span] = piece
        inputs[index, span] = torch.from_numpy(np.array(row.ids[start:stop]))
        labels[index, span] = torch.from_numpy(own)
    return logits, labels, inputs


class EvaluationMixin:
    """`get_eval_dataloader`, `get_test_dataloader` and `evaluation_loop` for a `transformers.Trainer`."""

    _asked: Any = None
    """The set that `evaluate` or `predict` was called with last."""

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> DataLoader[Any]:
        """The mini-batches of an evaluation set: `per_device_eval_batch_size` x processes rows each. Collective."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        return self._evaluation_loader(eval_dataset, keep=self.args.dataloader_persistent_workers)

    def get_test_dataloader(self: Any, test_dataset: Any) -> DataLoader[Any]:
        """The same for `predict`. Collective."""
        return self._evaluation_loader(test_dataset)

    def _evaluation_loader(self: Any, dataset: Any, keep: bool = False) -> DataLoader[Any]:
        self._asked = dataset
        engine = self._start_engine(training=False)

        def facts(_: DataLoader[Any]) -> dict[str, str]:
            _, tokens, table = self._evaluation_scans.get(id(dataset), (dataset, dataset, None))
            same = data_facts(tokens, table, self._row_rules())
            return same | {name: str(getattr(self, name) is not None) for name in _DECIDE_LOGITS}

        def made() -> DataLoader[Any]:
            kept = self._kept_loaders.get(id(dataset))
            if keep and kept is not None and kept[0] is engine:
                return kept[1]
            return self._make_evaluation_loader(engine, dataset, keep)

        loader: DataLoader[Any] = engine.agreement.run("evaluation data set", made, facts=facts)
        if keep and not is_stream(dataset):
            self._kept_loaders[id(dataset)] = engine, loader
        return loader

    def _stream_rows(
        self: Any,
        engine: HotSPaEngine,
        dataset: Any,
        buckets: tuple[Bucket, ...],
        mini_batch_size: int,
        drop_last: bool = False,
    ) -> StreamRows:
        args, shape = self.args, engine.description.shape
        return StreamRows(
            dataset,
            buckets,
            mini_batch_size=mini_batch_size,
            rank=args.process_index,
            vocab_size=shape.vocab_size,
            any_rank=engine.any_rank,
            quadratic_cost=shape.quadratic_cost,
            policy=args.hotspa_overlong,
            rules=self._row_rules(),
            collate=self._per_row(),
            drop_last=drop_last,
            tokenizer=self.processing_class,
        )

    def _evaluation_scan(self: Any, dataset: Any) -> tuple[Any, SequenceTable]:
        """An evaluation set with token ids, and its scan. Collective."""
        known = self._evaluation_scans.get(id(dataset))
        if known is None:
            while len(self._evaluation_scans) >= _SCANS_KEPT:
                self._evaluation_scans.pop(next(iter(self._evaluation_scans)))
            known = self._evaluation_scans[id(dataset)] = (
                dataset,
                *scanned(dataset, self.processing_class, self.args, self._row_rules(), self._per_row()),
            )
        return known[1:]

    def _evaluated_tables(self: Any) -> list[SequenceTable]:
        """The scans of all sets that are known to be evaluated, but for streams. Collective."""
        given = self.eval_dataset
        sets = [*(given.values() if isinstance(given, dict) else [given]), self._asked]
        unique = {id(dataset): dataset for dataset in sets if dataset is not None and not is_stream(dataset)}
        return [self._evaluation_scan(dataset)[1] for dataset in unique.values()]

    def _check_evaluation_lengths(self: Any, engine: HotSPaEngine) -> None:
        """Before the first step: the rows of the evaluations to come must fit. Collective.

        Raises:
            OverlongError: they do not, and no policy says what to do.
        """
        if self.args.eval_strategy != "no" or self.args.eval_on_start:
            longest = max(bucket.longest for bucket in engine.buckets)
            for table in self._evaluated_tables():
                check_lengths(table, longest, self.args.hotspa_overlong, self.args.hotspa_auto)

    def _make_evaluation_loader(self: Any, engine: HotSPaEngine, dataset: Any, keep: bool) -> DataLoader[Any]:
        args = self.args
        if dataset is None:
            raise DataError("there is no eval_dataset", fix="pass eval_dataset to HotSPaTrainer or to evaluate()")
        buckets = evaluation_buckets(args.hotspa_eval_strategy, engine.buckets)
        shape, size = engine.description.shape, args.eval_batch_size * args.world_size
        if is_stream(dataset):
            rows = self._stream_rows(engine, dataset, buckets, size)
            return StreamLoader(rows, pin_memory=args.dataloader_pin_memory)
        tokens, table = self._evaluation_scan(dataset)
        longest = max(bucket.longest for bucket in buckets)
        check_lengths(table, longest, args.hotspa_overlong, args.hotspa_auto)
        return EvaluationLoader(
            dataset,
            EvaluationRows(
                tokens,
                Planner(table, buckets, shape.quadratic_cost, args.hotspa_overlong),
                PackedBucketCollator(
                    buckets,
                    rank=args.process_index,
                    vocab_size=shape.vocab_size,
                    rules=self._row_rules(),
                    table=table,
                ),
            ),
            EvaluationSampler(table, buckets, size, args.dataloader_drop_last),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=keep and args.dataloader_num_workers > 0,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            multiprocessing_context=worker_context(args.dataloader_num_workers, workers_context(args)),
        )

    def evaluation_loop(
        self: Any,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over an evaluation set, forward only. Collective; every rank gets the same result.

        Args:
            dataloader: From `get_eval_dataloader` or `get_test_dataloader`.
            description: For the log.
            prediction_loss_only: Do not collect logits; `args.prediction_loss_only` when None.
            ignore_keys: Of no effect: the only output is logits.
            metric_key_prefix: What the keys of the metrics begin with.

        Raises:
            HotspaError: on every rank.
        """
        with broadcast_error(self, "evaluation"):
            return self._evaluated(dataloader, description, prediction_loss_only, metric_key_prefix)

    def _evaluated(
        self: Any,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None,
        metric_key_prefix: str,
    ) -> EvalLoopOutput:
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        loader: Any = dataloader
        loader.asks_for(logits=not loss_only)
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        keep = not args.batch_eval_metrics or description == "Prediction"
        names = ("losses", "predictions", "labels", "inputs")
        held = {name: EvalLoopContainer(args.eval_do_concat_batches, padding_index=_IGNORED) for name in names}
        metrics: dict[str, Any] | None = None
        loss_sum, num_labels, num_rows = 0.0, 0, 0
        engine: HotSPaEngine = self.engine
        with engine.evaluation() as evaluation:
            for step, (item, is_last) in enumerate(_with_last(dataloader)):
                result = evaluation.run(item["mini_batch"], with_logits=not loss_only)
                rows_here = item["mini_batch"].plan.num_rows
                loss_sum, num_labels = loss_sum + result.loss_sum, num_labels + result.num_labels
                num_rows += rows_here
                if not loss_only:
                    batch = self._batch_for_metrics(result, item["rows"], rows_here)
                    if keep:
                        for name, value in batch.items():
                            held[name].add(value)
                    if args.batch_eval_metrics and self.compute_metrics is not None:
                        metrics = self.compute_metrics(self._for_metrics(batch), compute_result=is_last)
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
                steps = args.eval_accumulation_steps
                if steps is not None and (step + 1) % steps == 0:
                    for container in held.values():
                        container.to_cpu_and_numpy()
        arrays = {name: container.get_arrays() for name, container in held.items()}
        if self.compute_metrics is not None and not loss_only and not args.batch_eval_metrics:
            metrics = self.compute_metrics(self._for_metrics(arrays))
        metrics = denumpify_detensorize(metrics or {})
        if num_labels:
            metrics[f"{metric_key_prefix}_loss"] = loss_sum / num_labels
        elif description != "Prediction":
            raise DataError(
                f"none of the {num_rows} rows of the evaluation set has a label token",
                why="the loss is a mean over label tokens",
                fix="give the rows labels, or call predict()",
            )
        metrics = {
            key if key.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{key}": value
            for key, value in metrics.items()
        }
        dataset: Any = dataloader.dataset
        num_samples = len(dataset) if has_length(dataset) else num_rows
        return EvalLoopOutput(
            predictions=arrays["predictions"], label_ids=arrays["labels"], metrics=metrics, num_samples=num_samples
        )

    def _batch_for_metrics(
        self: Any, result: EvaluationResult, rows: Mapping[int, Row], num_rows: int
    ) -> dict[str, Tensor]:
        logits, labels, inputs = _padded(result, rows)
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        batch = {"predictions": logits, "labels": labels}
        if "loss" in self.args.include_for_metrics:
            mean = result.loss_sum / result.num_labels if result.num_labels else float("nan")
            batch["losses"] = torch.full((num_rows,), mean)
        if "inputs" in self.args.include_for_metrics:
            batch["inputs"] = inputs
        return batch

    def _for_metrics(self: Any, values: dict[str, Any]) -> EvalPrediction:
        extra = {name: values[name] for name in ("losses", "inputs") if values.get(name) is not None}
        return EvalPrediction(predictions=values["predictions"], label_ids=values["labels"], **extra)
