"""What names each feature outside of its folder, and the page of features: `python -m tests.contract.features` rewrites it.

The page, docs/features.md, is made from `hf_hotspa.seam`: each feature, its hooks and its folder.
"""

import ast
import re
from importlib import import_module
from typing import NamedTuple

from hf_hotspa.seam import FEATURES, HOOKS
from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files

PAGE = ROOT / "docs" / "features.md"


class Named(NamedTuple):
    """How files name a feature (in any case); how many of all files did before there was a seam (commit 343786a2); and how
    many outside of its folder may, which may only fall. `same_words`: a feature whose folder names the same libraries."""

    pattern: str
    at_first: int
    most: int
    same_words: str = ""


NAMED = {
    "pipedream": Named(r"pipe_?dream", 17, 1),
    "four_bit": Named(
        r"four_?bits?|(?<!\d)4[- ]bits?\b(?! (optim|state))|four bits|\bnf4\b|\bfp4\b|linear4bit|in_4bit", 23, 1
    ),
    "eight_bit": Named(
        r"eight_?bit|8[- ]bits?\b(?!.{0,12}(optim|state|and 4-bit))|linear8bit|int8params|int8tensor|load_in_8bit|"
        r"llm_?int8(?!_skip)|int8_?weight",
        0,
        0,
    ),
    "low_bit_optimizers": Named(r"low_?bit|8[- ]?bit|torchao", 13, 2, "eight_bit"),
    "slow_devices": Named(r"straggl|slow[ _-]?(device|rank)|flexible", 33, 5),
    "lora": Named(r"\blora|(?<!kv_)lora_|adapter|\bpeft", 54, 38),  # `kv_lora_rank` is of latent attention
    # that a model has experts, and where they are, is placement
    "experts": Named(
        r"expert_?parallel|expert_?capacit|capacity of experts|router_?loss|balance loss|router_?layer|record_routers|"
        r"recordable_routers|chunkrouters|dropped_tokens|expert_tokens",
        20,
        7,
    ),
    "token_chunks": Named(r"token_?chunk|\+ck|\+kg|\+kh|\.ck\b|\.kh\b|\.kg\b|chunks? of tokens|ck_unsupported", 27, 19),
    "dropout": Named(r"drop_?out|neftune|embedding_?noise", 20, 19),
    "isolation": Named(r"isolat|delta_?net|mixes_packed", 11, 4),
    # the core knows that tokens may be read in another way than by a vocabulary's head (`Readout`), not how
    "heads": Named(r"\btoken_?heads|classification|reward_?model|\bvalue_?head", 0, 0),
    # nor what enters beside tokens (`SideInputs`)
    "images": Named(r"pixel_values|picture_?replica|image_token|\bvision|image features", 0, 0),
}
"""By the feature's folder."""

_LIST = re.compile(r"^FEATURES = \([^)]*\)", re.MULTILINE)


def naming(feature: str) -> list[str]:
    """The files outside of a feature's folder that name it. The one line of the list does not count."""
    files = source_files(*PACKAGE_FOLDERS)
    own = tuple(f"hf_hotspa/features/{name}/" for name in (feature, NAMED[feature].same_words) if name)
    outside = (file for file in files if not file.startswith(own))
    pattern = re.compile(NAMED[feature].pattern, re.IGNORECASE)
    return [file for file in outside if pattern.search(_LIST.sub("", (ROOT / file).read_text()))]


def page() -> str:
    lines = [
        "# Features",
        "",
        "A feature is a folder behind the seam (`hf_hotspa/seam.py`): the core asks for hooks and names no feature. [Adding a feature](adding.md)",
        "shows how one is made. This page is made from the code: `python -m tests.contract.features`.",
        "",
        "| feature | folder | hooks |",
        "|---|---|---|",
    ]
    for feature in FEATURES:
        module = import_module(f"hf_hotspa.features.{feature}.feature")
        text = (
            ast.get_docstring(ast.parse((ROOT / f"hf_hotspa/features/{feature}/feature.py").read_text())) or ""
        ).splitlines()[0]
        hooks = ", ".join(f"`{name}`" for name in HOOKS if hasattr(module, name))
        lines.append(f"| {text.rstrip('.')} | `hf_hotspa/features/{feature}/` | {hooks} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
