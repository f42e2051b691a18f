"""Processor time of a request's line in the log, over all threads: python -m benchmarks.request_log

The line's main cause is estimated here; where it is worked out, that takes at most 0.5 % of a thread more.
"""

from __future__ import annotations

import time

from everystop.observe.history import Answer, Client, History
from everystop.server.logs import Log
from everystop.server.request_log import RequestLog

NUM = 20_000
PER_TICK = 50
MS = 1_000_000


def ended(i: int) -> Client:
    """A request that is over."""
    client = Client(f"cmpl-{i:024x}", "", i, 1, 0, MS, 5 * MS, 20 * MS, given_name="job-7", tenant="ann")
    client.answer = Answer(200, "", 100, 64, 40, "stop", is_streamed=True)
    return client


def main() -> None:
    for log_format in ("text", "json"):
        log = Log(log_format, write=lambda data: None)
        requests = RequestLog(History(), log.say)
        clients = [ended(i) for i in range(NUM)]
        began_s = time.process_time()
        for i, client in enumerate(clients):
            requests.note(client)
            if i % PER_TICK == PER_TICK - 1:
                requests.tick(time.monotonic_ns())
        log.close()
        print(f"{log_format}: {(time.process_time() - began_s) / NUM * 1e6:.1f} µs a request")


if __name__ == "__main__":
    main()
