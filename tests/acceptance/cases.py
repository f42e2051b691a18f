"""The acceptance cases: what each does, what it asserts, and the broken variants that it is shown to catch.

Case NN is `test_ac_NN_…`; where it has mutants, `check_ac_NN` is what both it and each `test_mutant_ac_NN_…` runs, the
latter with one part of the product broken on purpose. The numbers are those of a list of faults that servers of this
kind have had, in public; numbers that are missing were merged into others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One case; `mutants` are the names of its broken variants, as those of the tests that break them."""

    number: int
    does: str
    asserts: str
    mutants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As it is written everywhere."""
        return f"AC-{self.number:02}"


CASES = (
    Case(
        1,
        "a prompt of 200 tokens for a cache of 64, then one of 5",
        "400 in under 0.1 s with both numbers; the second is served",
        ("need compared with the context alone",),
    ),
    Case(
        2,
        "two requests for three quarters of the cache each, 16 tokens a step, no prefix cache",
        "both finish, and at most three times the tokens needed are computed",
        ("admitted by the next chunk",),
    ),
    Case(
        3,
        "preempted after 1, 15, 16, 17 tokens, results taken back at once or a step late",
        "the stream is the undisturbed one, each token sent once; with the model to the bit",
        ("recomputed from the prompt alone",),
    ),
    Case(
        4,
        "16 requests at a time for 2,000 steps of 8 tokens, blocks for 30 % of them, 20 seeds",
        "every answer is what the request yields alone",
        ("resumed behind what is computed",),
    ),
    Case(
        5,
        "two decoders at a block border, one free block, the lower rank first",
        "the victim is not in the plan that preempts it; both finish",
        ("victim keeps its row",),
    ),
    Case(
        6,
        "one slot, 500 tokens at priority 5, then 2 at priority 0",
        "the urgent one finishes first",
        ("full slots end admission",),
    ),
    Case(
        7,
        "one decoder beside prompts of 2,000 tokens without end, 128 tokens a step",
        "it has a token in every step",
        ("prompts first",),
    ),
    Case(
        8,
        "a prompt of 4,000 tokens, then one of 5, 128 tokens a step",
        "the short one has its first token at most 3 steps after its arrival",
        ("the first takes the whole budget",),
    ),
    Case(
        10,
        "empty prompts in all forms, a prompt wholly cached, an end token as the first",
        "400 or a normal answer; the server lives",
        ("a whole prompt from the cache", "empty prompts let in"),
    ),
    Case(
        11,
        "a prompt of three chunks, max_tokens 1",
        "one token, counted once, reason length",
        ("a token for each chunk",),
    ),
    Case(
        13,
        "aborts in nine states, each twice, of an unknown id too; 1,000 random runs",
        "no exception; every invariant after every step",
        ("stays in the line",),
    ),
    Case(
        14,
        "context 64, prompts of 62 to 65 tokens, max_tokens 1 to 3",
        "what fits is served to the token, the rest is 400 with the right numbers",
        ("off by one",),
    ),
    Case(15, "10 seconds without work", "under 2 % CPU, no step; then an answer within 20 ms"),
    Case(
        16,
        "prompts of 15, 16, 17, 31, 32, 33 tokens twice, blocks of 16; then one whose first block is gone",
        "as cold; hits are whole blocks before the last token, and none behind a hole",
        ("every token from the cache", "counts on behind a hole"),
    ),
    Case(
        17,
        "100,000 random operations on the block pool",
        "every block in one state, as many references as holders, no key finds other contents",
    ),
    Case(
        18,
        "block keys of tokens equal modulo 256 and 65,536, of moved borders and of other parents",
        "all keys differ",
        ("keys that lose something",),
    ),
    Case(19, "block keys of an adapter and of a salt with one name", "they differ"),
    Case(20, "one prompt under salts a, b and none", "found within a salt only"),
    Case(
        22,
        "300 streams, each closed after 1 to 3 events",
        "all blocks free, as many file descriptors as before; the next is served",
        ("a block lost with each client",),
    ),
    Case(
        23,
        "20,000 requests of two choices of one token",
        "resident memory grows by less than 1 MB per 10,000; every map is empty",
        ("groups are kept",),
    ),
    Case(
        24,
        "100,000 random steps of arrivals, aborts, preemptions, shared prefixes, groups and failures",
        "no answer differs from what its request yields alone",
        ("what was not computed can be found", "evicted blocks keep their keys"),
    ),
    Case(
        25,
        "log-probabilities of a prompt of three chunks, cold and warm",
        "those of one pass, to the bit; the first is null",
        ("found in the cache and left out",),
    ),
    Case(
        27,
        "eight prompts alone and in batches of 2, 4 and 8",
        "tokens and log-probabilities equal to the bit",
        ("a kernel that looks at the batch",),
    ),
    Case(
        28,
        "two plain requests and one with a bias; the first ends, another joins",
        "the biased one is affected in every step, nobody else ever",
        ("settings by row",),
    ),
    Case(
        29,
        "seed 42 alone, beside an unseeded request, second in a row, after a preemption, with n = 3",
        "the same stream to the bit; the choices differ",
        ("one generator for all", "the choice does not count"),
    ),
    Case(
        30,
        "greedy rows with a banned best token and with tied tokens, beside a sampled row",
        "every log-probability is finite; the lowest of tied ids is taken",
        ("greedy as a tiny temperature",),
    ),
    Case(31, "temperatures 0, 1e-40, 1e-4, -1, NaN and text", "greedy, greedy, sampled, and 400 for the rest"),
    Case(
        32,
        "one row's logits become NaN in its fifth step",
        "that request fails, its blocks are not found again; the others are as alone",
        ("sanitised", "blocks of the failed row stay"),
    ),
    Case(
        33,
        "top-k, top-p and ties at their edges, both samplers",
        "at least one token, exactly k, the lowest ids of a tie",
        ("samplers of others",),
    ),
    Case(34, "penalties after a prompt that repeats itself", "presence and frequency see the output, repetition both"),
    Case(
        35,
        "ids outside the vocabulary, beyond 64 bits and of other types in every field that takes ids",
        "400 each; the server is healthy",
        ("ids are not looked at",),
    ),
    Case(
        37,
        "echo with max_tokens 0 and logprobs 1",
        "the prompt's log-probabilities, the first null; the offsets join to the text",
        ("the prompt without its numbers",),
    ),
    Case(38, "a bfloat16 file with a weight beyond float16; --dtype float16", "exact and finite; refused; dtype told"),
    Case(
        39,
        "emoji, Thai, Chinese, line separators, prompts that end inside a character",
        "the deltas joined are the text, and the text is what its bytes are",
        ("each token decoded alone", "each token of the model alone", "line separators as they are"),
    ),
    Case(
        40,
        "stop strings across tokens, inside one, begun and not finished, two at once; empty and too many",
        "nothing of a stop is sent, all else is, and usage counts the last token; 400",
        ("nothing is held back", "what was held back is lost"),
    ),
    Case(
        41,
        "streamed or not, n 1 and 3, include_usage absent, null, {}, false and true",
        "one reason a choice, one event with usage if asked for, the same numbers, one [DONE]",
        ("empty options ask for usage", "a prompt counted for each choice"),
    ),
    Case(
        42,
        "every form of prompt with n = 2, and forms that are none",
        "the index is prompt · n + choice; 400",
        ("choice by choice",),
    ),
    Case(
        43,
        "a step fails during a stream; n = 0 with stream",
        "an error event, [DONE], the end within a second; 400",
        ("nobody tells the streams",),
    ),
    Case(
        44,
        "clients leave in the queue, while prefilling and while decoding, streamed and not",
        "their requests are gone at most 5 steps later",
        ("nobody watches the connection",),
    ),
    Case(46, "what a template forbids, and no template", "400 with the reason; completions work"),
    Case(47, "a tokenizer with and without begin-of-text, a template that writes it or not", "it comes exactly once"),
    Case(48, "messages with tool calls, empty text, parts, images, nested lists, no role", "as documented, or 400"),
    Case(50, "half a surrogate pair in prompt, messages, stop and salt", "400"),
    Case(52, "end tokens in the configuration, the generation configuration, the tokenizer, GGUF", "each ends"),
    Case(
        54,
        "one model as safetensors, GGUF F16 and Q8_0; grouped heads, tied embeddings",
        "q and k have a cosine above 0.999; with F16 logits and text are equal to the bit",
        ("rows stay in pairs", "qwen is reordered too"),
    ),
    Case(55, "a corpus through each kind of tokenizer; unknown and missing kinds", "ids as the reference; refused"),
    Case(
        56,
        "a shard missing, cut off or emptied, a stale index, a GGUF file cut off",
        "the program ends with an error that names the file",
        ("whatever lies there is taken", "zeros behind the end"),
    ),
    Case(
        57,
        "the engine's thread is killed, or stands still",
        "/health is 503 within 5 s; those who wait get errors",
        ("healthy as long as it exists", "nobody tells the waiters"),
    ),
    Case(
        58,
        "SIGTERM with 3 running and 3 queued; a second SIGTERM, or the end of the time for it",
        "503 with Retry-After for newcomers, all six whole, exit 0; then an error for each at once",
        ("the drain waits for nobody",),
    ),
    Case(
        59,
        "10,000 requests at a queue of 100 that is full",
        "429 or 503 with Retry-After, memory flat; afterwards all is served again",
        ("a queue without end",),
    ),
    Case(60, "the hook of the metrics throws, clients leave, others are preempted", "gauges 0, no counter falls"),
    Case(63, "a port that is taken", "an error before anything is loaded, within a second of CPU time"),
    Case(
        64,
        "every route, odd paths, odd Host headers and odd keys without a valid key",
        "401 or 400; every key is compared, digests only, in constant time",
        ("only one prefix is guarded", "the host has a say", "keys compared byte by byte"),
    ),
    Case(
        65,
        "n, prompts, logprobs, stops, biases, headers, bodies and nesting beyond all bounds, twice",
        "4xx, memory flat, probes answered all the while",
        ("no bound",),
    ),
)

NO_MUTANT_NEEDED = {15, 17, 19, 20, 31, 34, 38, 46, 47, 48, 50, 52, 55, 60, 63}
"""Cases that are trusted without a broken variant."""
