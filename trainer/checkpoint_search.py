"""Which checkpoint a run goes on from: found, verified by all ranks together, and compared with the run's data."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from hf_hotspa.checkpoint.format.disk import read_object
from hf_hotspa.checkpoint.format.folder import check_step, checkpoints
from hf_hotspa.checkpoint.format.manifest import STATE, Manifest, read_manifest, verify_files
from hf_hotspa.checkpoint.stock import StockCheckpoint, is_stock
from hf_hotspa.errors import HotspaError, ResumeError
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.agreed_facts import table_facts
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.row_order import order_seed

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Resumption:
    """A verified checkpoint to go on from."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]


def find_checkpoint(
    asked: Any, folder: Path, args: HotSPaTrainingArguments, agreement: Agreement
) -> Resumption | StockCheckpoint:
    """The checkpoint to go on from, the same on all ranks. Collective.

    Args:
        asked: True for the newest of the folder that verifies, or the path of one.

    Raises:
        ResumeError: on every rank: there is none.
        DamagedCheckpointError: on every rank: the one that was named does not verify.
    """
    if asked is not True:
        return agreement.run("resume", lambda: _verified(Path(asked), agreement, args.world_size))
    names = json.loads(agreement.texts(json.dumps([path.name for path in checkpoints(folder)]))[0])
    for path in (folder / name for name in names):
        resumption, reason = None, ""
        try:
            resumption = _verified(path, agreement, args.world_size)
        except HotspaError as error:  # raised by nobody: another checkpoint may do
            reason = str(error)
        reasons = [text for text in agreement.texts(reason) if text]
        if resumption is not None and not reasons:
            if args.process_index == 0:
                logger.info("resuming from %s", path)
            return resumption
        if args.process_index == 0:
            logger.warning("%s is skipped: %s", path, reasons[0])
    raise ResumeError(
        f"No valid checkpoint found in output directory ({folder})",  # the stock Trainer's words, as below
        why=f"none of {len(names)} can be used; see the warnings" if names else None,
        fix="start without resume_from_checkpoint, or check output_dir",
    )


def _verified(path: Path, agreement: Agreement, world_size: int) -> Resumption | StockCheckpoint:
    """A checkpoint that can be gone on from. The ranks share the hashing; each may find something else wrong."""
    if not path.is_dir():
        raise ResumeError(
            f"Can't find a valid checkpoint at {path}",
            why="there is no such folder",
            fix="check the path; resume_from_checkpoint=True takes the newest of output_dir",
        )
    if is_stock(path):
        return StockCheckpoint.open(path)
    manifest = read_manifest(path)
    check_step(path, manifest)
    verify_files(path, manifest, agreement.rank, world_size)
    if not manifest.resumable:
        raise ResumeError(
            "the checkpoint holds the model only (save_only_model)",
            where=str(path),
            fix="start a new run with it as the model, and no resume_from_checkpoint",
        )
    return Resumption(path, manifest, read_object(path, manifest.located(STATE)))


def data_order(args: HotSPaTrainingArguments, loader: Any, longest: int) -> dict[str, Any]:
    """What decides which sequences make up which mini-batch, as plain data.

    Args:
        loader: The train data loader; of a stream nothing is known beforehand.
        longest: The longest sequence of the buckets.
    """
    order: dict[str, Any] = {
        "mini_batch_size": args.hotspa_mini_batch_size,
        "seed": order_seed(args),
        "train_sampling_strategy": str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)),
        "dataloader_drop_last": args.dataloader_drop_last,
        "hotspa_overlong": args.hotspa_overlong,
    }
    table = getattr(loader, "table", None)
    if table is not None:
        order |= table_facts(table)
    if args.hotspa_overlong != "error":
        order["longest sequence of the buckets"] = longest
    return order


def check_data_order(
    resumption: Resumption | StockCheckpoint, order: dict[str, Any], loader: Any, args: HotSPaTrainingArguments
) -> None:
    """Whether the mini-batches of a run are those of the checkpoint that it goes on from.

    Raises:
        ResumeError: they are not.
    """
    if isinstance(resumption, StockCheckpoint):
        table, size = getattr(loader, "table", None), args.hotspa_mini_batch_size
        if table is not None and size is not None:  # of a stream nobody knows the length
            resumption.check_order(len(table), len(loader), size, args.dataloader_drop_last)
        return
    saved = resumption.state.get("data", {}).get("order") or {}
    changed = [key for key in {**order, **saved} if order.get(key) != saved.get(key)]
    if changed:
        key = changed[0]
        raise ResumeError(
            f"{key} is {order.get(key)!r}, and was {saved.get(key)!r} when the checkpoint was written",
            where=str(resumption.path),
            why="sequences would be trained twice or not at all",
            fix=f"set it as it was, or say hotspa_allow_data_order_change=True ({len(changed)} such changes)",
        )
