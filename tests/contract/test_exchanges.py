"""What the product changes of other objects stands in `hf_hotspa/exchanges.py`, with a reason."""

import re

from hf_hotspa.exchanges import REASONS
from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files

HOME = "hf_hotspa/exchanges.py"
TEXTS = {file: (ROOT / file).read_text() for file in source_files(*PACKAGE_FOLDERS)}


def test_classes_and_hooks_are_exchanged_in_one_module() -> None:
    exchange = re.compile(
        r"\.(__class__|__bases__) = |sys\.excepthook = |(?<!: )\b(?:torch|transformers|accelerate)[\w.]*\.\w+ = "
    )
    found = {file: exchange.findall(text) for file, text in TEXTS.items() if file != HOME}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_class_that_is_exchanged_has_a_reason() -> None:
    given = {name for text in TEXTS.values() for name in re.findall(r"\bset_class\(.*\"(\w+)\"\)", text)}
    assert given == {"sampler", "stream", "parameter", "optimizer", "packed"}
    assert given <= REASONS.keys()
