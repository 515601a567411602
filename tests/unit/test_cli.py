"""`hf-hotspa plan` and `estimate`: answers, machine-readable answers, what they import, and what they refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_hotspa.checkpoint.format.folder import RunFolder
from hf_hotspa.cli import main
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import PLANNED_SHARE
from hf_hotspa.costs.model_config import FAMILIES_FILE, load_model, model_from
from hf_hotspa.errors import ModelError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.search.histogram import Counts
from hf_hotspa.strategy import parse_buckets
from tests.checkpoints import write_checkpoint
from tests.contract.layers import ROOT
from tests.families import FAMILIES, tiny_config, tiny_model
from tests.family_table import facts_of, family_table, render
from tests.run_logs import write_run

PLAN_7B = ["plan", "--model", "llama2-7b", "--nodes", "1x8", "--hardware", "a800-80g", "--lengths", "commoncrawl"]
HEAVY = ("torch", "transformers", "accelerate", "datasets", "matplotlib", "rich")


def replaced(**changes: str) -> list[str]:
    """The 7B plan with other values."""
    args = list(PLAN_7B)
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if flag in args:
            args[args.index(flag) + 1] = value
        else:
            args += [flag, value]
    return args


def answer(capsys: pytest.CaptureFixture[str], args: list[str]) -> dict[str, Any]:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hf-hotspa: HSP-")
    assert captured.err.count("\n") == 1
    return captured.err


# ---------------------------------------------------------------------------------------------------------- the models


def test_the_family_table_is_what_the_generator_gives() -> None:
    """Of the config classes; what it holds of models is checked in test_planner_families.py."""
    text = FAMILIES_FILE.read_text()
    assert text == render(family_table(facts_of(json.loads(text)))), "run: python -m tests.family_table"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_gives_the_shape_of_the_model(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    found, exact = load_model(tmp_path).shape, describe_model(tiny_model(family)).shape
    # biases and extra norms, which are much of a layer only in tiny models
    assert found.layer_parameters == pytest.approx(exact.layer_parameters, rel=0.05)
    # a config does not say what its layers do with windows and caps, and no plan has a ring of its own accord
    unknown = {"layer_parameters": 0, "ring_unsupported_reason": None}
    assert vars(found) | unknown == vars(exact) | unknown
    assert load_model(tmp_path).tied == tiny_config(family).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llamma"}, "did you mean llama"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_attention_heads": True}, "instead of a positive integer"),
        ({"num_hidden_layers": 10**9}, "impossible"),
        ({"intermediate_size": "wide"}, "instead of a positive integer"),
        ({"kv_lora_rank": 512}, "cannot be counted"),
    ],
)
def test_impossible_configs(changes: dict[str, Any], message: str) -> None:
    good = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9}
    assert model_from(good, "good", "here").shape.num_key_value_heads == 4
    with pytest.raises(ModelError, match=message):
        model_from({**good, **changes}, "bad", "here")


# ------------------------------------------------------------------------------------------------------------- answers


def test_plans(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, [*PLAN_7B, "--sequence-parallel"])
    buckets = parse_buckets(found["hotspa_strategies"])
    world_size = found["nodes"] * found["devices_per_node"]
    assert all(bucket.strategy.world_size == world_size for bucket in buckets)
    assert buckets[-1].longest == 32768
    assert found["seconds"] <= found["static"]["seconds"]
    assert found["switches"] == (len(buckets) > 1)
    assert found["seconds"] == pytest.approx(
        sum(b["compute_seconds"] + b["switch_seconds"] for b in found["buckets"]), rel=1e-9
    )
    for bucket in found["buckets"]:
        parts = {k: v for k, v in bucket["memory"].items() if k not in ("total", "stage", "in_flight", "held_tokens")}
        assert sum(parts.values()) == pytest.approx(bucket["memory"]["total"])
        assert bucket["memory"]["total"] <= found["limit_bytes"]
    assert all(bucket.strategy.sp == (bucket.strategy.tp > 1) for bucket in buckets)


def test_plans_leave_a_tenth_of_a_device_free_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The rule of `auto`, for the plan, the static strategy and the baselines beside it, and for an estimate."""
    memory = load_hardware("a800-80g").device.memory_bytes
    found = answer(capsys, PLAN_7B)
    assert found["limit_bytes"] == int(PLANNED_SHARE * memory) >> 20 << 20
    held = [bucket["memory"]["total"] for bucket in found["buckets"]]
    held += [each["memory_bytes"] for each in found["baselines"] if each["fits"]]
    assert 0.8 * memory < max(held) <= found["limit_bytes"]
    assert main(PLAN_7B) == 0
    said = "memory limit of a device: 71.41 GiB, 90% of 79.35 GiB (--memory-limit)\n"
    assert said in capsys.readouterr().out
    estimate = ["estimate", *PLAN_7B[1:7], "--strategy", "dp4tp2", "--pack-tokens", "8192"]
    assert main(estimate) == 0
    assert said in capsys.readouterr().out
    largest = answer(capsys, estimate)["largest_pack_tokens"]
    assert main([*estimate, "--memory-limit", "79GiB"]) == 0
    assert "of a device: 79.00 GiB, as given\n" in capsys.readouterr().out
    assert answer(capsys, [*estimate, "--memory-limit", "79GiB"])["largest_pack_tokens"] > largest
    given = answer(capsys, replaced(memory_limit="79GiB"))
    assert found["limit_bytes"] < max(bucket["memory"]["total"] for bucket in given["buckets"]) <= 79 << 30


