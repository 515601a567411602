"""What differs between ranks is found by name before the first update, whatever trainer runs; what may differ changes nothing."""

import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_hotspa.model.model_check import weights_digest
from hf_hotspa.trainer import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.trainer.same_run import ARGUMENTS_MAY_DIFFER, MAY_DIFFER
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.rank_differences import TableOfRows, drawn, outcome, wrong_ones

pytestmark = pytest.mark.gloo


def outcomes(rank, world_size, seed, number, folder):
    return {str(difference): outcome(rank, difference, folder) for difference in drawn(seed, number)}


def _check(seed, number, folder):
    tried = drawn(seed, number)
    assert len(tried) == number
    found = run_ranks(2, outcomes, seed, number, str(folder), timeout=580 if number < 50 else 3000)
    wrong = wrong_ones(found, tried)
    assert not wrong, f"{len(wrong)} of {number}:\n" + "\n".join(wrong)
    texts = [text for text, _ in found[0].values()]
    print({word: texts.count(word) for word in ("may differ", "no other value")})
    assert sum("HSP-203" in text for text in texts) > number / 2


def test_drawn_differences_are_found_by_name(tmp_path):
    _check(1, 20, tmp_path)


@pytest.mark.slow
def test_many_drawn_differences_are_found_by_name(tmp_path):
    _check(2, 200, tmp_path)


# ---- what may differ

FIELDS = {
    "run_name": "mine", "project": "mine", "trackio_space_id": "mine", "log_level": "error", "log_level_replica": "error",
    "log_on_each_node": False, "hub_token": "mine", "disable_tqdm": False, "hotspa_phase_table": True, "hotspa_log_all": True,
    "report_to": ["tensorboard"], "deepspeed": "there.json", "hotspa_model_path": "there/model",
}  # fmt: skip
"""Of rank 1; the others' are `SAME`."""
SAME = {"report_to": "none", "deepspeed": "here.json", "hotspa_model_path": "here/model", "disable_tqdm": True}


class DoesNothing(TrainerCallback):
    pass


class Drawn(TableOfRows):
    """Rows whose reading draws numbers from torch's generator."""

    def __getitem__(self, place):
        torch.rand(3)
        return super().__getitem__(place)


def trained(rank, folder, differs):
    class Own(HotSPaTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if differs:
                self.own_rank, self.is_main, self.started_at = rank, rank == 0, time.time() + rank
                self.log_file_of_rank = f"rank_{rank}.log"

    odd = differs and rank == 1
    fields = SAME | (FIELDS if odd else {})
    for name in ("deepspeed", "hotspa_model_path"):
        fields[name] = f"{folder}/{fields[name]}"
    arguments = HotSPaTrainingArguments(
        output_dir=f"{folder}/out", use_cpu=True, bf16=False, max_steps=3, learning_rate=1e-2, save_strategy="no",
        per_device_train_batch_size=3, hotspa_strategies="dp2:16@32,tp2:60@64", hotspa_report=False, seed=5, **fields,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setenv("MKL_NUM_THREADS", "3")
        own = {"callbacks": [DoesNothing()]} if odd else {}
        trainer = Own(args=arguments, train_dataset=Drawn(random_rows(18, 160, longest=60, seed=3)), **own)
        trainer.train()
    weights = trainer.materialize()
    drawn_next = torch.rand(2).tolist()
    trainer.close_engine()
    return weights_digest(weights), [log.get("loss") for log in trainer.state.log_history], drawn_next


def other_weights(rank):
    """Digests of the model object before and after the engine has started."""
    from tests.switched import switched

    model = tiny_model("llama_gqa_bias")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = weights_digest(model)
    switched(model, "dp2:14@64,tp2:64@96").close()
    return before, weights_digest(model)


def without_an_error(rank, world_size, folder):
    return trained(rank, folder, False), trained(rank, folder, True), other_weights(rank)


def test_what_may_differ_changes_nothing_and_models_have_the_weights_of_rank_0_from_the_start(tmp_path):
    assert {*FIELDS, "local_rank"} == set(ARGUMENTS_MAY_DIFFER)
    model = tiny_model("llama_gqa_bias")
    for place in ("here", "there"):
        model.save_pretrained(tmp_path / place / "model")
        (tmp_path / f"{place}.json").write_text('{"gradient_clipping": 0.5}')
    (same, other, (first, mine)), (same_of_1, other_of_1, (drawn_of_1, theirs)) = run_ranks(
        2, without_an_error, str(tmp_path)
    )
    assert same == other
    assert same_of_1 == other_of_1
    assert drawn_of_1 != mine == theirs == first


def test_the_page_lists_what_may_differ():
    page = (Path(__file__).resolve().parents[2] / "docs" / "several-machines.md").read_text()
    table = page.partition("| what | why |\n|---|---|\n")[2].partition("\n\n")[0]
    reasons = dict.fromkeys(ARGUMENTS_MAY_DIFFER.values())
    names = {why: ", ".join(f"`{name}`" for name, of in ARGUMENTS_MAY_DIFFER.items() if of == why) for why in reasons}
    rows = [f"| {of} | {why} |" for why, of in names.items()]
    assert table.splitlines() == rows + [f"| {name} | {why} |" for name, why in MAY_DIFFER.items()]
