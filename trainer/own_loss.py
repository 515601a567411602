"""From the ways in which users of `Trainer` give a loss to the one that the engine trains.

Owns what counts where several are given, the stock signatures (`compute_loss_func`, a `compute_loss` override,
`model.loss_function = f`), and what their code sees: one sequence, its logits, and a single process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.parallel.adapters import bare_model
from hf_hotspa.parallel.own_loss import SequenceLoss, TokenLoss, WholeSequence
from hf_hotspa.rows.features import read_row
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.data_sets import DataSets
from hf_hotspa.trainer.rows import is_stream

_READ = ("config", "device", "dtype", "training", "loss_function")


class ModelOfSequence:
    """What a `compute_loss` override gets for the model: called with its `inputs`, it returns their logits.

    The model is spread over ranks and has run already, so it cannot be called with anything else, and has no parameters.
    """

    def __init__(self, model: Any, sequence: WholeSequence) -> None:
        self._sequence = sequence
        self.config, self.loss_function = model.config, bare_model(model)[0].loss_function
        self.device, self.dtype = sequence.logits.device, sequence.logits.dtype
        self.training = torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model that compute_loss gets has no {name!r}: it is called with the inputs, and has {', '.join(_READ)}"
        )

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """The logits; with `labels` also the model's own loss.

        Raises:
            UnsupportedError: for other inputs than those of `compute_loss`.
        """
        sequence = self._sequence
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        expected = {"input_ids": sequence.input_ids, "attention_mask": sequence.attention_mask}
        changed = [name for name, value in given.items() if not _equal(value, expected[name], name == "input_ids")]
        changed += [n for n, v in others.items() if v not in (None, False) and n not in ("return_dict", "use_cache")]
        if changed:
            raise UnsupportedError(
                f"compute_loss calls the model with {', '.join(changed)} of its own",
                why="the model has run already, packed and spread over ranks; what it gives is the logits of the inputs",
                fix="call the model with the inputs of compute_loss; other models may be called with anything",
            )
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=sequence.logits,
                labels=labels,
                vocab_size=sequence.logits.shape[-1],
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(loss=loss, logits=sequence.logits)


def _equal(given: Tensor | None, expected: Tensor, needed: bool) -> bool:
    if given is None:
        return not needed
    return given is expected or (given.shape == expected.shape and bool((given == expected).all()))


@contextmanager
def as_one_process() -> Iterator[None]:
    """What accelerate says and does inside is what it would in a run of one process.

    A loss is that of a share of one mini-batch, whoever computes it: it is not to be multiplied by the number of
    processes, as it must where gradients are averaged, and a `gather` in it has nobody to wait for.
    """
    alone = {"num_processes": 1, "distributed_type": DistributedType.NO}
    with patch.dict(PartialState._shared_state, alone), patch.dict(AcceleratorState._shared_state, alone):
        yield


class OwnLossMixin(TrainerBase):
    """`token_loss`, `loss_columns`, `compute_loss_func` and `compute_loss` for a `transformers.Trainer`."""

    _data: DataSets
    token_loss: Any = None
    loss_columns: tuple[str, ...] = ()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """What `super().compute_loss` of an override is for a sequence; with another model, that of the stock Trainer."""
        if not isinstance(model, ModelOfSequence):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        popped = self.label_smoother is not None or self.compute_loss_func is not None
        labels = inputs.pop("labels", None) if popped else None
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif labels is not None:
            loss = self.label_smoother(outputs, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)
        else:
            loss = outputs.loss
        return (loss, outputs) if return_outputs else loss

    def _takes_losses(self, token_loss: Any, columns: Sequence[str], compute_loss_func: Any) -> None:
        """Keeps what was given; called before the stock Trainer is set up."""
        self.token_loss, self.loss_columns = token_loss, tuple(columns)
        given = {
            "token_loss": token_loss is not None,
            "compute_loss_func": compute_loss_func is not None,
            "a compute_loss override": self._overrides_loss,
        }
        names = [name for name, there in given.items() if there]
        if token_loss is not None and len(names) > 1:
            raise HotspaConfigError(f"several losses are given: {' and '.join(names)}", fix="give one of them")
        if token_loss is not None and self.args.label_smoothing_factor:
            raise HotspaConfigError(
                f"label_smoothing_factor is {self.args.label_smoothing_factor}, and a token_loss is given",
                why="a token_loss replaces the smoothed cross entropy",
                fix="leave label_smoothing_factor at 0",
            )
        if columns and not names:
            raise HotspaConfigError(
                f"loss_columns is {list(columns)}, and no loss of your own reads them",
                fix="give a token_loss, or a compute_loss override, or leave loss_columns out",
            )
        if names and token_loss is None and self.args.hotspa_overlong == "split":
            raise UnsupportedError(
                f"{names[0]} beside hotspa_overlong='split'",
                why="it is a loss of whole sequences, and the policy cuts them",
                fix="use a token_loss, or another policy",
            )

    @property
    def _overrides_loss(self) -> bool:
        return type(self).compute_loss is not OwnLossMixin.compute_loss

    def _own_loss(self) -> TokenLoss | SequenceLoss | None:
        """The loss for the engine; None for the cross entropy of the labels, smoothed or not."""
        columns, model = self.loss_columns, self.model
        if self.token_loss is not None:
            return TokenLoss(self.token_loss, columns, example=self._example())
        if self._overrides_loss:
            name = f"{type(self).__name__}.compute_loss"
            return SequenceLoss(self._by_override, columns, name=name, example=self._example())
        function = self.compute_loss_func
        if function is not None:

            def by_function(sequence: WholeSequence, num_items: Tensor) -> Any:
                outputs = CausalLMOutputWithPast(logits=sequence.logits)
                return function(outputs, sequence.labels, num_items_in_batch=num_items)

            return SequenceLoss(by_function, columns, name=getattr(function, "__qualname__", "compute_loss_func"))
        replaced = vars(bare_model(model)[0]).get("_loss_function", ForCausalLMLoss)
        if replaced is ForCausalLMLoss or self.args.label_smoothing_factor:
            return None  # with label smoothing, the stock Trainer takes no loss of the model either

        def by_model(sequence: WholeSequence, num_items: Tensor) -> Any:
            size = sequence.logits.shape[-1]
            return replaced(
                logits=sequence.logits, labels=sequence.labels, vocab_size=size, num_items_in_batch=num_items
            )

        loss = SequenceLoss(by_model, name=f"model.loss_function ({getattr(replaced, '__qualname__', replaced)})")
        loss.of_model = True
        return loss

    def _by_override(self, sequence: WholeSequence, num_items: Tensor) -> Any:
        inputs = {
            "input_ids": sequence.input_ids,
            "attention_mask": sequence.attention_mask,
            "labels": sequence.labels,
            **sequence.columns,
        }
        with as_one_process(), self._unlogged() if self.engine is None else nullcontext():
            return self.compute_loss(ModelOfSequence(self.model, sequence), inputs, num_items_in_batch=num_items)

    def _example(self) -> Mapping[str, Any] | None:
        """The columns of a row of the data set, so that the check of a loss calls it with such numbers. Collective."""
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if not self.loss_columns or dataset is None or is_stream(dataset) or isinstance(dataset, dict):
            return None
        dataset = self._data.train(dataset)[0] if dataset is self.train_dataset else dataset
        return self._agreement().run("loss_columns", lambda: read_row(dataset[0], 0, self._row_rules()).columns)

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        """While losses are only tried, before there is an engine, what they log is not logged."""
        self.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.log
