"""transformers' own Trainer with DDP: padded batches, batches that `batch_rebalance` cuts, and flattened ones."""

from typing import Any

from contest import make_model
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from peers.sides.common import Turns, tokenizer, trainer_of
from peers.work import Work


class _InOrder(Trainer):
    """Its mini-batches hold the rows that the others' hold: `batch_rebalance` would shuffle them first."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, BatchRebalanceSampler):
            sampler.shuffle = False
        return sampler


def collator_of(work: Work, kind: str) -> Any:
    """Flattened rows restart their positions and have no mask, which isolates them; labels begin with -100."""
    return DataCollatorWithFlattening() if kind == "flattened" else DataCollatorForSeq2Seq(tokenizer(work.vocabulary))


def run(work: Work, turns: Turns, kind: str) -> Any:
    """Trains; the weights are plain tensors on every rank."""
    more = {"train_sampling_strategy": "batch_rebalance"} if kind == "rebalanced" else {}
    trainer = trainer_of(work, turns, make_model(work.model), collator_of(work, kind), _InOrder, **more)
    trainer.train()
    return trainer.model.state_dict()
