"""Seeded bugs: one exact change of the source each, and the tests that must notice it.

A bug is applied to a copy of the tree (`Copy`), never to the tree itself. `tests/gloo/test_mutations.py` runs them: the
tests must pass on the unchanged copy and fail, as tests and not at import, on the changed one. A bug that was mended gets
a line here when a test alone would not say what it guards.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1
"""What pytest returns when tests ran and some failed; another code is an error of the run itself."""


class Mutation(NamedTuple):
    """A bug: `old`, which occurs once in `file` (as it is installed), becomes `new`, and `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str = "tests/gloo/test_fuzz_faults.py::test_a_fault_is_found_by_a_fuzzer"


ENGINE, UNIT = "tests/gloo/test_engine.py::", "tests/unit/"
HOT = "tests/gloo/test_fuzz.py::test_draws_are_exact_or_refused_by_name[strategies-4]"
CLIP = ENGINE + "test_clipping_counts_tied_weights_once"
ALONE = ENGINE + "test_one_process_runs_the_same_path"
HEADS = "tests/gloo/test_token_heads.py::test_losses_predictions_and_gradients_are_those_of_the_plain_model["
LORA = "tests/gloo/test_lora.py::"
IMAGES = "tests/gloo/test_images.py::test_losses_and_gradients_are_those_of_the_plain_model[2-cases0]"
CALLERS_OF_IMAGES = (
    "tests/gloo/test_images.py::test_callers_may_use_logits_factors_and_several_calls[2-qwen3_vl-dp2:24,tp2:200]"
)

MUTATIONS = [
    # -- rows with images
    Mutation(
        "tokens of images have the positions of text",
        "hf_hotspa/features/images/picture_replica.py",
        "picture is not None and picture.positions is not None",
        "picture is None and picture is not None",
        IMAGES,
    ),
    Mutation(
        "features of deeper layers of the tower are left out",
        "hf_hotspa/features/images/picture_replica.py",
        "if not isinstance(here, _Here):",
        "if True:",
        IMAGES,
    ),
    Mutation(
        "tokens of an image attend as text",
        "hf_hotspa/features/images/picture_replica.py",
        "if blocks:",
        "if not blocks:",
        IMAGES,
    ),
    Mutation(
        "tokens of an image see both ways in layers without a window, too",
        "hf_hotspa/features/images/picture_replica.py",
        "in_windows and call.sliding_window is None",
        "in_windows and call is None",
        IMAGES,
    ),
    Mutation(
        "images side by side are several blocks",
        "hf_hotspa/features/images/pictures.py",
        "self.places.diff() != 1",
        "self.places.diff() != 0",
        IMAGES,
    ),
    Mutation(
        "features are in another order",
        "hf_hotspa/features/images/pictures.py",
        "features.detach().to(",
        "features.detach().flip(1).to(",
        IMAGES,
    ),
    Mutation(
        "gradients of features are not scaled with the others",
        "hf_hotspa/features/images/towers.py",
        "picture.gradient = picture.gradient * factor",
        "picture.gradient = picture.gradient * 1.0",
        CALLERS_OF_IMAGES,
    ),
    Mutation(
        "all ranks of tp add up their gradients of features",
        "hf_hotspa/features/images/pictures.py",
        " or (strategy.coord(rank).tp and not strategy.sp)",
        "",
        CALLERS_OF_IMAGES,
    ),
    Mutation(
        "sequence-parallel ranks do not add up their gradients of features",
        "hf_hotspa/features/images/pictures.py",
        "strategy.coord(rank).tp and not strategy.sp",
        "strategy.coord(rank).tp",
        IMAGES,
    ),
    # -- data
    Mutation(
        "labels are not shifted",
        "hf_hotspa/data/collator.py",
        "whole[sequence.start + 1 : sequence.stop]",
        "whole[sequence.start : sequence.stop - 1]",
        UNIT + "test_collator.py::test_the_tensors_of_a_pack",
    ),
    Mutation(
        "positions do not start anew in a pack",
        "hf_hotspa/data/collator.py",
        "positions_T = np.arange(num_tokens) - np.repeat(starts, lengths)",
        "positions_T = np.arange(num_tokens) - 0 * np.repeat(starts, lengths)",
        UNIT + "test_collator.py::test_the_tensors_of_a_pack",
    ),
    Mutation(
        "a rank runs the packs of another replica",
        "hf_hotspa/data/collator.py",
        "self._replicas[strategy] = strategy.coord(self.rank).dp",
        "self._replicas[strategy] = (strategy.coord(self.rank).dp - 1) % strategy.dp",
        UNIT + "test_collator.py",
    ),
    Mutation(
        "edges of buckets belong to the longer one",
        "hf_hotspa/packing/bucketing.py",
        "bisect_left(edges, sequence.stop - sequence.start)",
        "min(bisect_left(edges, sequence.stop - sequence.start + 1), len(edges) - 1)",
        UNIT + "test_bucketing.py::test_edges_of_buckets_belong_to_the_shorter_one",
    ),
    Mutation(
        "a split loses a token",
        "hf_hotspa/packing/bucketing.py",
        "stop = min(start + longest, end)",
        "stop = min(start + longest, end - 1)",
        UNIT + "test_bucketing.py::test_truncate_split_and_drop",
    ),
    Mutation(
        "packs may be too full",
        "hf_hotspa/packing/bucketing.py",
        "free[number] -= length",
        "free[number] -= length - 1",
        UNIT + "test_packing.py",
    ),
    Mutation(
        "a pipeline ignores how many tokens it may hold",
        "hf_hotspa/packing/pipeline_order.py",
        "ahead = min(most, ahead - stage)",
        "ahead = ahead - stage",
        UNIT + "test_pipeline_order.py",
    ),
    Mutation(
        "padding is not counted in flight",
        "hf_hotspa/packing/pipeline_order.py",
        "if not delays(reaches(padded, most_tokens), num_stages):",
        "if not delays(reaches(tokens, most_tokens), num_stages):",
        UNIT + "test_pipeline_order.py",
    ),
    Mutation(
        "GPipe runs all packs at once",
        "hf_hotspa/packing/pipeline_order.py",
        "if most_tokens is not None and (end + 1 - begin) * longer > most_tokens:",
        "if most_tokens is not None and longer > most_tokens:",
        UNIT + "test_pipeline_order.py",
    ),
    Mutation(
        "every epoch has the same order",
        "hf_hotspa/data/collator.py",
        "self.sampler.set_epoch(epoch)",
        "self.sampler.set_epoch(0)",
        UNIT + "test_batches.py::test_orders",
    ),
    Mutation(
        "rows that ranks do not divide are left out",
        "hf_hotspa/data/collator.py",
        "edges = [start + (stop - start) * rank // self.world_size for",
        "edges = [start + (stop - start) // self.world_size * rank for",
        UNIT + "test_batches.py::test_a_size_that_ranks_do_not_divide",
    ),
    Mutation(
        "the last mini-batch of an epoch is left out",
        "hf_hotspa/data/collator.py",
        "for start, stop in pairwise(edges) if start < rows]",
        "for start, stop in pairwise(edges) if stop <= rows]",
        UNIT + "test_batches.py::test_any_number_of_ranks_and_parts_gives_the_same_mini_batches",
    ),
    Mutation(
        "the second document of a row is predicted from the first",
        "hf_hotspa/data/collator.py",
        "            labels[number, row.cuts] = IGNORED_LABEL",
        "            labels[number, row.cuts[:0]] = IGNORED_LABEL",
        UNIT + "test_batches.py::test_documents_of_a_row_are_told_apart_by_positions",
    ),
    Mutation(
        "a loss mask in another column than the labels is passed over",
        "hf_hotspa/data/collator.py",
        "labels[values == 0] = IGNORED_LABEL",
        "labels[values == 2] = IGNORED_LABEL",
        UNIT + "test_batches.py::test_a_loss_mask_in_another_column_is_honoured",
    ),
    Mutation(
        "a piece of a split row has the positions of the whole",
        "hf_hotspa/data/collator.py",
        "out[number, : stop - first] -= value[row, first].item()",
        "out[number, : stop - first] -= 0",
        UNIT + "test_batches.py::test_batches_of_the_users_are_cut_too",
    ),
    # -- layouts
    Mutation(
        "ranks count dp first",
        "hf_hotspa/strategy.py",
        "return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp",
        "return ((coord.pp * self.cp + coord.cp) * self.tp + coord.tp) * self.dp + coord.dp",
        UNIT + "test_strategy.py::test_ranks_run_tp_first_then_dp_then_pp",
    ),
    Mutation(
        "a cut is off by one item",
        "hf_hotspa/layout/vector.py",
        "first, last = (0, items) if self.replicate else",
        "first, last = (0, items - 1) if self.replicate else",
        UNIT + "test_layout.py",
    ),
    Mutation(
        "tied weights are missing on the last stage",
        "hf_hotspa/layout/placement.py",
        "if in_head and stage != last:",
        "if in_head and stage > last:",
        UNIT + "test_layout.py::test_tied_embeddings_are_held_by_the_first_and_the_last_stage",
    ),
    Mutation(
        "replicated gradients are counted once a shard",
        "hf_hotspa/layout/placement.py",
        "if divided or spec.partial_gradient or strategy.sp or tp == 1:",
        "if divided or spec.partial_gradient or strategy.sp or tp >= 1:",
        UNIT
        + "test_layout.py::test_gradients_of_replicated_parameters_are_counted_once_a_replica_and_those_of_holders_always",
    ),
    Mutation(
        "the master store loses the end of a segment",
        "hf_hotspa/layout/placement.py",
        "ends = np.array([*starts, numel], np.int64)",
        "ends = np.array([*starts, numel - 1], np.int64)",
        UNIT + "test_layout.py",
    ),
    Mutation(
        "shares end inside of blocks of 8-bit states",
        "hf_hotspa/layout/placement.py",
        "MASTER_ALIGNMENT = 256",
        "MASTER_ALIGNMENT = 192",
        UNIT + "test_low_bit.py",
    ),
    Mutation(
        "the size of a share decides whether it is quantized",
        "hf_hotspa/features/low_bit_optimizers/adoption.py",
        "whole = self.wholes[id(share)]",
        "whole = share.numel()",
        UNIT + "test_low_bit.py",
    ),
    Mutation(
        "the head's cost counts on the first stage",
        "hf_hotspa/layout/stages.py",
        "extra = (costs.head if stage == num_stages - 1 else 0)",
        "extra = (costs.head if stage == 0 else 0)",
        UNIT + "test_layout.py::test_a_costly_head_takes_layers_from_the_last_stage",
    ),
    Mutation(
        "masters of bf16 weights are bf16",
        "hf_hotspa/layout/vector.py",
        'return "float64" if dtype == "float64" else "float32"',
        "return dtype",
        ENGINE + "test_bf16_weights_are_the_rounded_masters_and_gradients_are_fp32",
    ),
    Mutation(
        "gradients travel as they accumulate",
        "hf_hotspa/engine/switching.py",
        "options.gradients.moved(dtype)",
        "options.gradients.accumulated(dtype)",
        "tests/gloo/test_gradient_dtypes.py::test_what_each_pair_costs_in_bytes_and_error",
    ),
    Mutation(
        "a recomputed layer drops what the pack of another layer does",
        "hf_hotspa/features/dropout/dropout.py",
        "now, self.pack = self.pack, pack",
        "now = self.pack",
        "tests/gloo/test_dropout.py::test_every_strategy_drops_the_same_elements",
    ),
    Mutation(
        "the second part of a split row drops like the first",
        "hf_hotspa/features/dropout/dropout.py",
        "(begin + micro_batch.position_ids[0])",
        "micro_batch.position_ids[0]",
        UNIT + "test_dropout.py::test_a_token_keeps_its_mask_in_every_pack",
    ),
    # -- switches
    Mutation(
        "contributions are added in another order",
        "hf_hotspa/engine/executor.py",
        "self.adds.sort(key=lambda part: part[0])",
        "self.adds.sort(key=lambda part: -part[0])",
        UNIT + "test_executor_loopback.py::test_contributions_are_added_in_rank_order_with_the_local_one_in_its_place",
    ),
    Mutation(
        "a rank's own contribution is left out",
        "hf_hotspa/engine/executor.py",
        "if accumulate and current.local:",
        "if accumulate and current.local and rank < 0:",
        UNIT + "test_executor_loopback.py::test_contributions_are_added_in_rank_order_with_the_local_one_in_its_place",
    ),
    Mutation(
        "messages of two switches have one tag",
        "hf_hotspa/engine/executor.py",
        "base = (epoch % _EPOCH_TAGS * _ROUND_TAGS",
        "base = (0 * _ROUND_TAGS",
        UNIT + "test_executor_loopback.py::test_messages_of_other_epochs_do_not_match",
    ),
    Mutation(
        "an executor goes on after a failure",
        "hf_hotspa/engine/executor.py",
        "        self._failure = what\n",
        "        self._failure = None\n",
        UNIT + "test_executor_loopback.py::test_a_failure_in_flight_names_the_switch_and_ends_the_executor",
    ),
    Mutation(
        "the most loaded holder sends",
        "hf_hotspa/plan/direct.py",
        "return min(near or holders, key=",
        "return max(near or holders, key=",
        UNIT + "test_planner.py::test_choice_of_sender",
    ),
    # -- computation
    Mutation(
        "the loss is not scaled",
        "hf_hotspa/parallel/head_loss.py",
        "log_probabilities(logits, tokens).sum(dtype=torch.float64) * -scale",
        "-log_probabilities(logits, tokens).sum(dtype=torch.float64)",
        ALONE,
    ),
    Mutation(
        "the gradient of log-probabilities is not that of the loss",
        "hf_hotspa/parallel/loss.py",
        "-grad.to(probability.dtype)",
        "-torch.ones_like(grad).to(probability.dtype)",
        ALONE,
    ),
    Mutation(
        "the mask of labels is lost",
        "hf_hotspa/parallel/loss.py",
        "valid = labels != IGNORE",
        "valid = labels == labels",
        ALONE,
    ),
    Mutation(
        "sequences of a pack attend to each other",
        "hf_hotspa/parallel/attention.py",
        "lengths, outs = pack.lengths, []",
        "lengths, outs = (query.shape[2],), []",
        ALONE,
    ),
    Mutation(
        "the mask of a slice begins at its first key",
        "hf_hotspa/parallel/fused_attention.py",
        "distance = torch.arange(queries.start, queries.stop, device=device)[:, None]",
        "distance = torch.arange(keys.start, keys.start + queries.stop - queries.start, device=device)[:, None]",
        UNIT + "test_fused_attention.py",
    ),
    Mutation(
        "windows of an encoder reach to one side",
        "hf_hotspa/parallel/fused_attention.py",
        "distance = distance.abs()",
        "distance = distance + 0",
        HEADS + "2-cases0]",
    ),
    Mutation(
        "a causal mask is left in an encoder",
        "hf_hotspa/parallel/attention.py",
        'not getattr(module, "is_causal", True),',
        "False,",
        HEADS + "2-cases0]",
    ),
    Mutation(
        "keys and values of a chunk have no gradients of later chunks",
        "hf_hotspa/features/token_chunks/token_chunks.py",
        "            more = [*self.carry.roots(), *(root for roots in self.carry.more_roots for root in roots())]\n",
        "            more = [root for roots in self.carry.more_roots for root in roots()]\n",
        "tests/gloo/test_token_chunks.py::test_other_attentions[gpt_neox]",
    ),
    Mutation(
        "the loss misses what the other shards sum",
        "hf_hotspa/parallel/loss.py",
        "    dist.all_gather(shards, own, group=group)\n",
        "    shards = [own] * len(shards)\n",
        CLIP,
    ),
    Mutation(
        "an all-reduce of the backward is missed",
        "hf_hotspa/parallel/tensor_parallel.py",
        "        dist.all_reduce(grad, group=group)\n",
        "",
        CLIP,
    ),
    Mutation(
        "rows of other shards are looked up",
        "hf_hotspa/parallel/tensor_parallel.py",
        "forward(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)",
        "forward(local.masked_fill(elsewhere, 0))",
        CLIP,
    ),
    Mutation(
        "a bias is added once a shard",
        "hf_hotspa/parallel/tensor_parallel.py",
        "return functional.linear(x, linear.weight)",
        "return functional.linear(x, linear.weight, linear.bias)",
        HOT,
    ),
    Mutation(
        "row-parallel adapters are left out",
        "hf_hotspa/parallel/tensor_parallel.py",
        "        product = module.forward\n",
        "",
        LORA + "test_hot_switched_gradients_equal_those_of_peft",
    ),
    Mutation(
        "the factor of an adapter that every shard holds is not summed",
        "hf_hotspa/model/specs.py",
        "is_partial = shared != (INPUTS if of_inputs else OUTPUTS)",
        "is_partial = name_in_plan in plan.partial",
        LORA + "test_hot_switched_gradients_equal_those_of_peft",
    ),
    Mutation(
        "frozen weights that have changed are not loaded",
        "hf_hotspa/engine/phase.py",
        "(str(self.layout), self._master.frozen_version)",
        "(str(self.layout), 0)",
        LORA + "test_frozen_weights_are_loaded_again_only_where_they_are_gone",
    ),
    Mutation(
        "gradients of the mini-batch before stay",
        "hf_hotspa/engine/engine.py",
        "            self.master.zero_gradients()\n        self.master.bind",
        "            pass\n        self.master.bind",
        HOT,
    ),
    Mutation(
        "gradients of the phase before stay",
        "hf_hotspa/engine/phase.py",
        "                gradient.zero_()\n",
        "                pass\n",
        HOT,
    ),
    Mutation(
        "label smoothing takes nothing from the label",
        "hf_hotspa/parallel/loss.py",
        "target = (1 - smoothing) * target + smoothing",
        "target = target + smoothing",
        "tests/gloo/test_objective.py::test_label_smoothing_is_exact_over_a_cut_vocabulary",
    ),
    Mutation(
        "columns of tokens are those of the token before the label",
        "hf_hotspa/parallel/loss.py",
        "column[0].roll(-1)",
        "column[0]",
        "tests/gloo/test_own_loss.py::test_own_losses_are_exact_under_every_strategy",
    ),
    Mutation(
        "every chunk has the labels of the first one",
        "hf_hotspa/parallel/loss.py",
        "part = pack[tokens]",
        "part = pack[: len(log_probs)]",
        "tests/gloo/test_own_loss.py::test_own_losses_are_exact_under_every_strategy",
    ),
    Mutation(
        "a loss that is no sum is taken",
        "hf_hotspa/engine/loss_check.py",
        "if not bool((a - b).norm() <=",
        "if bool((a - b).norm() <",
        "tests/gloo/test_own_loss.py::test_what_is_no_sum_over_tokens_is_refused_by_name",
    ),
    Mutation(
        "a loss that a model's forward changes is not noticed",
        "hf_hotspa/engine/loss_check.py",
        "    if not same:",
        "    if not same and own == 0:",
        "tests/unit/test_own_loss.py::test_the_loss_of_a_model_is_compared_with_that_of_its_logits",
    ),
    # -- the switched model under the Trainer
    Mutation(
        "gradients of a loss that was called with another factor are taken as they are",
        "hf_hotspa/switched/model.py",
        "if scale is None or scale.factor != 1.0:",
        "if scale is None or scale.factor > 1e9:",
        "tests/gloo/test_stock_equal.py",
    ),
    Mutation(
        "weights that a callback has changed are lost",
        "hf_hotspa/switched/model_object.py",
        "weights = self.digest is not None and weights_digest(self._model) != self.digest",
        "weights = False",
        UNIT + "test_arguments.py::test_training_again_continues_from_the_trained_weights",
    ),
    # -- the optimizer side
    Mutation(
        "clipping takes the squared norm",
        "hf_hotspa/engine/engine.py",
        "self.grad_norm = squared_norm**0.5",
        "self.grad_norm = squared_norm",
        CLIP,
    ),
    Mutation(
        "a non-finite gradient goes into the optimizer",
        "hf_hotspa/engine/engine.py",
        "if not (torch.isfinite(rows[:, :2]).all()):",
        "if not (torch.isfinite(rows[:, 2:3]).all()):",
        "tests/gloo/test_non_finite.py::test_the_error_names_parameter_strategy_pack_and_rows",
    ),
    Mutation(
        "one mini-batch too few is skipped",
        "hf_hotspa/trainer/preemption.py",
        "if self._in_a_row > self._limit:",
        "if self._in_a_row >= self._limit:",
        "tests/gloo/test_non_finite.py::test_mini_batches_are_skipped_up_to_a_limit[1]",
    ),
    # -- agreement
    Mutation(
        "digests are not compared",
        "hf_hotspa/parallel/agreement.py",
        "if len(set(compared)) > 1:",
        "if len(set(compared[:1])) > 1:",
        "tests/gloo/test_switch_gloo.py::test_a_difference_is_an_error_on_every_rank_before_anything_is_sent",
    ),
    Mutation(
        "only one rank hears of SIGTERM",
        "hf_hotspa/engine/engine.py",
        "self.stop is not None and self.stop.requested",
        "self.stop is not None and self.stop.requested and self.rank == 0",
        "tests/gloo/test_preemption.py::test_without_checkpoints_it_only_stops",
    ),
    Mutation(
        "a lack of memory is any error",
        "hf_hotspa/engine/faults.py",
        "if isinstance(cause, MemoryError | torch.OutOfMemoryError):",
        "if isinstance(cause, MemoryError):",
        "tests/gloo/test_faults.py::test_the_next_launch_avoids_what_ran_out_of_memory",
    ),
    Mutation(
        "a lack of memory in a switch is a failed transfer",
        "hf_hotspa/engine/faults.py",
        "        if shortage is not None:\n            self.out_of_memory",
        '        if shortage is not None and runner.act != "compute":\n            self.out_of_memory',
        "tests/gloo/test_overlap.py::test_a_lack_of_memory_in_a_switch_beside_the_computation_is_called_that[True]",
    ),
    Mutation(
        "the rank that hangs is not named",
        "hf_hotspa/parallel/agreement.py",
        "return _silent_error(error, silent)",
        "return error",
        "tests/gloo/test_overlap.py::test_a_switch_waits_for_a_peer_no_longer_than_its_timeout[False]",
    ),
    Mutation(
        "a message of another size is taken",
        "hf_hotspa/engine/transport.py",
        "return self.tag ^ _shape_word(self.tensor.numel(), self.tensor.dtype)",
        "return self.tag",
        "tests/gloo/test_switch_faults.py::test_a_message_that_is_not_as_planned_is_noticed[shorter]",
    ),
    # -- what would train wrongly in silence
    Mutation(
        "padding is trained",
        "hf_hotspa/rows/read_row.py",
        '    if example.get("attention_mask") is not None:\n        mask',
        '    if example.get("attention_mask") is not None and row < 0:\n        mask',
        UNIT + "test_rows.py::test_padding_is_cut_off",
    ),
    Mutation(
        "rows that are packed already are one sequence",
        "hf_hotspa/rows/read_row.py",
        "if not _CUTS.isdisjoint(example) and any(example.get(name) is not None for name in CUT_COLUMNS):",
        "if any(example.get(name) is not None for name in ()):",
        UNIT + "test_rows.py::test_documents_are_told_apart",
    ),
    Mutation(
        "weights of earlier steps can be looked at",
        "hf_hotspa/switched/model_object.py",
        '            set_class(parameter, _guarded(type(parameter)), "parameter")  # type: ignore[arg-type]\n',
        "",
        UNIT + "test_stale_weights.py",
    ),
    Mutation(
        "an optimizer may hold parameters that are nobody's",
        "hf_hotspa/trainer/optimizers.py",
        "    if foreign:\n",
        "    if len(foreign) == len(given) + 1:\n",
        "tests/gloo/test_moves.py::test_a_move_is_equal_or_refused[optimizers-2]",
    ),
    Mutation(
        "num_steps of accelerate counts twice",
        "hf_hotspa/trainer/given_arguments.py",
        'values["gradient_accumulation_steps"] = steps if steps != 1 else given.get',
        'values["gradient_accumulation_steps"] = steps if steps != 1 else 2 * given.get',
        UNIT + "test_arguments.py::test_rows_of_a_step",
    ),
    Mutation(
        "evaluation sets are not looked at before the first step",
        "hf_hotspa/trainer/run.py",
        "evaluated = [*(given.values() if isinstance(given, dict) else [given]), rows.evaluated]",
        "evaluated = [rows.evaluated]",
        UNIT + "test_evaluated_lengths.py::test_auto_holds_the_longest_row_of_both_sets",
    ),
    Mutation(
        "weights in float16 are taken",
        "hf_hotspa/model/model_kind.py",
        "    if half is not None:\n",
        '    if half == "":\n',
        "tests/gloo/test_moves.py::test_a_move_is_equal_or_refused[models-2]",
    ),
    Mutation(
        "arguments that differ between ranks are not compared",
        "hf_hotspa/trainer/same_run.py",
        "sorted(names - ARGUMENTS_MAY_DIFFER.keys())",
        "sorted(names & ARGUMENTS_MAY_DIFFER.keys())",
        "tests/gloo/test_same_on_all_ranks.py::test_a_difference_between_ranks_is_named",
    ),
    Mutation(
        "rows that differ within a replica are not noticed",
        "hf_hotspa/parallel/agreement.py",
        "balance=balance_of(mini_batch, rank)",
        "balance=0",
        "tests/gloo/test_same_on_all_ranks.py::test_rows_that_differ_within_a_replica_are_named",
    ),
    Mutation(
        "anybody's SIGTERM ends the workers of a loader",
        "hf_hotspa/data/worker_processes.py",
        "si_pid != rank:",
        "si_pid < 0:",
        UNIT + "test_worker_processes.py::test_only_their_rank_ends_them",
    ),
    Mutation(
        "a stream is resumed a mini-batch too early",
        "hf_hotspa/trainer/trainer.py",
        'now.place["batches"] += len(read)',
        'now.place["batches"] += len(read) - (trainer.state.global_step == 0)',
        "tests/gloo/test_streaming.py::test_a_resumed_run_goes_on_in_the_stream_bit_for_bit",
    ),
    Mutation(
        "frozen weights take the dtype of the computation",
        "hf_hotspa/model/specs.py",
        "frozen_dtype=None if parameter.requires_grad else dtype_name(parameter.dtype)",
        "frozen_dtype=None",
        "tests/gloo/test_frozen.py::test_fp32_weights_that_are_frozen_stay_fp32_in_a_bf16_run",
    ),
    Mutation(
        "processes that each train alone are not noticed",
        "hf_hotspa/trainer/given_arguments.py",
        "    if started > 1:\n",
        "    if started > 99:\n",
        UNIT + "test_launcher.py::test_processes_that_would_train_alone",
    ),
    Mutation(
        "one process in place of several is not noticed",
        "hf_hotspa/trainer/given_arguments.py",
        "(meant := _meant()) != 1:",
        "(meant := _meant()) == 0:",
        UNIT + "test_launcher.py::test_one_process_where_more_were_meant",
    ),
    Mutation(
        "an older torch loses gradients in a wider dtype",
        "hf_hotspa/model/replica.py",
        "        buffer.add_(gradient)\n",
        "        buffer.copy_(gradient)\n",
        UNIT + "test_wide_gradients.py",
    ),
    # -- checkpoints
    Mutation(
        "files are not synced",
        "hf_hotspa/checkpoint/format/disk.py",
        '            self.before("sync", path)\n            file.flush()\n            os.fsync(file.fileno())\n',
        "            file.flush()\n",
        UNIT + "test_checkpoint_folder.py::test_everything_is_synced_before_the_commit",
    ),
    Mutation(
        "names are not synced before the commit",
        "hf_hotspa/checkpoint/format/folder.py",
        "            self.disk.sync_directory(temporary)\n",
        "",
        UNIT + "test_checkpoint_folder.py::test_everything_is_synced_before_the_commit",
    ),
    Mutation(
        "one checkpoint too many is removed",
        "hf_hotspa/checkpoint/format/folder.py",
        "if len(good) >= limit:",
        "if len(good) >= limit - 1:",
        UNIT + "test_checkpoint_folder.py",
    ),
    Mutation(
        "damaged checkpoints count as left",
        "hf_hotspa/checkpoint/format/folder.py",
        "                elif self.verified(path):\n",
        "                else:\n",
        UNIT + "test_checkpoint_folder.py",
    ),
    Mutation(
        "hashes are not compared",
        "hf_hotspa/checkpoint/format/manifest.py",
        "if disk.file_digest(file) != record.sha256:",
        "if len(disk.file_digest(file)) != len(record.sha256):",
        UNIT + "test_checkpoint_damage.py",
    ),
    Mutation(
        "a finished run makes one step more",
        "hf_hotspa/trainer/trainer.py",
        "self.state.global_step >= self.state.max_steps",
        "self.state.global_step > self.state.max_steps",
        "tests/gloo/test_resume.py::test_a_finished_run_stays_as_it_is",
    ),
    Mutation(
        "a checkpoint that is being pushed is removed",
        "hf_hotspa/trainer/checkpoints.py",
        "return [*best, *self._pushes.under_way()]",
        "return best",
        "tests/gloo/test_hub.py",
    ),
    Mutation(
        "the second token of a row is pooled as its first",
        "hf_hotspa/features/heads/pooling.py",
        "if kind == LAST else 0)",
        "if kind == LAST else 1)",
        "tests/gloo/test_chains.py::test_weights_are_those_of_one_process_with_the_whole_batch",
    ),
]

TAKEN_BACK = [
    Mutation(
        "hooks that only ask for gradients of the input count as changes",
        "hf_hotspa/switched/model_object.py",
        "    if code is None or code.co_freevars or not",
        "    if code is not None or code.co_freevars or not",
    ),
    Mutation(
        "attributes of modules that were changed are not noticed",
        "hf_hotspa/model/model_check.py",
        "    if changes := changed_facts(facts, expected_facts, fresh):",
        "    if (changes := changed_facts(facts, expected_facts, fresh)) and fresh is None:",
    ),
    Mutation(
        "what a callback freezes is trained further",
        "hf_hotspa/switched/model_object.py",
        "                (frozen.add if at_start else thawed.append)(name)",
        "                _ = at_start or thawed.append(name)",
    ),
    Mutation(
        "rates are not restored",
        "hf_hotspa/trainer/resuming.py",
        "        scheduler.load_state_dict(tensors.state_from_json(state))",
        "        tensors.state_from_json(state)",
    ),
    Mutation(
        "states of the optimizer are not restored",
        "hf_hotspa/trainer/resuming.py",
        'tensors.restore(path, manifest, engine.master, optimizer, state["optimizer"])',
        "tensors.restore(path, manifest, engine.master, None, None)",
    ),
    Mutation(
        "rates of the stock Trainer are not restored",
        "hf_hotspa/trainer/resuming.py",
        "            scheduler.load_state_dict(dict(stock.scheduler))",
        "            pass",
    ),
    Mutation(
        "tokens of ranks are taken for the order of the pack",
        "hf_hotspa/parallel/context.py",
        "        order = division.to_pack\n        by_heads",
        "        order = None\n        by_heads",
    ),
    Mutation(
        "gradients that come back on a ring are lost",
        "hf_hotspa/parallel/context.py",
        "of_row.index_add_(2, ring.mine, returning[1]",
        "of_row.index_add_(2, ring.mine, 0 * returning[1]",
    ),
    Mutation(
        "gradients of keys that other ranks have are not summed",
        "hf_hotspa/parallel/context.py",
        "total = parts.sum(0, dtype=wide)[",
        "total = parts[0].to(wide)[",
    ),
    Mutation(
        "results of experts are weighed in the order in which they came back",
        "hf_hotspa/features/experts/expert_parallel.py",
        "back * weights.reshape(-1)[order][:, None]",
        "back * weights.reshape(-1)[:, None]",
    ),
]
"""Mends that are taken back, and bugs of parts that fuzzers alone run: with some of the others, what fuzzers must find."""

FAST = (
    "edges of buckets belong to the longer one",
    "replicated gradients are counted once a shard",
    "names are not synced before the commit",
)
"""Those that the default suite runs: their tests need no processes and no torch."""


class Copy:
    """A copy of package, tests and benchmarks, laid out as installed, so that nothing of the tree itself is imported.

    Args:
        folder: An empty directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
        shutil.copytree(ROOT / "hf_hotspa", folder / "hf_hotspa", ignore=skip)
        for name in ("trainer", "callbacks"):
            shutil.copytree(ROOT / name, folder / "hf_hotspa" / name, ignore=skip)
        for name in ("tests", "benchmarks"):  # tests use what benchmarks share
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        for name in ("pyproject.toml", "setup.cfg"):
            shutil.copy(ROOT / name, folder)
        self._passed: dict[str, bool] = {}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # no bytecode: a file that is changed twice in a second would be taken for its old self
        env = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
        env["HOTSPA_SHRINK_S"] = "0"  # it is enough that a draw fails
        env.pop("HOTSPA_REQUIRE_GLOO", None)  # a session of one unit test runs no world
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=env, capture_output=True, text=True, timeout=600
        )

    def run_test(self, test: str) -> subprocess.CompletedProcess[str]:
        """One test, or the fast ones of a file, up to the first failure."""
        marks = "not gpu" if "::" in test else "not slow"
        return self.run("-m", "pytest", "-x", "-q", "-m", marks, "-p", "no:cacheprovider", test)

    def passes(self, test: str) -> bool:
        """Whether a test passes without a bug; asked once."""
        if test not in self._passed:
            self._passed[test] = self.run_test(test).returncode == 0
        return self._passed[test]

    @contextmanager
    def with_bug(self, mutation: Mutation) -> Iterator[None]:
        """Inside, the copy has the bug."""
        path = self.folder / mutation.file
        text = path.read_text()
        found = text.count(mutation.old)
        assert found == 1, f"{mutation.name!r}: its text occurs {found} times in {mutation.file}"
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            yield
        finally:
            path.write_text(text)
