"""`everystop serve` with the hash model in place of weights: its flags, scheduler, engine, record, HTTP and ends.

    python -m tests.claims.hash_server MODEL [flags of serve]

MODEL says how well it fares: `hash` well; `dies-at-once` before it serves, `dies` in its 40th step, `hangs` there.
With `--device cuda` it plans one step ahead.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import uvloop
from tests.core.hash_model import HashModelRunner

from everystop.assembly import Capacity, build_scheduler, open_recorder
from everystop.backend import choose_backend
from everystop.claims.lab import KV_CACHE_TOKENS
from everystop.cli import settings
from everystop.config import Config
from everystop.core.plan import StepPlan
from everystop.core.request import SamplingParams
from everystop.engine.engine import Engine
from everystop.scheduling import tenants_of
from everystop.server.listener import listen
from everystop.server.protocol import Accepted
from everystop.server.queue import QueueLimits
from everystop.server.service import Service
from everystop.server.state import EngineLimits, ServedModel

NUM_IDS = 32_768
BAD_STEP = 40
STEP_S = 0.003  # so that requests that are sent at once come while the first of them run


def text_of(token_ids: Iterable[int]) -> str:
    """One character a token, from 0 to o, so that equal texts are of equal tokens."""
    return "".join(chr(48 + token_id) for token_id in token_ids)


class HashDecoder:
    """As the server wants one."""

    def feed(self, token_id: int) -> str:
        return text_of((token_id,))

    def flush(self) -> str:
        return ""


class HashTexts:
    """What the server needs of a tokenizer."""

    control_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return text_of((token_id,)).encode()

    def text_decoder(self, *, skip_special_tokens: bool = True) -> HashDecoder:
        return HashDecoder()

    def with_control_stops(self, params: SamplingParams) -> SamplingParams:
        return params

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return text_of(ids)

    def spans(self, text: str, *, add_special: bool = True) -> list[tuple[int, int, int]]:
        return [(byte, byte, byte + 1) for byte in range(len(text))]


def load(config: Config) -> ServedModel:
    num_tokens = config.kv_cache_memory or KV_CACHE_TOKENS  # a byte each
    num_blocks = num_tokens // config.block_size
    capacity = Capacity(
        num_blocks=num_blocks, block_size=config.block_size, num_bytes=0, max_model_len=min(4096, num_tokens)
    )
    recorder = open_recorder(config)
    runner = HashModelRunner(
        num_blocks=num_blocks, block_size=config.block_size, before_execute=lambda plan: fare(config.model, plan)
    )
    engine = Engine(
        build_scheduler(config, capacity, recorder),
        runner,
        eos_token_ids=(),
        depth=choose_backend(config).depth,
        on_stop=None if recorder is None else recorder.close,
    )
    return ServedModel(
        engine=engine,
        texts=HashTexts(),
        accepted=Accepted((config.model,), NUM_IDS, capacity.max_model_len),
        encode=lambda text, *, add_special=True: list(text.encode()),
        encode_chat=lambda messages, options=None: [],
        limits=EngineLimits(
            policy=config.policy,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        ),
        num_blocks=num_blocks,
        queue=QueueLimits(config.max_num_queued_reqs, config.max_num_queued_tokens),
        fingerprint="fp_hash",
        recorder=recorder,
    )


def fare(name: str, plan: StepPlan) -> None:
    """Take a while, and do what the name of the model says."""
    time.sleep(STEP_S)
    if plan.step_id == BAD_STEP and name == "dies":
        print("the roof is on fire", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.step_id == BAD_STEP and name == "hangs":
        threading.Event().wait()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    settings.add_options(parser)
    config = settings.make_config(parser.parse_args(words))
    if config.model == "dies-at-once":
        print("there is no such model", file=sys.stderr)
        return 3
    sock = listen(config.host, config.port)
    url = f"http://{config.host}:{sock.getsockname()[1]}"
    service = Service(
        sock,
        lambda: load(config),
        config,
        tenants=tenants_of(config),
        on_ready=lambda model: print(f"Serving on {url} (try it)", flush=True),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(service.run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
