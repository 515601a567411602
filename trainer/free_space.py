"""Whether there is room for a checkpoint: before the first step, and before each save.

Bytes are a lower bound: tensors only, and of an optimizer that has not stepped the states that are known. So an error
here is one that the disk would raise, too, after half a checkpoint is written.
"""

import logging
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch.optim import Adam, AdamW, Optimizer
from transformers.trainer_utils import IntervalStrategy

from hf_hotspa.checkpoint.format.disk import DTYPES, TensorRecord
from hf_hotspa.checkpoint.format.manifest import WEIGHT
from hf_hotspa.checkpoint.model_files import ModelWeights
from hf_hotspa.checkpoint.tensors import Share
from hf_hotspa.costs.memory import size
from hf_hotspa.engine.master import bare_optimizer
from hf_hotspa.errors import CheckpointError
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

logger = logging.getLogger(__name__)


def rank_bytes(share: Share, files: ModelWeights, optimizer: Optimizer | None, rank: int, world_size: int) -> int:
    """The bytes of the tensors that one rank writes.

    Args:
        share: The rank's weights and states.
        files: The weight files of the model, which the ranks divide.
        optimizer: None if only the model is saved.
    """
    of_model = _bytes(record for _, entries in files.shards[rank::world_size] for record, _ in entries)
    if optimizer is None:
        return of_model
    of_rank = _bytes(record for record, _ in share.tensors)
    has_stepped = any(states.keys() - {WEIGHT} for states in share.states.values())
    if not has_stepped and type(bare_optimizer(optimizer)) in (Adam, AdamW):
        of_rank *= 3  # two moments, in the dtype of the masters
    return of_model + of_rank


def _bytes(records: Iterable[TensorRecord]) -> int:
    return sum(DTYPES[record.dtype][1] * math.prod(record.shape) for record in records)


def check_room(folder: Path, needed: int, when: str) -> int:
    """Checks that a file system has room for one more checkpoint; returns the free bytes, or 0 if it does not say.
    Raises `CheckpointError`, naming both numbers.

    Args:
        folder: Of the run; need not exist.
        needed: Bytes of the checkpoint, over all ranks.
        when: For the message.
    """
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError:  # a save reports the error
        return 0
    if not usage.total:  # such as some network file systems
        return 0
    if needed <= usage.free:
        return usage.free
    raise CheckpointError(
        f"{when}: it needs {size(needed)} ({needed:,} bytes), and {size(usage.free)} ({usage.free:,} bytes) are free",
        where=str(folder),
        why="a checkpoint holds the weights, the masters and the optimizer state; older ones are removed only after a new "
        "one is complete",
        fix="free space, give an output_dir on another disk, or save less (save_only_model=True, save_strategy='no')",
    )


def check_run(args: HotSPaTrainingArguments, needed: int, num_steps: int) -> None:
    """Before the first step, on the main process: rejects a run without room for one checkpoint, and warns if there is
    not room for all that will be there. Raises `CheckpointError` if no checkpoint has room."""
    folder = Path(args.output_dir)
    free = check_room(folder, needed, "no checkpoint of this run has room on the disk")
    if not needed or not free or args.save_strategy != IntervalStrategy.STEPS or args.save_steps < 1:
        return
    saves = math.ceil(num_steps / args.save_steps)
    limit = args.save_total_limit
    most = min(saves, limit + 1) if limit is not None and limit > 0 else saves  # one more while it is written
    if most * needed > free:
        logger.warning(
            "%s has room for %d checkpoints of %s, and this run will have up to %d: later saves will fail; free space, or lower "
            "save_total_limit (now %s), which needs room for one more",
            folder, free // needed, size(needed), most, limit,
        )  # fmt: skip
