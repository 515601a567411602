"""From the data set that a user passes to the Trainer to rows of tokens and their lengths.

Owns the decision between map-style data sets, which are tokenised and scanned as a whole, and streams, which are not.
"""

from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from hf_hotspa.data.prepare import check_masks, prepare_dataset
from hf_hotspa.data.scan import SequenceTable, scan_dataset


def as_it_is(item: dict[str, Any]) -> dict[str, Any]:
    """The collate function of data sets whose items are collated already. Module-level: workers unpickle it."""
    return item


def is_stream(dataset: Any) -> bool:
    """Whether rows can only be read one after the other: no random access, whether or not there is a length."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return True
    return not hasattr(dataset, "__getitem__") and hasattr(dataset, "__iter__")


def scanned(dataset: Any, processing_class: Any, args: TrainingArguments) -> tuple[Any, SequenceTable]:
    """The data set with token ids, and its scan. One process scans, the others read its cache: a collective call.

    Raises:
        HotspaError: the data set cannot be used as it is.
    """
    with args.main_process_first(desc="scan of the sequence lengths"):
        columns = getattr(dataset, "column_names", None)
        if columns and processing_class is not None and "input_ids" not in columns:
            dataset = prepare_dataset(dataset, processing_class)
        check_masks(getattr(dataset, "column_names", None) or ())
        quiet = args.disable_tqdm or args.process_index != 0
        return dataset, scan_dataset(dataset, disable_progress=quiet)
