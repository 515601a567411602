"""Pushing to the hub, where the main process alone talks to the network and the others must not wait for it in vain.

`push_to_hub` and `save_model` are the stock Trainer's; their failures are raised by all ranks. What `hub_strategy` asks
for at every checkpoint runs in a thread of the main process, from the checkpoint on disk: nothing waits for the network,
and its failure is a warning.
"""

import logging
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import trainer as stock
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from hf_hotspa.checkpoint.export import export
from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.errors import HotspaError
from hf_hotspa.trainer.base import TrainerBase

logger = logging.getLogger(__name__)

_WORK = ".hub"
"""Where, in the output directory, the model of a checkpoint lies while it is pushed."""

_LAST = "last-checkpoint"


def _hub_error(failure: Exception) -> HotspaError:
    """For whatever the network or the hub raises."""
    return HotspaError(
        f"the hub cannot be reached or refuses: {type(failure).__name__}: {failure}",
        fix="check the network, hub_model_id and hub_token, or train with push_to_hub=False",
    )


class HubMixin(TrainerBase):
    """`init_hf_repo` and `push_to_hub` for `HotSPaTrainer`, and the pushes of `hub_strategy`."""

    hub_model_id: str | None
    _pushed: Path | None = None

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As in the stock Trainer. Collective."""
        self._on_all_ranks(lambda: super(HubMixin, self).init_hf_repo(*args, **kwargs))
        if self.hub_model_id is None:  # only the main process knows it, and `push_to_hub` asks on every rank
            self.hub_model_id = ""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in the stock Trainer. Collective."""
        return self._on_all_ranks(lambda: super(HubMixin, self).push_to_hub(*args, **kwargs))

    def _on_all_ranks(self, action: Callable[[], Any]) -> Any:
        return self._agreement().run("hub", action, otherwise=_hub_error)

    # -- at every checkpoint ------------------------------------------------------------------------------------------

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Begins to push what `hub_strategy` says of a checkpoint that exists: its model, and perhaps the folder itself.

        As in the stock Trainer, a checkpoint is left out while an earlier one is being pushed; with `hub_always_push` the
        earlier one is waited for. Not collective; only the main process does anything, and it never raises.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self._is_pushing and not self.args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._pushed = folder = Path(checkpoint_folder)
        when = f"step {folder.name.rpartition('-')[2]}"  # which may be in the past, for a save in the background
        if self.args.save_strategy == SaveStrategy.EPOCH:
            when = f"epoch {int(self.state.epoch or 0)}"
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotspa-hub")
        self.push_in_progress = PushInProgress([thread.submit(self._push, folder, f"Training in progress, {when}")])
        thread.shutdown(wait=False)

    @property
    def _is_pushing(self) -> bool:
        under_way = getattr(self, "push_in_progress", None)
        return under_way is not None and not under_way.is_done()

    def _being_pushed(self) -> Collection[Path]:
        """The checkpoint that must not be removed now."""
        return [self._pushed] if self._pushed is not None and self._is_pushing else []

    def _push(self, checkpoint: Path, message: str) -> None:
        """In a thread: the model of the checkpoint, in Hugging Face's format, and the checkpoint itself."""
        args, work = self.args, checkpoint.parent / _WORK
        upload = {"repo_id": self.hub_model_id, "token": args.hub_token, "revision": args.hub_revision}
        try:
            if work.exists():  # of a run that was killed
                Disk().remove(work)
            Disk().make_directory(work)
            export(checkpoint, work / "model", mode=0o700)
            # the card on the hub may be the user's own; `push_to_hub` writes one at the end
            stock.hf_api().upload_folder(
                folder_path=str(work / "model"), commit_message=message, ignore_patterns=["README.md"], **upload
            )
            if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                name = _LAST if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
                # files of an earlier checkpoint under this name, of other ranks perhaps, would not belong to it
                stock.hf_api().upload_folder(
                    folder_path=str(checkpoint),
                    path_in_repo=name,
                    commit_message=f"{message}, checkpoint",
                    delete_patterns=["*"],
                    **upload,
                )
        except Exception as failure:  # whatever the disk, the network or the hub raises: training goes on
            logger.warning(
                "checkpoint %s was not pushed to the hub: %s: %s", checkpoint, type(failure).__name__, failure
            )
        else:
            logger.info("%s was pushed to %s", checkpoint, self.hub_model_id)
        finally:
            shutil.rmtree(work, ignore_errors=True)
