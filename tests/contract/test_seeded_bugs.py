"""The list of seeded bugs names the code and the tests as they are; `tests/gloo/test_mutations.py` runs it."""

from tests.mutations import FAST, MUTATIONS, ROOT, TAKEN_BACK


def test_the_list():
    names = [mutation.name for mutation in (*MUTATIONS, *TAKEN_BACK)]
    assert len(set(names)) == len(names) >= 60
    assert set(FAST) <= set(names)
    wrong = {}
    for mutation in (*MUTATIONS, *TAKEN_BACK):
        file = mutation.file
        for name in ("trainer", "callbacks"):
            file = file.replace(f"hf_hotspa/{name}/", f"{name}/")
        found = (ROOT / file).read_text().count(mutation.old) if (ROOT / file).exists() else "no file"
        test, _, name = mutation.test.partition("::")
        if found != 1 or not (ROOT / test).exists() or f"def {name.partition('[')[0]}" not in (ROOT / test).read_text():
            wrong[mutation.name] = found, mutation.file, mutation.test
    assert wrong == {}, "the text to change must occur once, and the test must be there: tests/mutations.py"
