"""Agreement of a trainer's ranks over the host, which is there before an engine is."""

from datetime import timedelta

import torch.distributed as dist

from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement, Mailbox
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments


class HostAgreement:
    """Makes agreements over one group of processes, which exists from the first one on."""

    def __init__(self, args: HotSPaTrainingArguments) -> None:
        self._args = args
        self._channel: tuple[dist.ProcessGroup, Mailbox] | None = None

    def __call__(self) -> Agreement:
        """The agreement; of one process before there are others. Collective the first time."""
        rank, world_size = self._args.process_index, self._args.world_size
        if world_size == 1 or not dist.is_initialized():
            return Agreement(None, 0)
        if self._channel is None:
            timeout = timedelta(seconds=float(self._args.ddp_timeout))
            self._channel = backends.world_for_host_tensors(timeout), Mailbox(rank, world_size)
        group, mailbox = self._channel
        return Agreement(group, rank, mailbox)
