"""What papers reckon of a GPT: N21 is Narayanan et al. (SC'21), K22 Korthikanti et al. (2022)."""


def gpt_parameters(num_layers: int, hidden_size: int, vocab_size: int = 0, positions: int = 0) -> int:
    """Parameters of a GPT: `12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)` (N21 equation 2)."""
    return 12 * num_layers * hidden_size**2 + 13 * num_layers * hidden_size + (vocab_size + positions) * hidden_size


def gpt_activation_bytes(num_tokens: int, hidden_size: int, tp: int = 1, *, sequence_parallel: bool = False) -> float:
    """16-bit activations of one GPT layer without attention scores (flash attention): `s b h (10 + 24 / t)`.

    With sequence parallelism `34 s b h / t` (K22 equations 2 and 4 without their last term).
    """
    replicated = 10 / tp if sequence_parallel else 10
    return num_tokens * hidden_size * (replicated + 24 / tp)
