"""`save_model` that fails: the same error on every rank that calls it, and nobody waits where only the first one does."""

from pathlib import Path

import pytest

from hf_hotspa.errors import CheckpointError
from tests.harness import run_ranks
from tests.training_runs import make_trainer

pytestmark = pytest.mark.gloo


def save_models(rank, world, folder):
    trainer = make_trainer(folder, world, save_strategy="no", ddp_timeout=30)
    no_folder = Path(folder, "file")
    if rank == 0:
        no_folder.write_text("in the way")
    trainer.save_model(f"{folder}/whole")
    with pytest.raises(CheckpointError, match="HSP-210.*model cannot be saved.*file") as caught:
        trainer.save_model(str(no_folder))

    if trainer.is_world_process_zero():  # as many scripts do
        trainer.save_model(f"{folder}/alone")
        with pytest.raises(CheckpointError):
            trainer.save_model(str(no_folder))
    trainer.save_model(f"{folder}/{rank}")  # only that of the first rank is written
    trainer.save_model(f"{folder}/last")
    return str(caught.value)


def test_all_ranks_raise_what_the_first_one_does(tmp_path):
    first, other = run_ranks(2, save_models, str(tmp_path))
    assert first == other
    written = {path.parent.name for path in tmp_path.glob("*/model.safetensors")}
    assert written == {"whole", "alone", "0", "last"}
