"""Names and texts are plain technical English: names say what they hold, and words that were ours alone stay out."""

import ast
import re

from tests.contract.layers import ROOT

PRODUCT = ("hf_hotspa", "trainer", "callbacks")
UNWANTED = {
    *("found", "misfit", "foretold", "told_to_all", "roll_call"),
    *("told", "settled", "odd_ones", "held", "look", "said", "_answer", "takes_over"),
}
"""Names that say nothing of what they hold (a result is always found), with or without underscores before them."""
WORDS = (
    r"(those|that) of",  # the thing has a name
    r"where there (is|are) (one|none|any)",  # if any
    r"(?!there\b)\w+ (is|are|was|were|be) no(?! (longer|more|less|fewer)\b)",  # is not a
    r"(go|goes|going|went|gone) on",  # continues, resumes
    r"(give|gives|gave|given|giving) away",  # offloads, hands over
    r"(keep|keeps|kept|keeping) step",  # in lockstep
    r"of (your|its|their|our|his) own",  # custom, separate
    r"pace",  # relative step time
    r"ways? of cp",  # cp method
    r"cuts? of (the )?stages",  # stage partition
    r"(sit|sits|sat|sitting) out",  # skips
    r"(?<!\|)refus(e[sd]?|(al)s?|ing)",  # rejects, unsupported; after `|` it is gloo's "connection refused"
)
_BETWEEN = r"""(?:\s|#|>|"|\bf")+"""
"""Words of one sentence may stand on two lines of a comment, of a quotation, or of a text in several parts."""
PATTERN = re.compile("|".join(rf"\b{words}\b" for words in WORDS).replace(" ", _BETWEEN), re.IGNORECASE)


def names(source: str) -> set[str]:
    """What a module calls its variables, arguments, attributes, functions and classes."""
    called = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                called.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                called.add(name)
    return called


def texts(text: str) -> list[str]:
    """Unwanted words, with what stands around them."""
    return [" ".join(text[max(0, m.start() - 40) : m.end() + 20].split()) for m in PATTERN.finditer(text)]


def test_no_name_says_nothing() -> None:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    unwanted = {
        str(path.relative_to(ROOT)): {name for name in names(path.read_text()) if {name, name.strip("_")} & UNWANTED}
        for path in files
    }
    assert {path: words for path, words in unwanted.items() if words} == {}


def test_texts_are_in_plain_words() -> None:
    files = [path for folder in (*PRODUCT, "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    files += [path for folder in ("docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.md")]
    files += [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    assert len(files) > 250
    unwanted = {str(path.relative_to(ROOT)): texts(path.read_text()) for path in files}
    assert {path: words for path, words in unwanted.items() if words} == {}


def test_unwanted_words_are_seen() -> None:
    for text in (
        "those of",
        "a file that is no\n# checkpoint",
        "it goes on",
        'files of "\n    f"your own',
        "Refused",
        "the cut of stages",
    ):
        assert texts(f"the first {text} is"), text
    assert not texts("there is no file, it is no longer there, and so are not those")


def test_names_of_all_kinds_are_seen() -> None:
    source = "class A:\n    def b(self, c=0):\n        (d := c)\n        for e in d:\n            f, *g = e\n        self.h = f\n"
    assert names(source) >= {"A", "b", "c", "d", "e", "f", "g", "h"}
