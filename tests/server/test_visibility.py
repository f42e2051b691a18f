"""Who sees which requests: over HTTP, by keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_live import watching

from everystop.core.errors import ConfigError
from everystop.keys import hash_key
from everystop.observe.history import Client, History
from everystop.server.visibility import ANYBODY, Viewer, callers
from everystop.tenants import Tenant, Tenants

COMPLETIONS = "/v1/completions"
TENANTS = Tenants(by_name={"gold": Tenant(keys=("g1", "g2")), "tin": Tenant(keys=("t1",))}, header="x-tenant")
OWNERS = {"a": "a", "b": "b", "g1": "gold", "g2": "gold", "t1": "tin", "root": "root"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[ParrotServer]:
    with parrot(api_keys=("a", "b"), admin_keys=("root",), tenants=TENANTS) as server:
        yield server


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def send(server: ParrotServer, key: str | None, **headers: str) -> str:
    """The id of the answer to a request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, body = server.post(COMPLETIONS, {"prompt": "abc"}, bearer(key) | named)
    assert status == 200
    return str(body["id"])


def ask(server: ParrotServer, name: str, key: str | None, what: str = "/explain") -> tuple[int, Any]:
    status, body = server.get(f"/v1/requests/{name}{what}", bearer(key))
    return status, json.loads(body)


@pytest.mark.parametrize("what", ["", "/explain"])
@pytest.mark.parametrize("sender", OWNERS)
def test_only_the_owner_and_an_administrator_see_a_request(keyed: ParrotServer, sender: str, what: str) -> None:
    given = f"{sender}{len(what)}-given"
    name = send(keyed, sender, x_request_id=given)
    number = str(keyed.service.state.history.clients[name].first_request_id)
    for asked in (name, given, number, f"r{number}"):
        for asker, owner in OWNERS.items():
            expected = 200 if owner in (OWNERS[sender], "root") else 404
            assert ask(keyed, asked, asker, what)[0] == expected, (asked, asker)
        assert ask(keyed, asked, None, what)[0] == 401
        assert ask(keyed, asked, "wrong", what)[0] == 401


