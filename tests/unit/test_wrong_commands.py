"""Wrong command lines: each is answered by one line that says what was probably meant."""

import re
from pathlib import Path

import pytest

from hf_hotspa.cli import main
from hf_hotspa.costs import model_config

PLAN = ["plan", "--model", "llama2-7b", "--gpus", "2xh100-80g", "--lengths", "commoncrawl", "--longest", "4096"]


def changed(flag: str, value: str) -> list[str]:
    words = list(PLAN)
    words[words.index(flag) + 1] = value
    return words


def estimate(strategy: str, tokens: str) -> list[str]:
    return ["estimate", *PLAN[1:3], "--nodes", "4x8", "--strategy", strategy, "--pack-tokens", tokens]


WRONG = [
    (["plam"], "there is no command plam: did you mean plan?"),
    (["convert"], "there is no command convert: use one of .*plan"),
    ([*PLAN, "--mini-bach", "8"], "there is no flag --mini-bach; did you mean --mini-batch?"),
    ([*PLAN, "--long", "8"], "there is no flag --long"),  # no abbreviations: their meaning changes with new flags
    ([*PLAN, "-x"], "there is no flag -x"),
    ([*PLAN[:1], *PLAN[3:]], "are required: --model"),
    (["plan", "--model", "llama2-7b", "--lengths", "github"], "--gpus --hardware --calibration is required"),
    ([*PLAN, "--task", "stf"], "--task: invalid choice: 'stf' .*'sft'"),
    ([*PLAN, "--optim", "muon"], "--optim: invalid choice: 'muon'"),
    ([*PLAN, "--max-buckets", "many"], "--max-buckets: 'many' is not a whole number"),
    ([*PLAN, "--max-buckets", "1" * 5000], "'1{30}.* is not a whole number of at least 1 and at most [0-9]+"),
    ([*PLAN, "--mini-batch", "0"], "--mini-batch: '0' is not a whole number of at least 1"),
    (changed("--longest", "-1"), "--longest: '-1' is not a whole number"),
    (changed("--longest", str(10**15)), f"--longest: '{10**15}' is not a whole number"),
    (
        changed("--longest", "10000000"),
        "no strategy holds a sequence of 10000000.*--longest [0-9]+ --overlong truncate",
    ),
    ([*PLAN, "--memory-limit", "lots"], "70GiB"),
    ([*PLAN, "--memory-limit", "500GiB"], "more than the 79.* GiB of a device"),
    ([*PLAN, "--memory-limit", "10GiB"], "no strategy holds.*Fix: --lora 16"),
    ([*PLAN, "--dtype", "int4"], "no size is known for dtype 'int4'"),
    ([*PLAN, "--dtype", "float64"], "no peak speed for 'float64'"),
    (estimate("dp4tp2", "100"), "it needs 8 processes and 32 are running"),
    (estimate("tp128", "100"), "legal with 32 processes"),
    (estimate("nonsense", "100"), "is not a strategy"),
    (estimate("cp32+ck1024+kh", "8192"), r"keys and values in host memory \(\+kh\) with cp"),
    (estimate("cp32", "16"), "packs of 16 tokens, and cp32 divides them over 32 ranks"),
    (changed("--gpus", "8"), "--gpus '8' names no kind of GPU.*Fix: give --gpus 8xh100"),
    (changed("--gpus", "8xh1000"), "no machine with the name 'h1000'.*did you mean h100"),
    (changed("--gpus", "2xrtx409"), "no machine with the name 'rtx409'.*did you mean 4090"),
    (changed("--gpus", "0xh100-80g"), "not a cluster"),
    (changed("--gpus", "1000x1000xh100-80g"), "at most 32768 devices"),
    (changed("--model", "qwen3-8"), "no model preset and no config file 'qwen3-8'.*did you mean .*qwen3-8b"),
    (changed("--model", "x" * 5000), "File name too long|no model preset"),
    (changed("--model", "Qwen/Qwen3-8"), "did you mean .*Qwen/Qwen3-8B"),
    (changed("--model", "unsloth/Qwen3-8B-GGUF"), "is a GGUF model, which cannot be trained.*Fix: name the original"),
    (changed("--lengths", "comoncrawl"), "no length distribution 'comoncrawl'.*commoncrawl"),
    (changed("--lengths", "missing.json"), "cannot be read: No such file"),
    (["lengths", "--dataset", "{folder}/chat.jsonl"], "no file or directory .*did you mean .*/chats.jsonl"),
    (["lengths", "--dataset", "{folder}/chats.jsnol"], "no file or directory .*did you mean .*/chats.jsonl"),
    (["verify", "{folder}"], "holds no checkpoint"),
    (["report", "{folder}/chats"], "Fix: "),
    (["run", "--stratgies", "dp2", "--", "true"], "there is no flag --stratgies; did you mean --strategies?"),
    (["run", "--", "no-such-program"], "'no-such-program' cannot be started"),
    (["train", "train.py"], "train.py is a program: hf-hotspa run -- python train.py"),
    (["train", "config.yaml"], "hf-hotspa run -- axolotl train config.yaml"),
    (["train", "--mdoel", "m", "--dataset", "d"], "there is no flag --mdoel; did you mean --model?"),
    (["train", "--model", "m-GGUF", "--dataset", "d", "--use-cpu"], "is a GGUF model"),
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words)[-40:] for words, _ in WRONG])
def test_a_wrong_command_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "chats.jsonl").write_text('{"input_ids": [1, 2]}\n')
    try:
        code = main([word.format(folder=tmp_path) for word in words])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capfd.readouterr()
    assert code in (2, 127)
    assert not out
    [line] = [line for line in err.splitlines() if not re.match("[WE][0-9]{4} |Failed to load ", line)]  # torch's own
    assert re.search(said, line), err
    assert line.startswith("hf-hotspa")


