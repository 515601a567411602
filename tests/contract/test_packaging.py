"""What is installed: the packages, the types, the pins, the lazy public names, and a source tree without installation."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_hotspa.versions import TRAIN_LIBRARIES, TRIED
from tests.contract.layers import PACKAGE_FOLDERS, ROOT, source_files
from tests.oldest import TESTS, oldest, tools


def _setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _python(code: str, cwd: Path, *flags: str, **env: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pyproject_holds_no_metadata() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "project" not in table, "the metadata is in setup.cfg; a [project] table overrides it"
    assert table["build-system"]["build-backend"] == "setuptools.build_meta"


def test_the_installed_version_is_this_one() -> None:
    assert version("hf-hotspa") == _python("import hf_hotspa; print(hf_hotspa.__version__)", ROOT), "run: make install"


def test_pins_satisfy_the_ranges() -> None:
    pins = {}
    for line in _lines((ROOT / "constraints.txt").read_text()):
        if not line.startswith("#"):
            name, _, pinned = line.partition("==")
            assert re.fullmatch(r"[0-9][0-9.]*", pinned), f"not an exact pin: {line}"
            pins[name] = Version(pinned)
    config = _setup_cfg()
    extras = [line for extra in config["options.extras_require"].values() for line in _lines(extra)]
    for line in [*_lines(config["options"]["install_requires"]), *extras]:
        requirement = Requirement(line)
        assert requirement.name in pins, f"{requirement.name} has no pin in constraints.txt"
        assert pins[requirement.name] in requirement.specifier, f"the pin of {requirement.name} is outside {line}"
    assert sys.version_info >= tuple(map(int, config["options"]["python_requires"].removeprefix(">=").split(".")))


def test_the_light_installation_brings_nothing_that_trains() -> None:
    config = _setup_cfg()
    base = {Requirement(line).name for line in _lines(config["options"]["install_requires"])}
    train = [Requirement(line) for line in _lines(config["options.extras_require"]["train"])]
    assert base.isdisjoint({*TRAIN_LIBRARIES, "peft", "trl"})
    assert [requirement.name for requirement in train] == list(TRAIN_LIBRARIES)
    # an upper end would put an older release in the place of the user's without a word
    assert all({s.operator for s in requirement.specifier} == {">="} for requirement in train)
    assert "-e '.[train," in (ROOT / "Makefile").read_text()


def test_tests_run_with_the_pinned_versions() -> None:
    pins = dict(re.findall(r"^(torch|transformers|accelerate|datasets)==(\S+)$", _constraints(), re.MULTILINE))
    assert {name: version(name).partition("+")[0] for name in pins} == pins
    assert len(pins) == 4


def test_the_oldest_releases_are_those_of_the_ranges_and_of_the_page() -> None:
    """What `make test-oldest` installs is the lower end of every range, and docs/releasing.md names the same."""
    page = (ROOT / "docs" / "releasing.md").read_text()
    config = _setup_cfg()
    extras = config["options.extras_require"]
    wanted = _lines(extras["train"]) + _lines(config["options"]["install_requires"]) + _lines(extras["peft"])
    assert len(oldest()) == len(wanted)
    for line, pin in zip(wanted, oldest(), strict=True):
        requirement, lowest = Requirement(line), Version(pin.partition("==")[2])
        assert pin.startswith(f"{requirement.name}==")
        assert lowest in requirement.specifier
        if requirement.name in ("torch", "transformers", "accelerate", "datasets", "peft"):
            (above,) = (s.version for s in SpecifierSet(TRIED[requirement.name]) if s.operator == "<")
            assert f">={lowest}" in TRIED[requirement.name]
            assert re.search(rf"\| {requirement.name} \| {lowest}[^|]*\| [^|]+\| {re.escape(above)} \|", page), (
                requirement.name
            )
    for place in TESTS:
        file, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), place
    assert all("==" in tool for tool in tools())


def _constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, without network; needs setuptools 77 in the environment."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools>=77: make install brings it")
    tree = tmp_path_factory.mktemp("tree")
    for folder in PACKAGE_FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w"]
    done = subprocess.run([*command, tree / "dist", tree], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [built] = (tree / "dist").iterdir()
    return built


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"hf_hotspa/{file}" if file.startswith(("trainer/", "callbacks/")) else file
        for file in source_files(*PACKAGE_FOLDERS)
    }
    assert {name for name in names if name.endswith(".py")} == expected
    data = ["hf_hotspa/py.typed", "hf_hotspa/costs/families.json"]
    data += [f"hf_hotspa/reporting/{name}" for name in ("chart.css", "page.css", "page.html", "page.js")]
    data += [f"hf_hotspa/costs/models/llama2-{size}.json" for size in ("7b", "13b", "32b")]
    assert set(data) <= set(names)
    [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
    assert "hf-hotspa = hf_hotspa.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    assert {name.partition("/")[0] for name in names} == {
        "hf_hotspa",
        f"hf_hotspa-{wheel.name.split('-')[1]}.dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import hf_hotspa.trainer as t; print(t.__file__)"
    )
    assert _python(code, tmp_path, "-S") == str(tmp_path / "site" / "hf_hotspa" / "trainer" / "__init__.py")


def test_a_source_tree_needs_no_installation(tmp_path: Path) -> None:
    """It knows its version, too, which calibrations and checkpoints name; and its finder answers for nothing else."""
    code = """
