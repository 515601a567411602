"""The memory of PipeDream: a master store for each stage, and versions of its weights."""

from hf_hotspa.costs.memory import MemoryStage
from hf_hotspa.costs.sizes import MasterSizes
from hf_hotspa.costs.terms import Bytes, MemoryTerm, Terms
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.seam import settings


def _master(stage: MemoryStage) -> MasterSizes | None:
    if settings(stage.options.features, PipeDream) is None:
        return None
    return stage.model.sizes.master_of_stage(stage.strategy, stage.index, stage.options.optimizer)


def _versions(stage: MemoryStage) -> Bytes | None:
    mode, depth = settings(stage.options.features, PipeDream), stage.strategy.pp
    if mode is None:
        return None
    return lambda packs: (mode.most_versions(depth, stage.index, packs.number) - 1) * stage.own.trained_bytes


TERMS = Terms(memory=(MemoryTerm("versions of weights", "weights", _versions),), master=_master)
