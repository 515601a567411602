"""An upgrade of transformers, accelerate or torch that changes what we override fails here, by name."""

import json

import pytest

from tests.upstream_table import FILE, signatures

PINNED = json.loads(FILE.read_text())
FOUND = signatures()


@pytest.mark.parametrize("place", sorted({*PINNED, *FOUND}))
def test_signature_is_the_pinned_one(place):
    assert place in FOUND, f"{place} is pinned, and no longer overridden or there: python -m tests.upstream_table"
    assert place in PINNED, f"{place} is overridden and not pinned: python -m tests.upstream_table"
    assert FOUND[place] == PINNED[place], (
        f"{place} changed upstream; look at what calls or overrides it in hf_hotspa, then python -m tests.upstream_table"
    )