def test_lengths_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    Counts.of([100] * 900 + [5000] * 10).save(file)
    found = answer(capsys, replaced(lengths=str(file), nodes="1x2"))
    assert found["lengths"] == {"source": str(file), "count": 910, "longest": 5000}
    assert answer(capsys, replaced(lengths=str(file), longest="8000", nodes="1x2"))["lengths"]["longest"] == 8000
    assert "10 of 910 lengths are above" in refusal(capsys, replaced(lengths=str(file), longest="4096"))


def test_positions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_config("llama_uneven").save_pretrained(tmp_path)
    args = replaced(model=str(tmp_path), nodes="1x2")
    found = answer(capsys, args)
    assert found["lengths"]["longest"] == 256
    assert found["notes"] == []
    assert "256 positions" in answer(capsys, [*args, "--longest", "300"])["notes"][0]


def test_the_optimizer_decides_what_is_kept_and_so_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = ["estimate", *PLAN_7B[1:7], "--strategy", "dp4tp2", "--pack-tokens", "8192"]
    usual, kept = (answer(capsys, [*estimate, "--optim", optim]) for optim in ("adamw_torch", "adamw_torch_4bit"))
    ratio = (1 + 8 / 256) / 8  # of each optimizer: test_cost_memory.py
    assert kept["memory"]["optimizer"] == pytest.approx(usual["memory"]["optimizer"] * ratio, rel=1e-3)
    assert kept["optim"] == "adamw_torch_4bit"
    plan = replaced(longest="4096", max_buckets="1")
    planned, usual = (answer(capsys, [*plan, "--optim", optim]) for optim in ("adamw_8bit", "adamw_torch"))
    assert planned["buckets"][0]["memory"]["optimizer"] < usual["buckets"][0]["memory"]["optimizer"] / 3


def test_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["estimate", "--model", "llama2-32b", "--nodes", "4x8", "--strategy", "dp4tp2pp4", "--pack-tokens"]
    free = answer(capsys, [*args, "2048"])
    assert free["largest_pack_tokens"] is None
    limited = answer(capsys, [*args, "2048", "--memory-limit", "75GiB"])
    most = limited["largest_pack_tokens"]
    assert limited["memory"] == free["memory"]
    at_most = answer(capsys, [*args, str(most), "--memory-limit", "75GiB"])
    assert at_most["fits"]
    assert at_most["memory"]["total"] <= 75 * 2**30
    message = refusal(capsys, [*args, str(most + 1), "--memory-limit", "75GiB"])
    assert f"packs of at most {most} tokens" in message
    assert main([*args, "1024", "--hardware", "a800-80g"]) == 0
    assert "Largest pack that fits" in capsys.readouterr().out


