"""`hf-hotspa inspect` and `verify`: what they print, and their exit codes."""

import argparse
import json

import pytest

from hf_hotspa.checkpoint.format.folder import RunFolder
from hf_hotspa.commands.checkpoint_files import DAMAGED, add_parsers
from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError
from tests.checkpoints import write_checkpoint


def command(*words):
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args([str(word) for word in words])
    return args.answer(args) or 0


@pytest.fixture
def output(tmp_path):
    folder = RunFolder(tmp_path / "out")
    write_checkpoint(folder, 5)
    write_checkpoint(folder, 10)
    folder.unlock()
    return tmp_path / "out"


def test_inspect(output, capsys):
    assert command("inspect", output) == 0
    text = capsys.readouterr().out
    assert [line.split()[:4] for line in text.splitlines()] == [
        ["checkpoint", "step", "ranks", "strategies"],
        ["checkpoint-5", "5", "2", "dp2:8@8"],
        ["checkpoint-10", "10", "2", "dp2:8@8"],
    ]
    assert command("inspect", output / "checkpoint-5") == 0
    text = capsys.readouterr().out
    assert "master-rank-00001-of-00002.safetensors" in text
    assert ["exp_avg", "float32", "8", "32"] in [line.split() for line in text.splitlines()]
    assert command("inspect", output, "--json") == 0
    assert [found["step"] for found in json.loads(capsys.readouterr().out)] == [5, 10]


def test_verify(output, capsys):
    assert command("verify", output) == 0
    assert capsys.readouterr().out.count("as they were written") == 2
    file = output / "checkpoint-5" / "hotspa" / "state.json"
    file.write_text(file.read_text().replace("5", "6"))
    assert command("verify", output) == DAMAGED
    done = capsys.readouterr()
    assert "checkpoint-10" in done.out
    assert "'hotspa/state.json' was changed" in done.err
    assert "checkpoint-5" in done.err


def test_what_is_no_checkpoint(output, tmp_path):
    for name in ("verify", "inspect"):
        with pytest.raises(HotspaConfigError, match="holds no checkpoint"):
            command(name, tmp_path / "nothing")
    (output / "checkpoint-5" / "MANIFEST.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError):
        command("inspect", output)
