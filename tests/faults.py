"""Seeded faults: wrong programs that a test has to tell from the right one.

Each replaces a text that occurs once in its file; `tests/mutations.py` puts them in one at a time
and runs the tests named. tests/MUTATIONS.md says which of them noticed.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: what is wrong with it.
        file: of the repository.
        old, new: what stands there, once, and what takes its place.
        tests: files or tests that are expected to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ROWS = ("tests/unit/test_cache.py", "tests/unit/test_cache_properties.py")
GOLDEN = "tests/parity/test_golden.py::"
ROUNDS = GOLDEN + "test_rounds_equal_the_cache_free_reference"
FIRST_DRAFTS = GOLDEN + "test_first_block_of_drafts"
HIDDEN = GOLDEN + "test_target_logits_and_hidden"
LOSSLESS = "tests/parity/test_lossless.py::"
STOPS = LOSSLESS + "test_a_stop_inside_a_block_ends_the_text_there[e2b]"
EVERY_DEPTH = LOSSLESS + "test_every_depth_gives_the_plain_ids[e2b-False]"
TOGETHER = LOSSLESS + "test_every_row_count_gives_the_plain_ids[dense-False]"
SCHEDULES = "tests/parity/test_schedules.py"
SAMPLING = "tests/unit/test_sampling.py"
DISTRIBUTION = "tests/parity/test_distribution.py"
KEPT = "tests/parity/test_kept.py"
PREFIXES = "tests/parity/test_prefixes.py"
SESSION = "tests/e2e/test_session.py"
JOURNAL = ("tests/unit/test_batch_journal.py", "tests/unit/test_batch_journal_disk.py")
TOKENIZER = "tests/unit/test_tokenizer.py"
WRITER = "tests/unit/test_convert_writer.py"
CHECK = "tests/unit/test_convert_check.py"

CACHE_PY = "mlx_mtp/model/cache.py"
SPAN_PY = "mlx_mtp/model/span.py"
ROUND_PY = "mlx_mtp/decode/round.py"
SAMPLING_PY = "mlx_mtp/decode/sampling.py"
LAYER_PY = "mlx_mtp/model/layer.py"
DRAFTER_PY = "mlx_mtp/model/drafter.py"
REQUEST_PY = "mlx_mtp/decode/request.py"
SCHEDULE_PY = "mlx_mtp/decode/schedule.py"
ENGINE_PY = "mlx_mtp/decode/engine.py"
KEPT_PY = "mlx_mtp/decode/kept.py"
TRANSCRIPT_PY = "mlx_mtp/transcript.py"
JOURNAL_PY = "mlx_mtp/batch/journal.py"
TOKENIZER_PY = "mlx_mtp/tokenizer.py"
FILES_PY = "mlx_mtp/files.py"

FAULTS = (
    # The cache: what is written where, and who sees it.
    Fault(
        "full layers show the slot after the query",
        CACHE_PY,
        "_slots(run) <= query[run.first : run.first + run.rows]",
        "_slots(run) <= query[run.first : run.first + run.rows] + 1",
        ROWS,
    ),
    Fault(
        "the target's window is one too long",
        CACHE_PY,
        "(held > query - self.window)",
        "(held >= query - self.window)",
        ROWS,
    ),
    Fault(
        "the drafter's window is W and not W + 1",
        CACHE_PY,
        "(held >= last - self.window)",
        "(held > last - self.window)",
        ROWS,
    ),
    Fault(
        "the drafter sees a slot past the committed prefix",
        CACHE_PY,
        "last = lengths[:, None, None] - 1",
        "last = lengths[:, None, None]",
        ROWS,
    ),
    Fault(
        "ring without room for a chunk",
        SPAN_PY,
        "return round_up(window + PREFILL_CHUNK)",
        "return round_up(window)",
        ROWS,
    ),
    Fault(
        "slot rule of the ring off by one",
        CACHE_PY,
        "SLIDING: positions % self.ring}",
        "SLIDING: positions % (self.ring - 1)}",
        ROWS,
    ),
    Fault(
        "held positions as of the block's first token",
        CACHE_PY,
        "self._held_positions(starts + (length - 1), most)",
        "self._held_positions(starts, most)",
        ROWS,
    ),
    Fault(
        "rows beside the live ones are written over them",
        CACHE_PY,
        "row = (span.first_row + mx.arange",
        "row = (0 + mx.arange",
        ROWS,
    ),
    Fault(
        "RoPE offset of a padded row's last token",
        SPAN_PY,
        "self.starts + (self.length if self.ends is None else self.ends) - 1",
        "self.starts + self.length - 1",
        ROWS,
    ),
    Fault(
        "last query of a padded row off by one",
        "mlx_mtp/model/attention.py",
        "index = (ends - 1).reshape",
        "index = (ends - 2).reshape",
        ROWS,
    ),
    Fault(
        "growth loses the last slot",
        CACHE_PY,
        "new[:kept, :, :held] = old[:kept, :, :held]",
        "new[:kept, :, : held - 1] = old[:kept, :, : held - 1]",
        ROWS,
    ),
    Fault(
        "a moved row keeps the first layer's old values",
        CACHE_PY,
        "for layer, row in enumerate(rows):",
        "for layer, row in list(enumerate(rows))[1:]:",
        ROWS,
    ),
    Fault(
        "snapshot lacks the last committed slot",
        "mlx_mtp/model/snapshot.py",
        "length if kind == FULL else cache.ring",
        "length - 1 if kind == FULL else cache.ring",
        ROWS,
    ),
    Fault(
        "snapshot lacks the last slot of a ring",
        "mlx_mtp/model/snapshot.py",
        "length if kind == FULL else cache.ring",
        "length if kind == FULL else cache.ring - 1",
        ROWS,
    ),
    # Rows that come and go.
    Fault(
        "a row's move is forgotten",
        SCHEDULE_PY,
        "self.cache.move(mover, hole)",
        "pass",
        (SCHEDULES,),
    ),
    Fault(
        "state of a moved row stays behind",
        SCHEDULE_PY,
        "order[hole] = mover",
        "pass",
        (SCHEDULES,),
    ),
    Fault(
        "a row joins without its K/V",
        SCHEDULE_PY,
        "self.cache.move(running.row, row)",
        "pass",
        (SCHEDULES,),
    ),
    Fault(
        "prompts prefilled together get the first one's hidden state",
        ENGINE_PY,
        "Rows(first[at], lengths[at], hidden[at])",
        "Rows(first[at], lengths[at], hidden[:1])",
        (PREFIXES + "::test_short_prompts_are_prefilled_together",),
    ),
    Fault(
        "a request that comes back forgets its last token",
        ENGINE_PY,
        "first[place] = running.produced[-1]",
        "first[place] = running.produced[0]",
        ("tests/parity/test_room.py::test_the_youngest_rows_give_way",),
    ),
    Fault(
        "shared prefix of one token too many",
        "mlx_mtp/decode/prefix.py",
        "return [prefix for prefix in self._kept if ids[: len(prefix)] == prefix != ids]",
        "return [p for p in self._kept if ids[: len(p) - 1] == p[:-1] and p != ids]",
        (PREFIXES + "::test_a_prefix_serves_those_only_that_have_all_of_it",),
    ),
    Fault(
        "kept row goes on one token too late",
        KEPT_PY,
        "return min(common(ids, self._ids), len(ids) - 1)",
        "return min(common(ids, self._ids) + 1, len(ids) - 1)",
        (KEPT,),
    ),
    Fault(
        "kept row trusts rings that are written over",
        KEPT_PY,
        "self._cache.ring - self._cache.window - 1",
        "self._cache.ring + 300",
        (KEPT,),
    ),
    Fault(
        "a request cancelled in prefill keeps its row",
        SCHEDULE_PY,
        "self.prefilling = [running for running in self.prefilling if running.job_id not in ids]",
        "pass",
        (SCHEDULES,),
    ),
    Fault(
        "memory budget forgets what growth copies into",
        "mlx_mtp/model/memory.py",
        "growth=rows * slots * self.kv.widest",
        "growth=0",
        ("tests/unit/test_memory.py",),
    ),
    Fault(
        "memory budget counts keys alone",
        "mlx_mtp/model/memory.py",
        "ring=2 * (sum(width)",
        "ring=(sum(width)",
        ("tests/unit/test_memory.py",),
    ),
    # The round.
    Fault(
        "acceptance is a sum and not a cumulative product",
        ROUND_PY,
        "mx.cumprod(kept, axis=1).sum(axis=1, keepdims=True)",
        "kept.sum(axis=1, keepdims=True)",
        (EVERY_DEPTH,),
    ),
    Fault(
        "bonus token of the block's end",
        ROUND_PY,
        "mx.take_along_axis(choices, accepted, axis=1)[:, 0]",
        "choices[:, -1]",
        (EVERY_DEPTH,),
    ),
    Fault(
        "committed length off by one",
        ROUND_PY,
        "rows.lengths + 1 + accepted[:, 0]",
        "rows.lengths + accepted[:, 0]",
        (EVERY_DEPTH,),
    ),
    Fault(
        "a rejected draft is committed",
        ROUND_PY,
        "rows.lengths + 1 + accepted[:, 0]",
        "rows.lengths + 1 + mx.minimum(accepted[:, 0] + 1, depth)",
        (EVERY_DEPTH,),
    ),
    Fault(
        "hidden state of the block's end",
        ROUND_PY,
        "mx.take_along_axis(hidden, accepted[:, :, None], axis=1)",
        "hidden[:, -1:]",
        (ROUNDS,),
    ),
    Fault(
        "each draft step begins with the target's hidden state",
        ROUND_PY,
        "h, hidden = drafter.step(target.embed(token), hidden, context)",
        "h, _ = drafter.step(target.embed(token), hidden, context)",
        (FIRST_DRAFTS,),
    ),
    Fault(
        "each draft step embeds the bonus token",
        ROUND_PY,
        "drafter.step(target.embed(token), hidden, context)",
        "drafter.step(target.embed(rows.tokens[:, None]), hidden, context)",
        (FIRST_DRAFTS,),
    ),
    Fault(
        "noise of the position before",
        ROUND_PY,
        "mx.arange(1, longest + 1, dtype=mx.int32)",
        "mx.arange(0, longest, dtype=mx.int32)",
        (LOSSLESS + "test_sampled_ids_depend_on_logits_and_seed_alone", DISTRIBUTION),
    ),
    Fault(
        "drafts are drawn with the first position's noise",
        ROUND_PY,
        "noise[:, step : step + 1]",
        "noise[:, :1]",
        ("tests/parity/test_coupling.py",),
    ),
    # Stops.
    Fault(
        "end of text inside a block is passed over",
        REQUEST_PY,
        "if watched or token in self.job.stop_ids:",
        "if watched or (token in self.job.stop_ids and used == len(tokens)):",
        (STOPS,),
    ),
    Fault(
        "max_tokens is off by one",
        REQUEST_PY,
        "if len(self.produced) >= self.job.max_tokens:",
        "if len(self.produced) > self.job.max_tokens:",
        (STOPS,),
    ),
    Fault(
        "max_tokens inside a block is passed over",
        REQUEST_PY,
        'return tuple(tokens[:used]), "length"',
        'return tuple(tokens), "length"',
        (STOPS,),
    ),
    Fault(
        "the beginning of a stop string is given out",
        TOKENIZER_PY,
        "max(map(len, self._stop), default=1) - 1)",
        "max(map(len, self._stop), default=1) - 2)",
        (TOKENIZER,),
    ),
    Fault(
        "the stop string that begins first wins, not the first complete one",
        TOKENIZER_PY,
        "(start + len(stop), start) for stop",
        "(start, start) for stop",
        (TOKENIZER,),
    ),
    Fault(
        "parameters of the call win over a request's own",
        "mlx_mtp/answer.py",
        "resolved = _merged(request.params, params)",
        "resolved = _merged(params, request.params)",
        ("tests/e2e/test_llm.py::test_a_requests_own_parameters_win_over_the_calls",),
    ),
    Fault(
        "results in the order in which they end",
        "mlx_mtp/completions.py",
        "return [results[number] for number in range(len(results))]",
        "return list(results.values())",
        ("tests/e2e/test_llm.py::test_a_mixed_batch_in_input_order",),
    ),
    Fault(
        "scripted drafts one place late",
        "mlx_mtp/decode/replay.py",
        "mx.clip(lengths - self._prompts, 0",
        "mx.clip(lengths - self._prompts + 1, 0",
        ("tests/parity/test_replay.py",),
    ),
    Fault(
        "chances of later drafts are not conditional",
        "mlx_mtp/decode/acceptance.py",
        "tried = [float(sum(count >= place for count in accepted)) for place in places]",
        "tried = [float(len(accepted)) for place in places]",
        ("tests/unit/test_depth.py", "tests/unit/test_depth_beliefs.py"),
    ),
    # Sampling.
    Fault(
        "temperature is applied twice",
        SAMPLING_PY,
        "mx.where(kept, scaled + noise, -mx.inf)",
        "mx.where(kept, scaled / mx.maximum(temperature, 1e-9) + noise, -mx.inf)",
        (SAMPLING,),
    ),
    Fault(
        "ties at the threshold go",
        SAMPLING_PY,
        "kept = scaled >= self._threshold(scaled)",
        "kept = scaled > self._threshold(scaled)",
        (SAMPLING,),
    ),
    Fault(
        "ties of candidates go to the highest id",
        SAMPLING_PY,
        "mx.where(tied, ids, vocabulary).min(-1)",
        "mx.where(tied, ids, -1).max(-1)",
        (SAMPLING,),
    ),
    Fault(
        "min-p replaces top-k and top-p",
        SAMPLING_PY,
        "threshold = mx.maximum(threshold, floor)",
        "threshold = floor",
        (SAMPLING,),
    ),
    Fault(
        "top-p of all, not of what top-k left",
        SAMPLING_PY,
        "enough = self._top_p[:, None, None] * mass",
        "enough = self._top_p[:, None, None] * mx.exp(scaled - top).sum(-1, keepdims=True)",
        (SAMPLING,),
    ),
    Fault(
        "candidates that are suppressed come out",
        SAMPLING_PY,
        "(self._suppressed if ids is None else self._suppressed[ids])",
        "(self._suppressed if ids is None else 0)",
        (SAMPLING,),
    ),
    Fault(
        "candidates take the noise of their rank",
        SAMPLING_PY,
        "noise = mx.take_along_axis(noise, ids, axis=-1)",
        "noise = noise[..., : ids.shape[-1]]",
        (SAMPLING,),
    ),
    Fault(
        "seed and position are mixed into one number",
        SAMPLING_PY,
        "keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1)",
        "keys = mx.stack([seeds + positions.astype(mx.uint32)] * 2, axis=-1)",
        (SAMPLING,),
    ),
    # The models.
    Fault(
        "drafter one position too far",
        DRAFTER_PY,
        'offsets = lengths if self.position == "bonus"',
        'offsets = lengths + 1 if self.position == "bonus"',
        (FIRST_DRAFTS,),
    ),
    Fault(
        "centroid table in another order than its tokens",
        DRAFTER_PY,
        "self._head.tokens[best].reshape(rows, -1)",
        "self._head.tokens[best].reshape(rows, -1)[:, ::-1]",
        (FIRST_DRAFTS,),
    ),
    Fault(
        "half of the centroids are scored",
        DRAFTER_PY,
        "best = best[:, : self.config.centroid_top_k]",
        "best = best[:, : self.config.centroid_top_k // 2]",
        (FIRST_DRAFTS, ROUNDS),
    ),
    Fault(
        "K/V of the first layer of a type and not the last",
        "mlx_mtp/pair.py",
        "return {name: index for index, name in enumerate(self.layer_types[: self.num_kv_layers])}",
        "return {\n            t: self.layer_types.index(t)"
        " for t in self.layer_types[: self.num_kv_layers]\n        }",
        (FIRST_DRAFTS,),
    ),
    Fault(
        "all rows are roped at the first one's position",
        LAYER_PY,
        "attention.rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=offsets)",
        "attention.rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=offsets[:1] + 0 *"
        " offsets)",
        (TOGETHER, LOSSLESS + "test_no_row_pays_for_its_neighbours"),
    ),
    Fault(
        "logits without their softcap",
        "mlx_mtp/model/target.py",
        "return logits if cap is None else logit_softcap(cap, logits)",
        "return logits",
        (HIDDEN,),
    ),
    Fault(
        "values where K is V are normed as keys",
        LAYER_PY,
        "values = raw if attention.use_k_eq_v",
        "values = attention.k_norm(raw) if attention.use_k_eq_v",
        (HIDDEN,),
    ),
    Fault(
        "the layer scalar is left out",
        LAYER_PY,
        "return h * layer.layer_scalar",
        "return h",
        (HIDDEN,),
    ),
    Fault(
        "sorted experts come back in their order",
        "mlx_mtp/model/experts.py",
        "outs = outs[mx.argsort(order)]",
        "outs = outs[order]",
        ("tests/parity/test_experts.py",),
    ),
    # Text and conversations.
    Fault(
        "a reply keeps its thinking",
        TRANSCRIPT_PY,
        "elif not in_channel:",
        "else:",
        (SESSION + "::test_thinking_is_struck_out_of_the_past",),
    ),
    Fault(
        "a reply whose text was changed is spliced in as it was",
        TRANSCRIPT_PY,
        "self._tokenizer.decode(ids) == content",
        "True",
        (SESSION + "::test_a_reply_whose_text_was_changed_is_encoded_anew",),
    ),
    Fault(
        "a session holds a token more than was committed",
        "mlx_mtp/session.py",
        "self._kept.hold((*ids, *produced)[:held])",
        "self._kept.hold((*ids, *produced))",
        (SESSION + "::test_a_turn_that_cannot_be_served_changes_nothing",),
    ),
    # Batches.
    Fault(
        "end of a run does not reach the disk",
        JOURNAL_PY,
        "self._is_running = False\n        self.sync()",
        "self._is_running = False",
        JOURNAL,
    ),
    Fault(
        "a line written during an fsync is taken for synced",
        JOURNAL_PY,
        "            self._dirty.clear()  # before the fsync: a line written during it asks for"
        " another\n            with suppress(MlxMtpError):  # kept, and raised by the next call"
        " that writes\n                self.sync()\n",
        "            with suppress(MlxMtpError):\n                self.sync()\n"
        "            self._dirty.clear()\n",
        JOURNAL,
    ),
    Fault(
        "two processes may write one journal",
        JOURNAL_PY,
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        JOURNAL,
    ),
    Fault(
        "conversations may be read by others",
        "mlx_mtp/whole_files.py",
        "mode = 0o600 if private else 0o666",
        "mode = 0o666",
        ("tests/unit/test_chat_settings.py",),
    ),
    Fault(
        "a torn last line stays",
        JOURNAL_PY,
        "self.was_killed = self._is_running\n        os.ftruncate(self._descriptor, self._end)",
        "self.was_killed = self._is_running",
        JOURNAL,
    ),
    Fault(
        "lost lines are forgotten after one error",
        JOURNAL_PY,
        "                self._failure = error\n",
        "",
        JOURNAL,
    ),
    Fault(
        "a row is noted as done before it is in the journal",
        "mlx_mtp/batch/index.py",
        '        place = self._journal.append(f"{self._model}:{key}", record)\n'
        '        row = (_blob(key), *place, record["error"] is not None)\n'
        '        self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)\n',
        '        row = (_blob(key), 0, 0, record["error"] is not None)\n'
        '        self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)\n'
        '        place = self._journal.append(f"{self._model}:{key}", record)\n'
        '        row = (_blob(key), *place, record["error"] is not None)\n'
        '        self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)\n',
        ("tests/unit/test_batch_index.py",),
    ),
    Fault(
        "rows with changed parameters are not done again",
        "mlx_mtp/batch/rows.py",
        '"params": vars(row.params),',
        '"params": None,',
        ("tests/unit/test_batch_rows.py",),
    ),
    Fault(
        "all rows of a batch have the same seed",
        "mlx_mtp/batch/rows.py",
        'sha256(f"{seed}:".encode() + row_id.encode("utf-8", "surrogatepass"))',
        'sha256(f"{seed}:".encode())',
        ("tests/unit/test_batch_rows.py",),
    ),
    Fault(
        "OUTPUT in the order in which rows were finished",
        "mlx_mtp/batch/index.py",
        'order = "row_index" if ordered else "offset, row_index"',
        'order = "offset, row_index"',
        ("tests/unit/test_batch_index.py",),
    ),
    # Files and conversion.
    Fault(
        "a header of any length is read",
        FILES_PY,
        "if size < 8 or length > MAX_HEADER_BYTES:",
        "if size < 8:",
        ("tests/unit/test_hub.py", "tests/unit/test_load.py"),
    ),
    Fault(
        "gaps between tensors are read over",
        FILES_PY,
        "if begin != position:",
        "if begin < position:",
        ("tests/unit/test_hub.py", "tests/unit/test_load.py"),
    ),
    Fault(
        "an index may point out of its folder",
        FILES_PY,
        r'r"[\w][\w.-]*\.safetensors"',
        r'r".*\.safetensors"',
        ("tests/unit/test_hub.py", "tests/unit/test_load.py"),
    ),
    Fault(
        "another block's rows are written one row late",
        "convert/writer.py",
        "base + output.offset + block.begin * row_bytes",
        "base + output.offset + max(block.begin - 1, 0) * row_bytes",
        (WRITER, "tests/unit/test_convert.py"),
    ),
    Fault(
        "the last block of a tensor is left out",
        "convert/blocks.py",
        "for begin in range(0, total, tensor.block_rows):",
        "for begin in range(0, max(total - total % tensor.block_rows, 1), tensor.block_rows):",
        (WRITER, "tests/unit/test_convert.py"),
    ),
    Fault(
        "the grid begins at its other end",
        "convert/grid.py",
        "scale = (largest / -LEVELS)",
        "scale = (largest / LEVELS)",
        ("tests/unit/test_convert_recipes.py",),
    ),
    Fault(
        "grid codes are packed from the highest bits",
        "convert/grid.py",
        "shifts = mx.arange(0, 32, 4, dtype=mx.uint32)",
        "shifts = mx.arange(28, -4, -4).astype(mx.uint32)",
        ("tests/unit/test_convert_recipes.py",),
    ),
    Fault(
        "a shard with another header is taken for whole",
        "convert/writer.py",
        "return stream.read(len(header)) == header and os.path",
        "return stream.read(0) == b'' and os.path",
        (WRITER + "::test_a_shard_that_is_not_as_planned_is_written_anew",),
    ),
    Fault(
        "weights that are not finite are converted",
        "convert/blocks.py",
        "return bool(host.view(signed).max() < infinity and host.max() < sign + infinity)",
        "return True",
        (CHECK,),
    ),
)
