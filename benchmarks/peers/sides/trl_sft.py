"""TRL's SFTTrainer with `bfd` packing. It packs the whole data set at once, so that its mini-batches are its own."""

from typing import Any

from contest import make_model
from trl import SFTConfig, SFTTrainer, pack_dataset

from peers.sides.common import Turns, arguments, tokenizer
from peers.work import Work


def run(work: Work, turns: Turns) -> Any:
    """Trains mini-batches of about as many tokens as the others', all packs together; the weights are plain tensors."""
    rows = work.rows()
    packs = len(pack_dataset(rows, work.longest, strategy="bfd"))
    whole = len(rows) // work.mini_batch_rows  # mini-batches that the rows are for the others
    accumulation = max(1, round(packs / (whole * work.ranks)))
    steps = max(1, packs // (accumulation * work.ranks))
    args = arguments(
        work,
        SFTConfig,
        max_steps=min(steps, work.steps),
        logging_steps=max(1, min(steps, work.steps)),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        packing=True,
        packing_strategy="bfd",
        max_length=work.longest,
        gradient_checkpointing=False,
        dataset_kwargs=None,
        shuffle_dataset=False,
    )
    trainer = SFTTrainer(
        model=make_model(work.model),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer(work.vocabulary),
        callbacks=[turns.callback()],
    )
    trainer.data_collator = turns.counting(trainer.data_collator)
    turns.facts["packs"] = {"longest": work.longest, "of_a_step": accumulation * work.ranks}
    trainer.train()
    return trainer.model.state_dict()