def test_an_estimate_lists_the_longest_sequence_of_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["estimate", "--model", "llama2-7b", "--nodes", "1x8", "--strategy", "dp2tp4", "--pack-tokens", "4096"]
    assert answer(capsys, args)["longest_sequences"] == []
    args += ["--hardware", "a800-80g"]
    found = answer(capsys, args)
    longest = {each["strategy"]: each["tokens"] for each in found["longest_sequences"]}
    assert longest["dp2tp4"] == found["largest_pack_tokens"]
    assert {name.partition("+")[0] for name in longest} == {"dp2tp4", "dp8", "tp8", "cp8", "pp8"}
    assert all("+sp" in name for name in longest if "tp8" in name)
    of_way = [*args[:6], "cp8", "--hardware", "a800-80g", "--pack-tokens"]
    assert answer(capsys, [*of_way, str(longest["cp8"])])["fits"]  # and one token more does not
    assert "needs" in refusal(capsys, [*of_way, str(longest["cp8"] + 1)])
    by_way = [tokens for name, tokens in longest.items() if name.startswith("dp2tp4")]
    assert by_way[0] < by_way[1] < by_way[3]  # plain, +rc, chunks in host memory
    assert main(args) == 0
    text = capsys.readouterr().out
    assert all(name in text and f"{tokens:,}" in text for name, tokens in longest.items())


# -------------------------------------------------------------------------------------------------------- bad input


def test_a_plot_whose_file_is_looked_at_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "no" / "such" / "x.svg"
    chosen = answer(capsys, replaced(plot=str(file)))["hotspa_strategies"]
    assert all(f"{bucket.strategy} to {bucket.longest}" in file.read_text() for bucket in parse_buckets(chosen))
    (tmp_path / "a.svg").mkdir()
    for path, reason in ((file / "x.svg", "Not a directory|File exists"), (tmp_path / "a.svg", "Is a directory")):
        message = refusal(capsys, replaced(model="no such model", plot=str(path)))
        assert re.search(f"--plot {path} cannot be written: ({reason})", message)
    assert "end its name in .svg" in refusal(capsys, replaced(plot=str(tmp_path / "plot.png")))


def damaged(flag: str, name: str, contents: tuple[str, ...]) -> list[Any]:
    return [(flag, name, content) for content in contents]


@pytest.mark.parametrize(
    ("flag", "name", "content"),
    [
        *damaged("hardware", "deep.yaml", ("[" * 3000, "a: 2020-99-99", "\xff", "a: [1", "- 1")),
        *damaged("model", "config.json", ("{", "[]", '{"model_type": "llama"}', "\xff\xfe", "[" * 100_000)),
        *damaged("lengths", "lengths.json", ("{", "[]", '{"counts": {}}', "\xff\xfe", "[" * 1000)),
    ],
    ids=lambda value: value[:9],
)
def test_damaged_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    assert str(tmp_path / name) in refusal(capsys, replaced(**{flag: str(tmp_path / name)}))


EVIL = "\x1b]0;title\x07\x1b[2J\x9b5m\u202e"


