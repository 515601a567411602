"""Seeded bugs (`tests/mutations.py`): the targeted tests notice every one of them."""

import pytest

from tests.mutations import FAST, MUTATIONS, TESTS_FAILED, Copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    made = Copy(tmp_path_factory.mktemp("tree"))
    code = "import hf_hotspa.strategy, hf_hotspa.callbacks as c; print(hf_hotspa.strategy.__file__, c.__file__)"
    places = made.run("-c", code).stdout.split()
    assert len(places) == 2
    assert all(place.startswith(str(made.folder)) for place in places), places
    # what must pass without a bug, in one process for all that the default suite runs
    tests = sorted({mutation.test for mutation in MUTATIONS if mutation.name in FAST})
    if made.run("-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *tests).returncode == 0:
        made._passed |= dict.fromkeys(tests, True)
    return made


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(m, id=m.name, marks=() if m.name in FAST else pytest.mark.slow) for m in MUTATIONS],
)
def test_a_seeded_bug_is_noticed(copy, mutation):
    assert copy.passes(mutation.test), f"{mutation.test} fails without the bug"
    with copy.with_bug(mutation):
        done = copy.run_test(mutation.test)
    assert done.returncode == TESTS_FAILED, (
        f"{mutation.test} did not notice that {mutation.name}\n{done.stdout[-2000:]}"
    )
