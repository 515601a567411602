"""Training arguments that an older transformers names otherwise, or does not have: found by attribute, never by version."""

from typing import Any

from transformers import TrainingArguments


def recompute_argument(args: TrainingArguments) -> str:
    """The name of the argument that asks for recomputation: `activation_checkpointing`, once `gradient_checkpointing`.

    Where both are there, transformers keeps them the same.
    """
    return "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"


def workers_context(args: TrainingArguments) -> Any:
    """How loader workers are started; None, the rule of the platform, where there is no such argument."""
    return getattr(args, "dataloader_multiprocessing_context", None)