def test_nothing_from_a_file_acts_on_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"run{EVIL}"
    write_run(folder)
    record = next(folder.rglob("*.jsonl"))
    record.write_text(record.read_text().replace('"dp2"', '"\\u001b[2J\\u009b1m"'))
    (tmp_path / "counts.json").write_text(
        json.dumps({"kind": "hf_hotspa length histogram", "schema_version": 1, "source": EVIL, "counts": {EVIL: 1}})
    )
    for terminal in (False, True):
        monkeypatch.setattr("hf_hotspa.reporting.terminal.is_terminal", lambda terminal=terminal: terminal)
        for command in (
            ["report", str(folder)], ["compare", str(folder), str(folder)], ["inspect", str(folder)],
            ["verify", str(folder)], replaced(lengths=str(tmp_path / "counts.json")), replaced(model=str(folder)),
        ):  # fmt: skip
            main(command)
            said = "".join(capsys.readouterr())
            drawn = re.sub("\x1b\\[[0-9;]*m", "", said) if terminal and command[0] in ("report", "compare") else said
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", drawn), (command, drawn)
    for command in ([EVIL], ["plan", f"--{EVIL}"], ["verify", str(folder), EVIL]):
        with pytest.raises(SystemExit):
            main(command)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", capsys.readouterr().err), command


def test_a_model_of_the_hub_is_read_from_the_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as the hub's client lays it out: refs, and a snapshot of the commit; only the config is there."""
    from huggingface_hub import constants, file_download

    repository = tmp_path / "models--lab--some-7b"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    preset = ROOT / "hf_hotspa" / "costs" / "models" / "llama2-7b.json"
    (snapshot / "config.json").write_text(preset.read_text())
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path), raising=False)
    of_hub = answer(capsys, replaced(model="lab/some-7b"))
    assert of_hub.pop("model") == {**answer(capsys, PLAN_7B)["model"], "name": "lab/some-7b"}
    message = refusal(capsys, replaced(model="lab/other"))
    assert "HF_HUB_OFFLINE is set" in message
    assert str(tmp_path) in message
    assert "hf download lab/other config.json --local-dir FOLDER" in message


def test_a_hub_that_does_not_answer_is_said_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the client's retries, which take half a minute."""
    import huggingface_hub

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", pytest.fail)
    message = refusal(capsys, replaced(model="lab/other"))
    assert "cannot be asked for 'lab/other': ConnectionError: Name or service not known" in message


def test_machines_are_listed_and_printed_to_be_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["hardware"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^l40s-48g +45.0 +362 +864 +32 +1 x 100$", listed, re.MULTILINE), listed
    assert main(["hardware", "L40S"]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out.replace("46068MiB", "30000MiB"))
    found = answer(capsys, replaced(hardware=str(mine), longest="4096"))
    assert found["limit_bytes"] == 27_000 << 20
    assert found["hardware"] == "l40s-48g-own"
    assert "did you mean" in refusal(capsys, ["hardware", "l50s"])


# -------------------------------------------------------------------------------------------------------- a cold start


def test_a_cold_start_leaves_torch_out(tmp_path: Path) -> None:
    run, plan = (
        str(tmp_path / "run"),
        [*replaced(model="llama2-32b", nodes="4x8", lengths="github"), "--sequence-parallel"],
    )
    write_run(Path(run))
    saving = RunFolder(tmp_path / "out")
    checkpoint = str(write_checkpoint(saving, 3))
    saving.unlock()
    commands = [
        [], ["env"], ["report", run], ["compare", run, run], ["inspect", checkpoint], ["verify", checkpoint], ["train", "--help"],
        ["formulas", "llama2-7b", "--nodes", "4x8"], [*plan, "--json"],
    ]  # fmt: skip
    code = f"""
import sys
from hf_hotspa.cli import main
codes = [main(command) for command in {commands!r}]
print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(any(codes[1:]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "", f"imported: {done.stderr}"
    help_text, _, planned = done.stdout.partition("{\n")
    assert help_text.count("hf-hotspa train --model Qwen/Qwen3-0.6B --dataset my.jsonl") >= 2
    assert '"kind": "hf_hotspa plan"' in planned


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A bare percent sign in a help text ends `--help` with a traceback."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    # a name each line; of train and run tests/unit/test_train_command.py and test_front.py have their own
    commands = [name for name in re.findall(r"^    ([a-z]+)\b", text, re.MULTILINE) if name not in ("train", "run")]
    assert len(commands) > 8
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert f"hf-hotspa {command}" in capsys.readouterr().out
