"""The command line of a script that trains: `HfArgumentParser`, short help, and a word for a flag that nobody knows."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import HfArgumentParser

from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.misspelt import unknown_flag

MORE = "All flags of transformers' TrainingArguments work, too: --learning_rate, --num_train_epochs, --save_steps, ..."


class FlagParser(HfArgumentParser):
    """Reads data classes. A flag that none of them has ends the program, with the name that was meant."""

    def __init__(self, dataclass_types: Iterable[Any], **options: Any) -> None:
        kinds = list(dataclass_types)
        super().__init__(kinds, **{"epilog": MORE, **options})
        inherited = {name for name in HotSPaTrainingArguments.__dataclass_fields__ if not name.startswith("hotspa_")}
        for action in self._actions:  # hundreds: the help is about what is ours
            if action.dest in inherited - {"output_dir"}:
                action.help = argparse.SUPPRESS

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As `ArgumentParser.parse_args`; what is not known ends the program with code 2."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def _refuse(self, unknown: list[str]) -> None:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        if not flags:
            self.error(f"{unknown[0]!r} belongs to no flag; names follow --model and --dataset")
        known = {action.dest for action in self._actions}
        self.error("; ".join(unknown_flag(flag, known) for flag in flags))
