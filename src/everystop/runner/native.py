"""The CPU runner: carries step plans to the native decoder and its tokens back; owns the decoder, knows no scheduling.

One native call computes a whole step with the interpreter lock released. Per-request state lives in the decoder, keyed
by request id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from everystop.core.plan import NO_TOKEN_LEFT, Admitted, PromptLogits, StepPlan, StepResult, TokenLogprobs
from everystop.core.request import SamplingParams
from everystop.model.spec import DecoderSpec, Float32Array, rope_frequencies
from everystop.model.weights import LoadedModel
from everystop.runner.codes import NOT_FINITE, NOT_TAKEN

log = logging.getLogger("everystop.runner")

GREEDY = SamplingParams(temperature=0.0)
_NO_TOKENS: tuple[int, ...] = ()
_PROBE_ID = -1  # never a scheduler's id


_ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_SCALE_BYTES = 8  # of one token and head: a float32 for its keys, one for its values


def stored_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """What keys and values are stored in: what `--kv-cache-dtype` says, or what goes with weights of `dtype`."""
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    return "float32" if dtype == "float32" else "int8"


def bytes_per_block(spec: DecoderSpec, block_size: int, stored: str) -> int:
    """Bytes of one block of the KV cache over all layers, of elements that are `stored` as float32, float16 or int8.

    Rows of values are padded to a multiple of 16; int8 has two scales for each token and head. Example, SmolLM2-135M,
    32 tokens in float16: 30 layers · 3 heads · 32 tokens · (64 + 64) · 2 bytes = 720 KiB; in int8 30 · 3 · 32 ·
    (64 + 64 + 8) bytes = 382.5 KiB.
    """
    value_stride = (spec.head_dim + 15) // 16 * 16
    token_bytes = (spec.head_dim + value_stride) * _ELEMENT_BYTES[stored]
    if stored == "int8":
        token_bytes += _SCALE_BYTES
    return spec.num_layers * spec.num_kv_heads * block_size * token_bytes


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural log-probabilities of tokens, but each window's first [T - num_windows]; best id after each [T]."""

    log_likelihoods: npt.NDArray[np.float64]
    best_ids: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return float(np.exp(-self.log_likelihoods.mean()))