@pytest.mark.parametrize("what", ["", "/explain"])
def test_a_request_of_somebody_else_looks_like_none(keyed: ParrotServer, what: str) -> None:
    """Byte for byte, headers too."""
    name = send(keyed, "a")
    path = f"/v1/requests/{{}}{what}"
    answers = []
    for one in (name, "cmpl-" + "0" * 24):
        status, headers, body = keyed.request("GET", path.format(one), headers=bearer("b"))
        del headers["date"]
        answers.append((status, headers, body.replace(one.encode(), b"ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_a_name_that_somebody_else_gave_too_means_ones_own(keyed: ParrotServer) -> None:
    names = {key: send(keyed, key, x_request_id="shared") for key in ("a", "g1", "b")}
    for key, name in names.items():
        assert ask(keyed, "shared", key)[1]["id"] == name
    assert ask(keyed, "shared", "g2")[1]["id"] == names["g1"]
    assert ask(keyed, "shared", "root")[1]["id"] == names["b"]
    assert ask(keyed, "shared", "t1")[0] == 404
    spoof = send(keyed, "b", x_request_id=names["a"])
    assert ask(keyed, names["a"], "a")[1]["id"] == names["a"], "nobody can hide another's request behind his own"
    assert ask(keyed, names["a"], "b")[1]["id"] == spoof
    assert ask(keyed, names["a"], "root")[1]["id"] == names["a"]


def test_what_a_client_says_of_itself_makes_nobody_its_owner(keyed: ParrotServer) -> None:
    name = send(keyed, "a", x_tenant="tin")
    assert ask(keyed, name, "a")[0] == 200
    assert ask(keyed, name, "t1")[0] == 404


def test_without_keys_everybody_sees_all(server: ParrotServer) -> None:
    name = send(server, None)
    assert ask(server, name, None)[0] == 200
    assert ask(server, name, "whatever")[0] == 200


def test_an_administrator_is_a_client_too_and_alone_closes_the_door() -> None:
    with parrot(admin_keys=("root", "root2")) as server:
        name = send(server, "root")
        assert ask(server, name, "root2")[0] == 200
        assert ask(server, name, None)[0] == 401
        assert server.get("/v1/models")[0] == 401


def test_batch_mates_of_others_have_no_name() -> None:
    with parrot(api_keys=("a", "b"), admin_keys=("root",)) as server, ExitStack() as stack:
        server.runner.step_s = 0.005
        for given in ("a0", "a1", "b2"):
            stack.enter_context(server.held(bearer(given[0]) | {"x-request-id": given}))
        wait_until(lambda: server.scheduler.num_running == 3)
        clients = server.service.state.history.clients
        ours = {name for name, client in clients.items() if client.given_name[0] == "a"}
        [theirs] = set(clients) - ours
        wait_until(lambda: any(len(step["mates"]) == 2 for step in ask(server, "a0", "a")[1]["steps"]))
        for name, key, secrets in (("a0", "a", {theirs}), ("b2", "b", ours)):
            answer = json.dumps(ask(server, name, key)[1])
            assert not [secret for secret in secrets if secret in answer]
        assert theirs in mates(ask(server, "a0", "root")[1])
        assert mates(ask(server, "a0", "a")[1]) - ours == {None}


def mates(told: dict[str, Any]) -> set[str | None]:
    """The names of all who shared a step."""
    return {mate["id"] for step in told["steps"] for mate in step["mates"]}


def test_who_is_in_the_way_of_a_waiting_request_is_not_named_to_others() -> None:
    with parrot(api_keys=("a", "b"), max_num_seqs=1) as server, ExitStack() as stack:
        server.runner.step_s = 0.005
        for given in ("b-is-first", "b-is-second", "a-is-third"):
            stack.enter_context(server.held(bearer(given[0]) | {"x-request-id": given}))
        theirs = [one for one in server.service.state.history.clients.values() if one.given_name[0] == "b"]
        secrets = [text for client in theirs for text in (client.name, client.given_name)]
        for what in ("", "/explain"):
            wait_until(lambda what=what: ask(server, "a-is-third", "a", what)[1]["state"] == "waiting")
            answer = json.dumps(ask(server, "a-is-third", "a", what)[1])
            assert not [secret for secret in secrets if secret in answer]


def test_live_stream_names_ones_own_requests_alone() -> None:
    with parrot(api_keys=("a", "b"), admin_keys=("root",)) as server, ExitStack() as stack:
        server.runner.step_s = 0.005
        for key in ("a", "b"):
            stack.enter_context(server.held(bearer(key)))
        names = {client.owner: name for name, client in server.service.state.history.clients.items()}
        for key in ("a", "b", "root"):
            watcher = stack.enter_context(watching(server, bearer(key)))
            watcher.wait(lambda _, one=watcher: len(one.requests()) == 2)
            seen = {one["name"] for one in watcher.requests().values()}
            own = names.get(callers(("a", "b"), ("root",), Tenants())[hash_key(key)].owner)
            assert seen == (set(names.values()) if key == "root" else {own, None})
            assert watcher.messages[0]["server"]["sees"] == ("all" if key == "root" else "own")
            told = json.dumps(watcher.messages)
            assert not [name for name in names.values() if name in told and name not in seen]


def test_keys_show_nowhere(keyed: ParrotServer) -> None:
    name = send(keyed, "g1")
    history = keyed.service.state.history
    assert "g1" not in history.clients[name].owner
    assert json.dumps(ask(keyed, name, "root")[1]).count("gold") == 0


def test_a_key_of_two_kinds_is_refused_without_showing_it() -> None:
    for api_keys, tenants in ((("secret",), Tenants()), ((), Tenants(by_name={"gold": Tenant(keys=("secret",))}))):
        with pytest.raises(ConfigError, match="--admin-key") as caught:
            callers(api_keys, ("secret",), tenants)
        assert "secret" not in str(caught.value)


def test_owners_are_told_apart_whatever_tenants_are_called() -> None:
    by_key = callers(("a",), (), Tenants())
    tenants = Tenants(by_name={by_key[hash_key("a")].owner: Tenant(keys=("t",)), "admin": Tenant(keys=("u",))})
    every = callers(("a",), ("root",), tenants)
    assert len({caller.owner for caller in every.values()}) == len(every) == 4


def test_viewer_names_its_own_and_nobody_else() -> None:
    history = History()
    history.add_client(Client("cmpl-a", "key:a", 0, 2, 0, 0))
    history.add_client(Client("cmpl-b", "key:b", 2, 1, 0, 0))
    [mine] = callers(("a",), (), Tenants()).values()
    history.add_client(Client("cmpl-mine", mine.owner, 3, 1, 0, 0))
    assert [Viewer(history, mine).name_of(i) for i in range(5)] == [None, None, None, "cmpl-mine", None]
    assert [Viewer(history, ANYBODY).name_of(i) for i in range(5)] == ["cmpl-a", "cmpl-a", "cmpl-b", "cmpl-mine", "r4"]
    assert not Viewer(history, mine).sees(None)
    assert not Viewer(history, mine).sees_all


def test_metrics_tell_a_tenant_nothing_of_another(keyed: ParrotServer) -> None:
    for key in ("g1", "t1"):
        send(keyed, key)
    seen = {}
    send(keyed, "a", x_tenant="gold")
    for asker in ("g1", "t1", "a", "b", "root"):
        _, body = keyed.get("/metrics", bearer(asker))
        text = body.decode() if isinstance(body, bytes) else body
        seen[asker] = {name for name in ("gold", "tin", "other") if f'tenant="{name}"' in text}
        assert "everystop_num_requests_running" in text
    all_of_them = {"gold", "tin", "other"}
    assert seen == {"g1": {"gold"}, "t1": {"tin"}, "a": set(), "b": set(), "root": all_of_them}


@pytest.mark.parametrize("asker", ["g1", "t1", "a", "b"])
def test_no_path_names_a_tenant_to_another(keyed: ParrotServer, asker: str) -> None:
    """Whatever can be read with a key, while requests of all tenants run and wait."""
    others = {"gold", "tin"} - {OWNERS[asker]}
    with ExitStack() as stack:
        for key in ("g1", "t1", "root"):
            stack.enter_context(keyed.held(bearer(key), prompt="abc"))
        paths = [route.path for route in keyed.service._http.config.app.routes if "GET" in route.methods]
        texts = [
            keyed.get(path, bearer(asker))[1].decode() for path in paths if "{" not in path and path != "/ui/stream"
        ]
        watcher = stack.enter_context(watching(keyed, headers=bearer(asker)))
        watcher.wait(lambda messages: any(message["steps"] for message in messages))
        texts += map(json.dumps, watcher.messages)
        past = keyed.get(f"/ui/past?before_ns={10**18 - 1}", bearer(asker))[1].decode()
        strangers = {one["id"] for one in json.loads(past)["requests"] if one["name"] is None}
        watcher.wait(lambda _: strangers <= set(watcher.requests()))
        assert all(one < -1 for one in strangers)
        texts.append(past)
    for text in texts:
        assert not [name for name in others if f'"{name}"' in text]


def test_a_caller_without_keys_set_sees_all_figures() -> None:
    with parrot(tenants=Tenants(by_name={"gold": Tenant()}, header="x-tenant")) as server:
        assert server.post(COMPLETIONS, {"prompt": "abc"}, {"x-tenant": "gold"})[0] == 200
        assert 'tenant="gold"' in server.get("/metrics")[1].decode()
