"""The OpenAPI description says what is served: all paths, all fields, all statuses; and what is not served is named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server.error_codes import CODES
from everystop.server.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from everystop.server.openapi import operations_of
from everystop.server.operations import OPERATIONS
from everystop.server.paths import GENERATIONS, PATHS
from everystop.server.tgi import COMPAT_FIELDS, GENERATE_PARAMETERS


def description_of(server: ParrotServer, headers: dict[str, str] | None = None) -> dict[str, Any]:
    status, body = server.get("/openapi.json", headers)
    assert status == 200
    description: dict[str, Any] = json.loads(body)
    return description


def served(server: ParrotServer) -> set[tuple[str, str]]:
    """The app's own table of routes."""
    routes = server.service._http.config.app.routes
    assert len(routes) > 15
    return {
        (method, re.sub(r"{(\w+):path}", r"{\1}", route.path))
        for route in routes
        for method in route.methods
        if method != "HEAD"
    }


def test_every_route_is_described_and_nothing_else(server: ParrotServer) -> None:
    paths = description_of(server)["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == served(server)


def test_every_operation_of_the_table_is_served(server: ParrotServer) -> None:
    assert set(OPERATIONS) == {(path.method, path.name) for path in PATHS} <= served(server)


def test_a_route_that_nobody_described_is_an_error() -> None:
    from starlette.routing import Route

    async def nothing(request: object) -> None:
        """Never called."""

    with pytest.raises(KeyError):
        list(operations_of([Route("/new", nothing, methods=["GET"])]))


@pytest.mark.parametrize(
    ("path", "rows"),
    [("/v1/chat/completions", CHAT_FIELDS), ("/v1/completions", COMPLETION_FIELDS), ("/", COMPAT_FIELDS)],
)
def test_every_field_is_described(server: ParrotServer, path: str, rows: dict[str, Any]) -> None:
    body = description_of(server)["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(rows)
    assert body["required"] == [next(name for name in ("messages", "prompt", "inputs") if name in rows)]


def test_parameters_of_tgi_are_described(server: ParrotServer) -> None:
    body = description_of(server)["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    parameters = body["properties"]["parameters"]["anyOf"][0]
    assert set(parameters["properties"]) == set(GENERATE_PARAMETERS)
    assert parameters["properties"]["grammar"]["anyOf"][0]["enum"] == [None]


def test_parameters_behind_a_path_are_described(server: ParrotServer) -> None:
    """Their types, whether they are needed, and how wrong ones are answered."""
    paths = description_of(server)["paths"]
    past, explain = paths["/ui/past"]["get"], paths["/v1/requests/{id}/explain"]["get"]
    [before_ns], [what_if] = ([one for one in path["parameters"] if one["in"] == "query"] for path in (past, explain))
    assert (before_ns["name"], before_ns["required"]) == ("before_ns", True)
    assert before_ns["schema"] == {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    assert server.get(f"/ui/past?before_ns={10**18 - 1}")[0] == 200
    assert server.get(f"/ui/past?before_ns={10**18}")[0] == 400
    assert (what_if["name"], what_if["required"], what_if["schema"]) == ("what_if", False, {"type": "boolean"})
    for parameter, path in ((before_ns, past), (what_if, explain)):
        named = re.findall(r"(\d{3}) (\w+)", parameter["description"])
        assert ("400", "invalid_value") in named
        for status, code in named:
            assert CODES[code].status == int(status)
            assert status in path["responses"]
    assert {"429", "503"} <= set(past["responses"])
    assert {"429", "503"} <= set(paths["/ui/stream"]["get"]["responses"])


def test_generations_may_be_refused_in_these_ways(server: ParrotServer) -> None:
    paths = description_of(server)["paths"]
    assert set(paths["/v1/completions"]["post"]["responses"]) == {
        "200", "400", "403", "404", "413", "415", "429", "500", "503", "504"
    }  # fmt: skip
    assert set(paths["/generate"]["post"]["responses"]) == {
        "200", "400", "403", "413", "415", "422", "424", "429", "500", "503", "504"
    }  # fmt: skip
    assert "Retry-After" in paths["/v1/completions"]["post"]["responses"]["429"]["headers"]


def test_keys_are_described_where_there_are_some(server: ParrotServer) -> None:
    assert "security" not in description_of(server)["paths"]["/v1/models"]["get"]
    with parrot(api_keys=("k",)) as guarded:
        assert guarded.get("/openapi.json")[0] == 401
        paths = description_of(guarded, {"authorization": "Bearer k"})["paths"]
    assert {"key": []} in paths["/v1/models"]["get"]["security"]
    assert {"401", "403"} & set(paths["/v1/models"]["get"]["responses"]) == {"401"}
    for path in ("/health", "/health/live", "/health/ready", "/ui"):
        assert "security" not in paths[path]["get"]
        assert not {"401", "403"} & set(paths[path]["get"]["responses"])


def test_names_of_operations_are_unique(server: ParrotServer) -> None:
    paths = description_of(server)["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))


# What is not served.


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/images/generations", "/x"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_named_beside_those_that_are_served(server: ParrotServer, method: str, path: str) -> None:
    status, _, body = server.request(method, path)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "not_found")
    assert error["message"].startswith(f"{path} is not served here")
    for served_path in ("/v1/chat/completions", "/generate", "/tokenize", "/health", "/v1/requests/{id}"):
        assert served_path in error["message"]


def test_a_long_path_is_cut_in_the_message(server: ParrotServer) -> None:
    assert len(server.request("GET", "/" + "a" * 20_000)[2]) < 2_000


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/tokenize", "POST"), ("POST", "/v1/models", "GET, HEAD")],
)
def test_a_wrong_method_is_told_the_right_ones(server: ParrotServer, method: str, path: str, allowed: str) -> None:
    status, headers, body = server.request(method, path)
    assert status == 405
    assert headers["allow"] == allowed
    assert json.loads(body)["error"]["message"] == f"{path} takes {allowed} only"


def test_a_wrong_method_of_tgis_paths_has_tgis_shape(server: ParrotServer) -> None:
    status, headers, body = server.request("GET", "/generate")
    assert (status, headers["allow"]) == (405, "POST")
    assert set(json.loads(body)) == {"error", "error_type"}


def test_tools_images_and_formats_are_refused_by_name(server: ParrotServer) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for fields, param in (
        ({"tools": [tool]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ):
        status, answer = server.chat("a", **fields)
        assert (status, answer["error"]["param"]) == (400, param)
    status, answer = server.chat([{"role": "user", "content": image}])
    assert status == 400
    assert answer["error"]["param"].startswith("messages[0]")


def test_the_door_knows_every_path_that_generates() -> None:
    posted = {path: operation for (method, path), operation in OPERATIONS.items() if method == "POST"}
    assert {path for path, operation in posted.items() if 504 in operation.errors} == GENERATIONS