class NativeRunner:
    """Executes step plans on the native decoder; see `ModelRunner`. One thread at a time may call it.

    `num_valid_tokens` are the ids that may be sampled (default: all rows of the embedding); `kv_cache_dtype` is auto,
    float16 or int8, as `stored_dtype` reads it. `max_num_batched_tokens`
    and `max_num_seqs` size the scratch: a plan beyond them raises ValueError, as does any plan that names unknown
    requests or blocks.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        num_threads: int,
        num_valid_tokens: int | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        from everystop import _native

        spec = model.spec
        inv_freq, rope_factor = rope_frequencies(spec)
        self.num_valid_tokens = num_valid_tokens or spec.vocab_size
        self._num_blocks, self._block_size = num_blocks, block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        config = {
            "dtype": model.dtype,
            "kv_cache_dtype": stored_dtype(kv_cache_dtype, model.dtype),
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "num_valid_tokens": self.num_valid_tokens,
            "rms_norm_eps": spec.rms_norm_eps,
            "inv_freq": np.ascontiguousarray(inv_freq, dtype=np.float32),
            "rope_factor": rope_factor,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "num_threads": num_threads,
        }
        self._decoder: Any = _native.Decoder(config, model.weights)
        self._on_board: set[int] = set()
        self._wants_logprobs: set[int] = set()
        self._not_taken: set[int] = set()
        self._vocab_size = spec.vocab_size
        self._allowed: tuple[tuple[int, ...], npt.NDArray[np.int32]] | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: bookkeeping, block copies, forward pass and sampling."""
        began_ns = time.monotonic_ns()
        self._follow(plan)
        copies = np.array(plan.copies, dtype=np.int32) if plan.copies else None
        scored = [each for each in plan.prompt_logits if each.request_id not in self._not_taken]
        prompts = _offsets_of(plan, scored) if scored else None
        tokens = self._decoder.step(plan.rows.numbers, copies, plan.num_padded_rows, prompts)
        rows: list[tuple[int, ...] | str] = [
            (token,) if token >= 0 else _NO_TOKENS if token == -1 else NO_TOKEN_LEFT if token == -3 else NOT_FINITE
            for token in tokens
        ]
        if self._not_taken:
            rows = [
                NOT_TAKEN if request_id in self._not_taken else out
                for request_id, out in zip(plan.rows.request_ids, rows, strict=True)
            ]
        native_ns, gil_wait_ns, native_cpu_ns = self._decoder.call_ns()
        result = StepResult(
            rows=rows,
            sample_ns=self._decoder.sample_ns(),
            native_ns=native_ns,
            gil_wait_ns=gil_wait_ns,
            native_cpu_ns=native_cpu_ns,
        )
        if self._wants_logprobs:
            self._collect_logprobs(plan, tokens, result)
        if scored:
            self._collect_prompt_logprobs(plan, scored, result)
        result.execute_ns = time.monotonic_ns() - began_ns
        return result

    def close(self) -> None:
        """Release threads, cache and weights; nothing can be executed afterwards."""
        self._decoder = None

    def _follow(self, plan: StepPlan) -> None:
        """Bring the decoder's requests and block tables up to the plan."""
        for request_id in chain(plan.released, plan.preempted):
            self._decoder.release(request_id)
            self._on_board.discard(request_id)
            self._wants_logprobs.discard(request_id)
            self._not_taken.discard(request_id)
        for admitted in plan.admitted:
            self._admit(admitted)
        for new in plan.new_blocks:
            self._decoder.set_blocks(new.request_id, new.first_index, new.block_ids)

    def _admit(self, admitted: Admitted) -> None:
        """Take a request on board; one whose settings or token ids cannot be taken fails by itself.

        Its positions are computed all the same, from what can be taken of it: others may have matched its blocks in
        this very step. Raises only where the plan itself is impossible.
        """
        request_id, params = admitted.request_id, admitted.params
        try:
            stop_ids, allowed = admitted.stop_token_ids, self._allowed_ids(params)
            settings = sampling_settings(params, admitted.choice_index, stop_ids, self.num_valid_tokens, allowed)
            self._take(admitted, np.array(admitted.token_ids, dtype=np.int32), settings)
        except Exception:
            if request_id in self._on_board:
                raise
            ids = np.array(admitted.token_ids, dtype=np.int64)
            known_ids = np.where((ids >= 0) & (ids < self._vocab_size), ids, 0).astype(np.int32)
            self._take(admitted, known_ids, sampling_settings(GREEDY, 0, (), self.num_valid_tokens))
            self._not_taken.add(request_id)
            log.exception("request %d fails: it cannot be taken as it is", request_id)
        else:
            if params.logprobs is not None:
                self._wants_logprobs.add(request_id)

    def _take(self, admitted: Admitted, token_ids: npt.NDArray[np.int32], settings: dict[str, Any]) -> None:
        table = np.array(admitted.block_table, dtype=np.int32)
        self._decoder.admit(admitted.request_id, token_ids, admitted.num_prompt_tokens, settings, table)
        self._on_board.add(admitted.request_id)

    def _allowed_ids(self, params: SamplingParams) -> npt.NDArray[np.int32] | None:
        """`allowed_token_ids` as an array, which the n choices of a request share."""
        ids = params.allowed_token_ids
        if ids is None:
            return None
        if self._allowed is None or self._allowed[0] is not ids:
            self._allowed = ids, np.array(ids, dtype=np.int32)
        return self._allowed[1]

    def _collect_logprobs(self, plan: StepPlan, tokens: list[int], result: StepResult) -> None:
        num_kept = len(plan.rows) - plan.num_padded_rows
        request_ids = plan.rows.request_ids[:num_kept]
        for index, (request_id, token) in enumerate(zip(request_ids, tokens[:num_kept], strict=True)):
            if token >= 0 and request_id in self._wants_logprobs:
                result.logprobs[request_id] = [TokenLogprobs(*self._decoder.logprobs(index))]

    def _collect_prompt_logprobs(self, plan: StepPlan, scored: list[PromptLogits], result: StepResult) -> None:
        entries = iter(self._decoder.prompt_logprobs())
        failed = {i for i, out in zip(plan.rows.request_ids, result.rows, strict=True) if isinstance(out, str)}
        for request_id, _, num_tokens in scored:
            scores = [TokenLogprobs(*entry) for entry in islice(entries, num_tokens)]
            if request_id not in failed:
                result.prompt_logprobs[request_id] = scores

    # ------------------------------------------------------ apart from plans

    def logits(self, token_ids: Sequence[int]) -> Float32Array:
        """Logits [T, num_valid_tokens] after each of T tokens.

        Uses the cache's blocks from 0 on: only while no request is on board.
        """
        return np.concatenate(list(self._logits_by_chunk(token_ids)))

    def score(self, token_ids: Sequence[int], window: int) -> Scores:
        """How well a text is predicted, cut into windows of `window` tokens that do not see each other; as `logits`."""
        log_likelihoods, best_ids = [], []
        for start in range(0, len(token_ids), window):
            ids = np.array(token_ids[start : start + window])
            done = 0
            for logits in self._logits_by_chunk(ids.tolist()):
                best_ids.append(logits.argmax(axis=1))
                chosen = ids[done + 1 : done + 1 + len(logits)]
                known = logits[: len(chosen)]
                largest = known.max(axis=1)
                log_sums = np.log(np.exp(known - largest[:, None]).sum(axis=1, dtype=np.float64))
                log_likelihoods.append(known[np.arange(len(chosen)), chosen] - largest - log_sums)
                done += len(logits)
        return Scores(np.concatenate(log_likelihoods), np.concatenate(best_ids))

    def _logits_by_chunk(self, token_ids: Sequence[int]) -> Iterator[Float32Array]:
        """The logits in pieces of at most `max_num_batched_tokens`."""
        assert not self._on_board, "the cache belongs to the requests on board"
        num_tokens = len(token_ids)
        num_needed = -(-num_tokens // self._block_size)
        if num_needed > self._num_blocks:
            raise ValueError(f"{num_tokens:,} tokens need {num_needed:,} blocks; the cache has {self._num_blocks:,}")
        settings = sampling_settings(GREEDY, 0, (), self.num_valid_tokens)
        ids = np.array(token_ids, dtype=np.int32)
        self._decoder.admit(_PROBE_ID, ids, num_tokens, settings, np.arange(num_needed, dtype=np.int32))
        try:
            step = self._max_num_batched_tokens
            for start in range(0, num_tokens, step):
                yield self._decoder.forward(np.array([[_PROBE_ID, start, min(step, num_tokens - start), 0, 0]]))
        finally:
            self._decoder.release(_PROBE_ID)


def _offsets_of(plan: StepPlan, scored: list[PromptLogits]) -> npt.NDArray[np.int64]:
    """What is to be scored of a plan as (row, offset in it, number of tokens), int64 [P, 3]."""
    request_ids, starts = plan.rows.request_ids, plan.rows.starts
    offsets = []
    for request_id, start, num_tokens in scored:
        row = request_ids.index(request_id)
        offsets.append((row, start - starts[row], num_tokens))
    return np.array(offsets, dtype=np.int64)


def sampling_settings(
    params: SamplingParams,
    choice_index: int,
    stop_token_ids: Sequence[int],
    num_valid_tokens: int,
    allowed_token_ids: npt.NDArray[np.int32] | None = None,
) -> dict[str, Any]:
    """`params` in the native module's words; stop ids that can never be sampled are left out."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": (params.seed or 0) % 2**64,
        "choice_index": choice_index,
        "min_tokens": params.min_tokens,
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "num_prompt_logprobs": -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        "stop_token_ids": [i for i in stop_token_ids if i < num_valid_tokens],
        "logit_bias": list(params.logit_bias),
        "bad_word_ids": list(params.bad_word_ids),
        "allowed_token_ids": allowed_token_ids,
    }
