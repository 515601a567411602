"""`hf-hotspa env`: what a problem report needs, and nothing that is secret."""

import json
import os
from pathlib import Path

import pytest

from hf_hotspa.cli import main
from hf_hotspa.versions import version_of


def of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["env", *flags]) == 0
    return capsys.readouterr().out


def test_releases_and_variables_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO\x1b[31m")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    text = of(capsys)
    assert "secret" not in text
    assert "\x1b" not in text
    assert f"torch         {version_of('torch')}" in text
    values = json.loads(of(capsys, "--json"))
    assert set(values) == {"machine", "releases", "cards", "variables"}
    assert values["releases"]["hf-hotspa"] == version_of("hf-hotspa")
    assert values["variables"]["NCCL_DEBUG"] == "INFO\x1b[31m"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 580.95'; echo 'NVIDIA L4, 23034 MiB, 580.95'", ["NVIDIA H100, 81559 MiB, 580.95", "NVIDIA L4"]),
        ("echo 'no driver' >&2; exit 9", ["nvidia-smi failed", "exit status 9"]),
        (None, ["no nvidia-smi"]),
    ],
)  # fmt: skip
def test_cards(
    body: str | None, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if body is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/bin"]) if body else str(tmp_path))
    text = of(capsys)
    assert all(part in text for part in expected)
