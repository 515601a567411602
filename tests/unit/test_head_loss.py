"""The loss in chunks of tokens: the same numbers, and never the logits of more than a chunk."""

import pytest
import torch

from hf_hotspa.parallel.head_loss import Tail, chunked_loss, chunks_of_sequences, chunks_of_tokens
from hf_hotspa.parallel.loss import vocab_parallel_log_probabilities
from tests.families import tiny_model

TOKENS = 23


def cross_entropy(logits, labels):
    return vocab_parallel_log_probabilities(logits, labels).sum(dtype=torch.float64) * -0.25


def one(model, ids, labels, chunk=None):
    """Loss and gradients of the model as it is, or in chunks; and how many tokens the head was given at a time."""
    model.zero_grad()
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    if chunk is None:
        loss = cross_entropy(model(input_ids=ids, use_cache=False).logits[0], labels)
    else:
        tail = Tail(model, model.base_model_prefix, "lm_head")
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state

        def run(part, tokens):
            return cross_entropy(tail(part, {}), labels[tokens])

        loss = chunked_loss(run, hidden, tail.parameters, chunks_of_tokens(TOKENS, chunk))
    (3 * loss).backward()
    hook.remove()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}, seen


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 100])
@pytest.mark.parametrize("family", ["llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps"])
def test_loss_and_gradients_are_those_of_all_tokens_at_once(family, chunk):
    model = tiny_model(family, torch.float64)
    ids = torch.randint(3, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    labels = ids[0].roll(-1)
    labels[5] = -100
    (loss, gradients, whole), (in_chunks, found, seen) = one(model, ids, labels), one(model, ids, labels, chunk)
    assert in_chunks == pytest.approx(loss, rel=1e-13)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)
    assert whole == [TOKENS]
    assert max(seen) == min(chunk, TOKENS)
    assert sum(seen) == TOKENS


def test_chunks_of_whole_sequences():
    assert chunks_of_sequences((3, 4, 9, 1, 2), 8) == [slice(0, 7), slice(7, 16), slice(16, 19)]
    assert chunks_of_sequences((5,), 2) == [slice(0, 5)]
