"""A feature is a folder: what stands outside of it names it less and less."""

from importlib import import_module

import pytest

from hf_hotspa import seam
from tests.contract.features import NAMED, PAGE, naming, page
from tests.contract.layers import ROOT


def test_every_folder_is_on_the_list() -> None:
    folders = {path.parent.name for path in (ROOT / "hf_hotspa" / "features").glob("*/feature.py")}
    assert folders == set(seam.FEATURES)
    assert len(seam.FEATURES) == len(folders)
    assert {*seam.FEATURES} <= NAMED.keys()


@pytest.mark.parametrize("feature", NAMED)
def test_few_files_name_a_feature(feature: str) -> None:
    files = naming(feature)
    assert len(files) <= NAMED[feature].most <= NAMED[feature].at_first, "\n".join(files)


def test_all_features_together_are_named_half_as_often_as_without_the_seam() -> None:
    assert 2 * sum(named.most for named in NAMED.values()) <= sum(named.at_first for named in NAMED.values())


def test_a_feature_defines_hooks_and_no_more_than_eight_exist() -> None:
    assert len(seam.HOOKS) <= 8
    for feature in seam.FEATURES:
        module = import_module(f"hf_hotspa.features.{feature}.feature")
        assert any(hasattr(module, name) for name in seam.HOOKS), feature


def test_a_hook_has_more_than_one_user() -> None:
    for name in seam.HOOKS:
        assert len(seam.hooks(name)) > 1, f"the hook {name} has {len(seam.hooks(name))} users, and needs two"


def test_the_page_of_features_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.contract.features"


def test_settings_are_named_by_their_folder() -> None:
    from hf_hotspa.features.dropout.mode import Noise

    named = seam.by_name((Noise(5.0),))
    assert named.keys() == set(seam.FEATURES)
    assert [name for name, settings in named.items() if settings is not None] == ["dropout"]
    assert seam.settings((Noise(5.0),), Noise) == Noise(5.0)
    assert seam.settings((), Noise) is None