def test_flags_have_one_name_in_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Underscores, `hotspa_`, and the name of another command."""
    estimate = ["estimate", "--model", "llama2-7b", "--gpus", "8xh100-80g", "--pack-tokens", "4096"]
    for command, ways in (
        (estimate, ("--strategy dp8+z3", "--strategies dp8+z3", "--hotspa_strategies=dp8+z3")),
        (["formulas"], ("--model llama2-7b --gpus 2x8xa100-80g", "llama2-7b --nodes 2x8 --hardware a100-80g")),
    ):
        answers = set()
        for words in ways:
            assert main([*command, *words.split()]) == 0
            answers.add(capsys.readouterr().out)
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("gpus", "devices", "said"),
    [
        ("4090", "1 x 4090-24g", ""),
        ("rtx4090", "1 x 4090-24g", ""),
        ("2x4090", "2 x 4090-24g", ""),
        ("1x2xRTX-4090", "2 x 4090-24g", ""),
        ("2xH100", "2 x h100-80g", "H100 is read as h100-80g; others: h100-80g-pcie, h100-94g-nvl"),
    ],
)
def test_machines_by_short_names(capsys: pytest.CaptureFixture[str], gpus: str, devices: str, said: str) -> None:
    words = f"estimate --model qwen3-0.6b --gpus {gpus} --strategy dp{devices[0]} --pack-tokens 512"
    assert main(words.split()) == 0
    captured = capsys.readouterr()
    assert devices.split()[-1] in captured.out
    assert captured.err.strip() == (f"hf-hotspa: {said}" if said else "")


def test_the_hub_is_not_asked_for_a_preset(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "hub_file", None)
    assert model_config.load_model("Qwen/qwen3-8B").shape == model_config.load_model("qwen3-8b").shape


def test_cached_models_are_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--acme--Tiny-Llama-9").mkdir()
    assert main(changed("--model", "acme/TinyLlama-9")) == 2
    assert "did you mean acme/Tiny-Llama-9?" in capsys.readouterr().err


def test_the_counts_of_presets() -> None:
    published = {
        "qwen3-0.6b": 0.596e9, "qwen3-4b": 4.02e9, "qwen3-8b": 8.19e9, "qwen3-32b": 32.76e9, "qwen3-30b-a3b": 30.53e9,
        "llama2-7b": 6.74e9, "llama2-13b": 13.02e9, "llama2-32b": 32.5e9, "llama3.1-8b": 8.03e9, "llama3.1-70b": 70.55e9, "mistral-7b": 7.25e9, "gemma3-12b": 11.77e9, "gpt-oss-20b": 20.91e9,
    }  # fmt: skip
    for name, count in published.items():
        model = model_config.load_model(name)
        shape = model.shape
        ends = shape.vocab_size * shape.hidden_size * (1 if model.tied else 2)
        assert shape.num_layers * shape.layer_parameters + ends == pytest.approx(count, rel=0.002), name
    assert published.keys() == {*model_config.preset_names(), "llama2-32b"}
