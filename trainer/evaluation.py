"""Evaluation and prediction of `HotSPaTrainer`: what replaces the stock Trainer's loop over an evaluation set.

Owns `EvaluationLoop`, and `EvaluationMixin`, which puts it behind the stock `evaluate` and `predict`. Promises:

* The loss is the token mean over the whole set, however it is cut into mini-batches; a NaN is shown as NaN.
* Rows come in the order of the dataset, each exactly once, on every number of ranks.
* Logits exist only where `compute_metrics` or `predict` asks for them: then every rank holds those of one mini-batch on
  its device, and those of the set where the stock Trainer holds them (on the device, or on the host from
  `eval_accumulation_steps` on; what `preprocess_logits_for_metrics` made of them, where it is given).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerControl
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.evaluation import EvaluationResult
from hf_hotspa.errors import DataError
from hf_hotspa.rows.features import Row
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.evaluation_sets import EvaluationSets, check_evaluation_loader
from hf_hotspa.trainer.views import EVALUATION

_DECIDE_LOGITS = ("compute_metrics", "preprocess_logits_for_metrics")
_IGNORED = -100
_COLLECTED = ("losses", "predictions", "labels", "inputs")


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


class EvaluationLoop:
    """One pass over an evaluation set, forward only.

    Args:
        compute_metrics: The user's, or None.
        preprocess_logits: `preprocess_logits_for_metrics` of the user's, or None.
        after_step: Called after every mini-batch.
    """

    def __init__(
        self,
        args: HotSPaTrainingArguments,
        compute_metrics: Callable[..., dict[str, Any]] | None,
        preprocess_logits: Callable[[Tensor, Tensor], Any] | None,
        after_step: Callable[[], None],
    ) -> None:
        self._args, self._compute_metrics = args, compute_metrics
        self._preprocess, self._after_step = preprocess_logits, after_step

    def run(
        self, engine: HotSPaEngine, dataloader: DataLoader[Any], loss_only: bool, prefix: str, predicts: bool
    ) -> EvalLoopOutput:
        """Every rank gets the same result. Collective.

        Args:
            dataloader: One of `EvaluationSets`.
            prefix: What the keys of the metrics begin with.
            predicts: Whether it is for `predict`: logits are wanted, and labels need not be there.

        Raises:
            HotspaError: on every rank.
        """
        args, metrics = self._args, dict[str, Any]()
        keep = not args.batch_eval_metrics or predicts
        held = {name: EvalLoopContainer(args.eval_do_concat_batches, padding_index=_IGNORED) for name in _COLLECTED}
        loss_sum, num_labels, num_rows = 0.0, 0, 0
        with engine.evaluation() as evaluation:
            for step, (item, is_last) in enumerate(_with_last(dataloader)):
                result = evaluation.run(item["mini_batch"], with_logits=not loss_only)
                rows_here = item["mini_batch"].plan.num_rows
                loss_sum, num_labels = loss_sum + result.loss_sum, num_labels + result.num_labels
                num_rows += rows_here
                if not loss_only:
                    batch = self._batch(result, item["rows"], rows_here)
                    if keep:
                        for name, value in batch.items():
                            held[name].add(value)
                    if args.batch_eval_metrics and self._compute_metrics is not None:
                        metrics = self._compute_metrics(_prediction(batch), compute_result=is_last)
                self._after_step()
                steps = args.eval_accumulation_steps
                if steps is not None and (step + 1) % steps == 0:
                    for container in held.values():
                        container.to_cpu_and_numpy()
        arrays = {name: container.get_arrays() for name, container in held.items()}
        if self._compute_metrics is not None and not loss_only and not args.batch_eval_metrics:
            metrics = self._compute_metrics(_prediction(arrays))
        metrics = denumpify_detensorize(metrics or {})
        if num_labels:
            metrics[f"{prefix}_loss"] = loss_sum / num_labels
        elif not predicts:
            raise DataError(
                f"none of the {num_rows} rows of the evaluation set has a label token",
                why="the loss is a mean over label tokens",
                fix="give the rows labels, or call predict()",
            )
        metrics = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
        dataset: Any = dataloader.dataset
        num_samples = len(dataset) if has_length(dataset) else num_rows
        return EvalLoopOutput(
            predictions=arrays["predictions"], label_ids=arrays["labels"], metrics=metrics, num_samples=num_samples
        )

    def _batch(self, result: EvaluationResult, rows: Mapping[int, Row], num_rows: int) -> dict[str, Tensor]:
        logits, labels, inputs = _padded(result, rows)
        if self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        batch = {"predictions": logits, "labels": labels}
        if "loss" in self._args.include_for_metrics:
            mean = result.loss_sum / result.num_labels if result.num_labels else float("nan")
            batch["losses"] = torch.full((num_rows,), mean)
        if "inputs" in self._args.include_for_metrics:
            batch["inputs"] = inputs
        return batch


def _prediction(values: Mapping[str, Any]) -> EvalPrediction:
    extra = {name: values[name] for name in ("losses", "inputs") if values.get(name) is not None}
    return EvalPrediction(predictions=values["predictions"], label_ids=values["labels"], **extra)


class EvaluationMixin(TrainerBase):
    """`get_eval_dataloader`, `get_test_dataloader` and `evaluation_loop` for a `transformers.Trainer`."""

    control: TrainerControl
    _evaluation_sets: EvaluationSets

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The mini-batches of an evaluation set: `per_device_eval_batch_size` x processes rows each. Collective."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        return self._evaluation_loader(eval_dataset, keep=self.args.dataloader_persistent_workers)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The same for `predict`. Collective."""
        return self._evaluation_loader(test_dataset)

    def _evaluation_loader(self, dataset: Any, keep: bool = False) -> DataLoader[Any]:
        self._evaluation_sets.asked(dataset)  # before an engine is started for it
        facts = {name: str(getattr(self, name) is not None) for name in _DECIDE_LOGITS}
        return self._evaluation_sets.loader(self._start_engine(training=False), dataset, facts, keep)

    def evaluation_loop(
        self,
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
            UnsupportedError: the data loader is none of this trainer's.
            HotspaError: on every rank.
        """
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        check_evaluation_loader(dataloader)
        self._show_model(EVALUATION)
        with self._broadcasting_errors("evaluation"):
            loader: Any = dataloader
            loader.asks_for(logits=not loss_only)
            optimizer: Any = self.optimizer
            if callable(getattr(optimizer, "eval", None)):
                optimizer.eval()
            self.callback_handler.eval_dataloader = dataloader
            loop = EvaluationLoop(
                args, self.compute_metrics, self.preprocess_logits_for_metrics, self._after_prediction_step
            )
            return loop.run(self._running, dataloader, loss_only, metric_key_prefix, description == "Prediction")

    def _after_prediction_step(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