import hf_hotspa, sys
from hf_hotspa._source_tree import SourceTreeFinder, install
from hf_hotspa.versions import version_of
assert version_of("hf-hotspa") == hf_hotspa.__version__ and version_of("no-such") is None
assert sys.meta_path.count(SourceTreeFinder) == 1 and install() and sys.meta_path.count(SourceTreeFinder) == 1
for name in ("trainer", "hf_hotspa.errors", "hf_hotspa.none", "other.trainer", "hf_hotspa.trainer.trainer"):
    assert SourceTreeFinder.find_spec(name) is None, name
import hf_hotspa.trainer as t, hf_hotspa.callbacks as c
print(t.__file__, t.__spec__.name, c.__file__, c.__spec__.name)
"""
    expected = " ".join(f"{ROOT / name / '__init__.py'} hf_hotspa.{name}" for name in ("trainer", "callbacks"))
    # -S: without site-packages, so that no installed copy can answer
    assert _python(code, tmp_path, "-S", PYTHONPATH=str(ROOT)) == _python(code, ROOT, "-S") == expected


def test_public_names_exist_and_are_loaded_when_used() -> None:
    code = """
import sys, hf_hotspa
assert set(hf_hotspa.__all__) <= set(dir(hf_hotspa))
assert set(hf_hotspa._HOMES) | {"__version__"} == set(hf_hotspa.__all__)
assert hf_hotspa.Strategy.parse("dp2").dp == 2 and hf_hotspa.parse_buckets("dp2:8") and hf_hotspa.HotspaError
assert "Strategy" in vars(hf_hotspa) and "torch" not in sys.modules
for module in (hf_hotspa, hf_hotspa.trainer, hf_hotspa.callbacks):
    try:
        module.NoSuchName
    except AttributeError as error:
        assert "NoSuchName" in str(error)
    else:
        raise SystemExit("an unknown name was found")
for module in (hf_hotspa, hf_hotspa.trainer, hf_hotspa.callbacks):
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
assert hf_hotspa.HotSPaTrainer is hf_hotspa.trainer.HotSPaTrainer
print("ok")
"""
    assert _python("import hf_hotspa.trainer, hf_hotspa.callbacks\n" + code, ROOT) == "ok"


def test_hosted_checks_are_targets_of_the_makefile() -> None:
    """The workflow, the hooks before a commit and `.ci/run` call what a contributor calls."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    called = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert {command.removeprefix("make ") for command in called} == {"install", "lint", "docs", "test"} <= targets
    of_ci = re.findall(r"^make ([a-z]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(of_ci) == {"install", "lint", "docs", "test"}
    oldest = SpecifierSet(_setup_cfg()["options"]["python_requires"])
    assert all(python in oldest for python in workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    for hook in hooks:
        command = hook["entry"].removeprefix(".venv/bin/").removeprefix("make ")
        assert command.split()[0] in lint + "lint"
