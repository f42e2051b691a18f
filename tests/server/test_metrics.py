"""`/metrics` of a running server: against its record, against what dashboards ask for, and within bounds."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.observe.dashboards import VLLM_QUERIES, expressions, names_in, recorded
from tests.observe.scrapes import Sample, from_events, samples_of
from tests.server.parrot import MODEL, ParrotServer, parrot, wait_until

from everystop.core.events import Event
from everystop.core.plan import StepPlan
from everystop.core.policy import PolicySettings, make_policy
from everystop.observe.metrics import Metrics
from everystop.observe.prometheus import render
from everystop.observe.recorder import Recorder
from everystop.observe.thread_share import free
from everystop.sim.recount import metrics_of_record
from everystop.tenants import Tenant, Tenants

COMPLETIONS = "/v1/completions"


def samples(server: ParrotServer) -> dict[Sample, float]:
    return samples_of(server.get("/metrics")[1])


def ask(server: ParrotServer, number: int) -> None:
    """One of many requests: whole or streamed, with choices, some left by their clients, some refused."""
    body: dict[str, object] = {"prompt": "every stop " * (1 + number % 9), "max_tokens": 5 + number % 40}
    body |= {"ignore_eos": True, "n": 1 + (number % 5 == 0), "stream": number % 3 == 0, "priority": -number}
    if number % 7 == 3:
        connection = server.connect()
        with contextlib.closing(connection):
            connection.request("POST", COMPLETIONS, json.dumps({**body, "max_tokens": 250, "stream": True}))
            connection.getresponse().read(1)
        return
    if number % 11 == 5:
        body |= {"min_tokens": 2, "allowed_token_ids": [2], "stop_token_ids": [2]}
    server.request("POST", COMPLETIONS, body)


def test_while_loading_the_state_http_and_the_process_are_there_without_a_models_name() -> None:
    with parrot(hold_loading=True) as server:
        wait_until(lambda: server.get("/health")[0] == 503)
        assert server.complete("a")[0] == 503
        found = samples(server)
        named = {name: value for (name, labels), value in found.items() if not labels}
        assert named["everystop_ready"] == 0
        assert named["everystop_oldest_waiting_seconds"] == named["everystop_engine_silent_seconds"] == 0
        assert named["process_cpu_seconds_total"] > 0
        assert http(server, handler=COMPLETIONS, status="503") == 1
        assert server.metric("http_errors_total", 'error="Loading"') == 1
        assert server.metric("build_info") == 1
        assert not [labels for _, labels in found if "model_name" in dict(labels)]
        server.load_gate.set()
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.metric("ready", f'model_name="{MODEL}"') == 1
        assert http(server, handler=COMPLETIONS, status="503") == 1


def test_each_metric_agrees_with_the_record_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.gz"
    recorder = Recorder(path, "priority", PolicySettings())
    policy = make_policy("priority")
    with parrot(
        recorder=recorder, policy=policy, has_priorities=True, num_blocks=24, max_num_seqs=4, max_model_len=512
    ) as server:
        server.runner.step_s = 0.001
        server.service._aftermath._share = free()  # nobody is left out
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: ask(server, number), range(60)))
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)

        def num_told() -> float:
            return server.metric("request_blame_requests_total")

        num_clients = len(server.service.state.history.clients)
        wait_until(lambda: num_told() == num_clients)
        live = from_events(samples(server))
    again = from_events(samples_of(render(metrics_of_record(path), MODEL)))
    assert live.keys() == again.keys()
    assert {key: (live[key], again[key]) for key in live if live[key] != again[key]} == {}
    values = {name: value for (name, labels), value in live.items() if len(labels) == 1}
    assert values["everystop_num_preemptions_total"] > 0
    assert values["everystop_prefix_cache_hits_total"] > 0
    assert values["everystop_time_to_first_token_seconds_count"] > 50
    by_label = {(name, labels[0][1]): value for (name, labels), value in live.items() if len(labels) == 2}
    assert by_label["everystop_request_success_total", "abort"] > 0
    assert by_label["everystop_requests_refused_total", "RequestError"] > 0


def test_blame_sums_to_the_time_of_all_answers() -> None:
    with parrot() as server:
        server.runner.step_s = 0.002
        server.service._aftermath._share = free()
        for number in range(5):
            assert server.complete("abcdef" * (number + 1))[0] == 200
        wait_until(lambda: server.metric("request_blame_requests_total", "explained") == 5)
        clients = list(server.service.state.history.clients.values())
        whole_ns = sum((client.delivered_ns or 0) - client.received_ns for client in clients)
        assert server.metric("request_blame_seconds_total") == pytest.approx(whole_ns / 1e9, abs=1e-9)
        assert server.metric("request_blame_seconds_total", 'cause="decode"') > 0


def test_everything_that_dashboards_for_vllm_ask_for_is_there(server: ParrotServer) -> None:
    server.complete("abc")
    found = samples(server)
    names = {name for name, _ in found}
    assert set(VLLM_QUERIES) <= names
    for name, labels in found:
        if name.startswith("vllm:"):
            assert dict(labels)["model_name"] == MODEL
            assert dict(labels)["engine"] == "0"


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_our_dashboard_and_rules_ask_only_for_what_is_there(busy_names: set[str], where: str, expression: str) -> None:
    asked = names_in(expression)
    assert asked, expression
    assert asked <= busy_names | recorded() | {"up"}, where


@pytest.fixture(scope="module")
def busy_names() -> set[str]:
    """The names of all samples after a run with an answer, a refusal and an error."""
    with parrot(tenants=Tenants(by_name={"gold": Tenant()})) as server:
        server.complete("abc")
        server.complete("abc", min_tokens=2, allowed_token_ids=[2], stop_token_ids=[2])
        server.get("/nowhere")
        with server.held():
            pass
        wait_until(lambda: server.metric("request_success_total", "abort") == 1)
        return {name for name, _ in samples(server)}


def test_counters_never_fall_and_gauges_end_at_zero_when_everybody_leaves() -> None:
    with parrot(num_blocks=16, max_num_seqs=4) as server:
        server.runner.step_s = 0.03  # nobody reaches the end of the cache before all have left
        seen: dict[Sample, float] = {}

        def look() -> None:
            found = samples(server)
            fallen = {
                key: (seen[key], value)
                for key, value in found.items()
                if value < seen.get(key, value) and key[0].endswith(("_total", "_bucket", "_count", "_sum"))
            }
            assert fallen == {}
            seen.update(found)

        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for _ in range(7):
                    stack.enter_context(server.held(prompt="x" * 40))
                look()
            wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)
            look()
        for name in ("kv_cache_usage_perc", "slot_occupancy_ratio", "oldest_waiting_seconds", "engine_silent_seconds"):
            wait_until(lambda name=name: server.metric(name) == 0)
        assert server.metric("kv_blocks", 'state="used"') == 0
        assert server.metric("request_success_total", "abort") == 21
        assert server.metric("requests_aborted_total", 'error="ClientGone"') == 21
        assert server.metric("request_prompt_tokens_count") == 21


def test_gauges_are_zero_and_counters_stay_when_the_engine_has_died() -> None:
    with parrot() as server:
        server.complete("abc")
        before = server.metric("generation_tokens_total")
        failures: list[int] = []

        def fail(plan: StepPlan) -> None:
            raise RuntimeError("the device is gone")

        with contextlib.ExitStack() as stack:
            stack.enter_context(server.held())
            server.runner.before_step = fail
            wait_until(lambda: server.get("/health")[0] == 503)
            failures.append(1)
        assert server.metric("num_requests_running") == server.metric("kv_cache_usage_perc") == 0
        assert server.metric("ready") == 0
        assert server.metric("generation_tokens_total") >= before
        assert server.metric("requests_aborted_total", 'error="EngineDead"') == 1


def test_metrics_that_fail_cost_neither_the_engine_nor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Metrics, event: Event) -> None:
        raise ValueError("a counter went backwards")

    with parrot() as server:
        monkeypatch.setattr(Metrics, "_count", fail)
        for _ in range(20):
            assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        metrics = server.service.state.metrics
        assert metrics is not None
        wait_until(lambda: metrics.num_failures >= 20 and not metrics._inbox)
        assert server.get("/health")[0] == 200
        wait_until(lambda: all(trail.is_over for trail in server.service.state.history.trails.values()))


def http(server: ParrotServer, **labels: str) -> float:
    """The number of requests with these labels."""
    found = {key: value for key, value in samples(server).items() if key[0] == "http_requests_total"}
    return sum(value for (_, own), value in found.items() if labels.items() <= dict(own).items())


def test_http_requests_are_counted_by_route_method_and_status() -> None:
    with parrot(api_keys=["key"]) as server:
        key = {"authorization": "Bearer key"}
        server.request("POST", COMPLETIONS, {"prompt": "abc"}, key)
        server.request("POST", COMPLETIONS, {"prompt": "abc", "stream": True}, key)
        server.request("POST", COMPLETIONS, {"prompt": "abc", "nonsense": 1}, key)
        server.request("POST", COMPLETIONS, {"prompt": "abc"})
        server.get("/v1/models/nobody", key)
        server.get("/v1/models/parrot", key)
        server.get("/v1/requests/x/explain", key)
        server.get("/v1/completions", key)
        server.get("/ui/api.js")
        server.request("GET", "/health", headers={"x-request-id": "a b"})
        expected = {
            ("/ui/{file}", "GET", "200"): 1,
            (COMPLETIONS, "POST", "200"): 2,
            (COMPLETIONS, "POST", "400"): 1,
            (COMPLETIONS, "POST", "401"): 1,
            ("/v1/models/{name:path}", "GET", "404"): 1,
            ("/v1/models/{name:path}", "GET", "200"): 1,
            ("/v1/requests/{id:path}/explain", "GET", "404"): 1,
            (COMPLETIONS, "GET", "405"): 1,
            ("/health", "GET", "400"): 1,
        }
        errors = {
            "UnsupportedField": 1,
            "Unauthorized": 1,
            "ModelUnknown": 1,
            "RequestUnknown": 1,
            "method_not_allowed": 1,
            "RequestError": 1,
        }

        def counted() -> tuple[dict[tuple[str, ...], float], dict[str, float]]:
            found = samples_of(server.get("/metrics", key)[1])
            by_handler = {
                tuple(dict(labels)[name] for name in ("handler", "method", "status")): value
                for (name, labels), value in found.items()
                if name == "http_requests_total"
            }
            for own in (("/metrics", "GET", "200"), ("/health", "GET", "200"), ("/health", "GET", "503")):
                by_handler.pop(own, None)  # of those who look
            return by_handler, {
                dict(labels)["error"]: n for (name, labels), n in found.items() if "http_errors" in name
            }

        with contextlib.suppress(AssertionError):  # an answer is there a moment before it is counted
            wait_until(lambda: counted() == (expected, errors), 20)
        assert counted() == (expected, errors)


def test_http_times_and_sizes_are_those_of_whole_requests() -> None:
    with parrot() as server:
        server.runner.step_s = 0.01
        body = {"prompt": "abc"}
        _, headers, answer = server.request("POST", COMPLETIONS, body)
        server.request("POST", COMPLETIONS, {**body, "stream": True})
        found = {
            (name, dict(labels).get("le")): value
            for (name, labels), value in samples(server).items()
            if dict(labels).get("handler") == COMPLETIONS
        }
        assert int(headers["content-length"]) == len(answer)
        assert found["http_response_size_bytes_sum", None] == len(answer)
        assert found["http_response_size_bytes_count", None] == 1, "a stream does not say how long it will be"
        assert found["http_request_size_bytes_count", None] == 2
        assert found["http_request_size_bytes_sum", None] == len(json.dumps(body)) + len(
            json.dumps({**body, "stream": True})
        )
        assert found["http_request_duration_seconds_count", None] == 2
        assert found["http_request_duration_seconds_sum", None] > 2 * 4 * 0.01
        assert server.metric("http_requests_open") == 1, "the one that asks"


def test_clients_that_leave_before_an_answer_are_counted_as_such() -> None:
    with parrot() as server:
        with server.held():
            pass
        wait_until(lambda: http(server, handler=COMPLETIONS, status="499") == 1)
        assert http(server, status="500") == 0


def test_an_unforeseen_error_is_counted_as_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with parrot() as server:
        monkeypatch.setattr("everystop.server.routes.prepare", fail)
        assert server.complete("abc")[0] == 500
        wait_until(lambda: http(server, handler=COMPLETIONS, status="500") == 1)
        assert server.metric("http_errors_total", "ZeroDivisionError") == 1


def test_a_thousand_names_and_paths_do_not_grow_the_series() -> None:
    with parrot(tenants=Tenants(user=True)) as server:
        connection = server.connect()

        def send(method: str, path: str, body: object = None) -> None:
            connection.request(method, path, None if body is None else json.dumps(body))
            connection.getresponse().read()

        def ask_for(name: str, *, is_tenant: bool) -> None:
            if is_tenant:
                send("POST", COMPLETIONS, {"prompt": "a", "user": name})
            send("POST", COMPLETIONS, {"prompt": "a", "model": name})
            send("GET", f"/v1/models/{name}")
            send("GET", f"/{name}/{name}")

        with contextlib.closing(connection):
            ask_for("first", is_tenant=True)
            wait_until(lambda: server.metric("num_requests_running") == 0)
            before = len(samples(server))
            for i in range(1000):
                ask_for(f"name-{i}", is_tenant=i % 5 == 0)
        wait_until(lambda: server.metric("num_requests_running") == 0)
        text = server.get("/metrics")[1]
        assert b"name-" not in text
        assert len(samples_of(text)) == before


def test_a_scrape_does_not_disturb_those_who_stream() -> None:
    """Scrapes by several at once, while somebody streams."""
    with parrot() as server:
        server.runner.step_s = 0.002
        done = threading.Event()

        def scrape() -> int:
            num = 0
            while not (num and done.is_set()):
                assert server.get("/metrics")[0] == 200
                num += 1
                time.sleep(0.01)
            return num

        with ThreadPoolExecutor(2) as pool:
            scrapers = [pool.submit(scrape) for _ in range(2)]
            events = server.events(COMPLETIONS, {"prompt": "abc" * 20})
            done.set()
            assert all(scraper.result() > 0 for scraper in scrapers)
        assert events[-1] == "[DONE]"
