"""sentence-transformers' trainers over a `SwitchedModel`: change one import of a script.

    from hf_hotspa.trainer.sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    args = SentenceTransformerTrainingArguments("out", hotspa_strategies="dp4:1024@4096,tp4:8192")
    trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss)
    trainer.train()

Also `CrossEncoderTrainer` and `CrossEncoderTrainingArguments`. The trainers are the library's behind `HotSPaTrainer`; the
arguments have the library's fields and defaults, and the `hotspa_*` flags.
"""

import sentence_transformers as library

from hf_hotspa.trainer.arguments import arguments_of
from hf_hotspa.trainer.trainer import switched

SentenceTransformerTrainer = switched(library.SentenceTransformerTrainer)
SentenceTransformerTrainingArguments = arguments_of(library.SentenceTransformerTrainingArguments, __name__)
CrossEncoderTrainer = switched(library.CrossEncoderTrainer)
CrossEncoderTrainingArguments = arguments_of(library.CrossEncoderTrainingArguments, __name__)
