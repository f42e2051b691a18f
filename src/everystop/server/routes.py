"""The paths: each endpoint reads, checks and hands on; the answers are written by `streams`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from everystop import __version__
from everystop.core.errors import EverystopError, RequestError
from everystop.keys import KeyHash
from everystop.observe.history import Client
from everystop.observe.prometheus import render, render_sheets
from everystop.server import bodies, protocol, tgi
from everystop.server.aside import Aside, run_in
from everystop.server.auth import KeyGuard
from everystop.server.board import Generation, MakeChoice
from everystop.server.bodies import Bodies, read_body
from everystop.server.deadline import Deadline
from everystop.server.doorman import Doorman
from everystop.server.edge import Edge, Guard
from everystop.server.edge_metrics import edge_sheets
from everystop.server.errors import ClientGone, ModelUnknown, handle_error, handle_http_exception
from everystop.server.estimates import PARAMETER, Estimates, is_asked_for
from everystop.server.field_names import in_names
from everystop.server.inquiry import Inquiry
from everystop.server.live import LiveStreams, time_of
from everystop.server.operations import OPERATIONS
from everystop.server.origins import OriginGuard
from everystop.server.paths import GENERATIONS, PATHS, Path
from everystop.server.prompt_report import PromptReport, report_of
from everystop.server.prompts import INLINE_BYTES, PREPARE_WORKERS, Parse, Prepared, prepare
from everystop.server.protocol import MAX_USER_CHARS, Parsed
from everystop.server.query import with_known_alone
from everystop.server.replies import ChatWriter, CompletionWriter, Writer
from everystop.server.state import ServerState
from everystop.server.streams import StreamReply, WholeReply
from everystop.server.texts import ChoiceText
from everystop.server.tgi import TgiParsed
from everystop.server.tgi_replies import TgiWriter
from everystop.server.tgi_texts import TgiText
from everystop.server.tokenize import TokenPaths
from everystop.server.tracing import trace_context
from everystop.server.ui import Ui
from everystop.server.unsent import WholeResponse
from everystop.server.visibility import Viewer, caller_of, callers, salt_of
from everystop.tenants import Tenants


def make_app(
    state: ServerState,
    api_keys: Sequence[KeyHash | str] = (),
    tenants: Tenants | None = None,
    *,
    admin_keys: Sequence[KeyHash | str] = (),
    allowed_hosts: Sequence[str] = (),
) -> Edge:
    """The ASGI application over `state`; the tenants' keys let in beside `api_keys`, and `admin_keys` see all. Without
    any key, browsers are kept to the server's own pages and to `allowed_hosts`.
    """
    tenants = tenants or Tenants()
    endpoints, ui = Endpoints(state, tenants), Ui()
    known = callers(api_keys, admin_keys, tenants)
    guards: list[Guard] = [KeyGuard(known, ui.is_open)]
    if not known:
        guards.append(OriginGuard(allowed_hosts, is_loopback=state.is_loopback))
    guards.append(Doorman(state, GENERATIONS))
    routes = [*_routes(endpoints), *ui.routes()]
    handlers = {EverystopError: handle_error, ClientGone: handle_error, HTTPException: handle_http_exception}
    app = ExceptionMiddleware(Router(routes, redirect_slashes=False), handlers)
    return Edge(app, state.http, routes, ui.is_file, guards, state.refused)


def _routes(endpoints: Endpoints) -> list[Route]:
    """Who answers at each of `PATHS`."""
    answering: dict[str, Callable[[Request], Any]] = {
        "/health": endpoints.health,
        "/health/ready": endpoints.health,
        "/health/live": endpoints.health_live,
        "/version": endpoints.version,
        "/metrics": endpoints.metrics,
        "/v1/models": endpoints.models,
        "/v1/models/{name}": endpoints.model,
        "/v1/completions": endpoints.completions,
        "/v1/chat/completions": endpoints.chat,
        "/tokenize": endpoints.tokens.tokenize,
        "/detokenize": endpoints.tokens.detokenize,
        "/generate": endpoints.generate,
        "/generate_stream": endpoints.generate_stream,
        "/": endpoints.generate_either,
        "/info": endpoints.info,
        "/openapi.json": endpoints.openapi,
        "/v1/requests/{id}/explain": endpoints.explain,
        "/v1/requests/{id}": endpoints.request,
        "/ui/stream": endpoints.live,
        "/ui/past": endpoints.past,
    }
    return [Route(path.pattern, _checked(path, answering[path.name]), methods=[path.method]) for path in PATHS]


def _checked(path: Path, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Refuses the parameters that a GET does not have; probes may ask about health with any."""
    if path.method != "GET" or path.is_open:
        return endpoint
    return with_known_alone(endpoint, OPERATIONS[path.method, path.name].query)


class Endpoints:
    """One method a path."""

    def __init__(self, state: ServerState, tenants: Tenants) -> None:
        self._state = state
        self._tenants = tenants
        self._bodies = Bodies(bodies.MAX_BODIES_BYTES)
        self._streams = LiveStreams(state)
        self._workers = ThreadPoolExecutor(PREPARE_WORKERS, "everystop-prepare")
        self._aside = Aside()
        self._estimates = Estimates(state)
        self._description: bytes | None = None
        self.tokens = TokenPaths(state, self._aside)

    async def health(self, _request: Request) -> Response:
        """200 while requests are taken and the engine gets on with them, else 503; the same as `/health/ready`."""
        status, word = self._state.health()
        return _json({"status": word}, status)

    async def health_live(self, _request: Request) -> Response:
        """503 where only a new process can help, else 200."""
        status, word = self._state.live()
        return _json({"status": word}, status)

    async def version(self, _request: Request) -> Response:
        """The server's version."""
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format; before the model is there, nothing of an engine. Of figures by tenant a key shows
        those of its own tenant alone, an administrator's all.
        """
        metrics, sheets = self._state.metrics, edge_sheets(self._state)
        if metrics is None:
            text = render_sheets(sheets)
        else:
            caller, name = caller_of(request.scope), self._state.model.accepted.model_names[0]
            text = render(metrics, name, only_tenant=None if caller.sees_all else caller.tenant, sheets=sheets)
        return WholeResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _request: Request) -> Response:
        """The served names."""
        return _json({"object": "list", "data": [self._model_object(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        """One served name, or 404."""
        name = request.path_params["name"]
        if name not in self._names():
            raise ModelUnknown(f"the model {name!r} is not served here", param="model")
        return _json(self._model_object(name))

    def _names(self) -> tuple[str, ...]:
        return self._state.model.accepted.model_names

    def _model_object(self, name: str) -> dict[str, Any]:
        limit = self._state.model.accepted.max_model_len
        owner = {"object": "model", "created": self._state.created, "owned_by": "everystop"}
        return {"id": name, **owner, "max_model_len": limit}

    async def completions(self, request: Request) -> ASGIApp:
        """`POST /v1/completions`."""
        return Visit(self._state, partial(self._complete, request, protocol.parse_completion))

    async def chat(self, request: Request) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        return Visit(self._state, partial(self._complete, request, protocol.parse_chat))

    async def generate(self, request: Request) -> ASGIApp:
        """`POST /generate`, in TGI's dialect."""
        return Visit(self._state, partial(self._complete, request, tgi.parse_generate))

    async def generate_stream(self, request: Request) -> ASGIApp:
        """`POST /generate_stream`, in TGI's dialect."""
        return Visit(self._state, partial(self._complete, request, tgi.parse_generate_stream))

    async def generate_either(self, request: Request) -> ASGIApp:
        """`POST /`, in TGI's dialect: `stream` says how the answer comes."""
        return Visit(self._state, partial(self._complete, request, tgi.parse_compat))

    async def info(self, _request: Request) -> Response:
        """What is served, as TGI describes it."""
        return _json(tgi.info(self._state.model))

    async def openapi(self, request: Request) -> Response:
        """The description of all that is served here."""
        if self._description is None:
            from everystop.server.openapi import describe

            has_keys = "caller" in request.scope
            self._description = msgspec.json.encode(describe(request.app.routes, has_keys=has_keys))
        return WholeResponse(self._description, media_type="application/json")

    async def live(self, request: Request) -> ASGIApp:
        """What happens in the engine, as it happens, and as far as the caller may see."""
        return self._streams.open(Viewer(self._state.history, caller_of(request.scope)))

    async def past(self, request: Request) -> Response:
        """What the stream told before a time, `before_ns`, as far as the caller may see."""
        before_ns = time_of(request.query_params.getlist("before_ns"))
        return WholeResponse(
            await self._streams.past(Viewer(self._state.history, caller_of(request.scope)), before_ns),
            media_type="application/json",
        )

    async def _complete(self, request: Request, parse: Parse) -> ASGIApp:
        queue = self._state.board.queue
        with self._bodies.room() as take_room:
            body = await read_body(request, take_room)
            read_ns = request.scope.get("received_ns") or time.monotonic_ns()
            queue.check_bytes(len(body), time.monotonic_ns())
            prepared = await self._prepare(request, parse, body)
        queue.note_counted(len(body), sum(map(len, prepared.prompts)))
        deadline = Deadline.of(read_ns, prepared.parsed.timeout_s, self._state.max_request_s)
        if deadline is not None:
            deadline.check()
        try:
            return self._open(request, prepared, read_ns, deadline)
        except RequestError as error:
            raise in_names(error, prepared.parsed.names) from None

    def _open(self, request: Request, prepared: Prepared, read_ns: int, deadline: Deadline | None) -> ASGIApp:
        """Hand the request to the engine; returns what answers it."""
        model, (parsed, prompts, params) = self._state.model, prepared
        report, tenant = report_of(prompts, params, parsed.wishes, model.texts), self._tenant_of(request, parsed)
        generation = self._state.board.open(
            prompts,
            params,
            tenant=tenant,
            priority=parsed.priority,
            cache_salt=salt_of(caller_of(request.scope), tenant, parsed.cache_salt),
            ttft_target_ns=parsed.ttft_target_ns,
            itl_target_ns=parsed.itl_target_ns,
            make_choice=_choices_of(parsed, report),
            report=report,
        )
        writer = _writer(parsed, generation, model.fingerprint)
        request.scope["answer_name"] = writer.id
        client = _client(request.scope, writer.id, generation, read_ns, tenant)
        client.trace_context = trace_context(request.scope, self._state.trace_headers)
        request.scope["answered_client"] = client
        self._state.came(client)
        reply = StreamReply if parsed.stream else WholeReply
        return reply(self._state, generation, client, writer, params.n, parsed.wishes, deadline, parsed.names)

    async def _prepare(self, request: Request, parse: Parse, body: bytes) -> Prepared:
        """What a body asks for, with its prompts as token ids; a large one is worked on in a thread, and has its place
        in the queue meanwhile. Raises ClientGone if nobody waits for it by then.
        """
        queue = self._state.board.queue

        def admit(parsed: Parsed, num_prompts: int, num_reserved: int = 0) -> None:
            queue.check_num(num_prompts * parsed.params.n, num_reserved=num_reserved)
            tenant = self._tenant_of(request, parsed)
            queue.check_tenant(tenant, parsed.params.n, num_prompts, time.monotonic_ns())

        work = partial(prepare, self._state.model, parse, body)
        if len(body) <= INLINE_BYTES and not self._state.model.is_chat_slow():
            return work(admit)
        with queue.reserved(len(body)):
            prepared = await run_in(self._workers, partial(work, partial(admit, num_reserved=1)))
        self._state.check_open()
        if request.scope.get("has_left", _stays)():
            raise ClientGone
        return prepared

    async def explain(self, request: Request) -> Response:
        """Why a request takes, or took, as long as it does, and how long it would have taken otherwise."""
        name, caller = request.path_params["id"], caller_of(request.scope)
        if is_asked_for(request.query_params.getlist(PARAMETER)):
            told = await self._estimates.explain(request.scope, caller, partial(self._inquiry(request).client, name))
            return WholeResponse(told, media_type="application/json")
        self._aside.check()
        explain = self._inquiry(request).explain(name)
        refusal = self._estimates.refusal(caller)
        more = {"why_no_what_if": None if refusal is None else str(refusal)}
        return await self._aside.run(request.scope, lambda: _json(explain().as_data() | more))

    async def request(self, request: Request) -> Response:
        """Where a request stands, and while it waits, for what."""
        self._state.history.catch_up()
        await self._state.see_line()
        return _json(self._inquiry(request).look(request.path_params["id"]))

    def _inquiry(self, request: Request) -> Inquiry:
        self._state.history.catch_up()
        return Inquiry(self._state.history, caller_of(request.scope))

    def _tenant_of(self, request: Request, parsed: Parsed) -> str:
        """Whose request it is: the key says, else the header and then the body where the server believes them."""
        header = self._tenants.header
        names = request.headers.getlist(header) if header else []
        if len(names) > 1:
            raise RequestError(f"{len(names)} headers {header} came with the request; send one", code="invalid_value")
        if names and len(names[0]) > MAX_USER_CHARS:
            message = f"the header {header} has {len(names[0]):,} characters; at most {MAX_USER_CHARS} are taken"
            raise RequestError(message, code="invalid_value")
        return caller_of(request.scope).tenant or "".join(names) or parsed.user


class Visit:
    """An ASGI response that counts as open from the reading of the body to the last byte of the answer."""

    def __init__(self, state: ServerState, answer: Callable[[], Any]) -> None:
        self._state = state
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._state.visit():
            reply = await self._answer()
            await reply(scope, receive, send)


def _stays() -> bool:
    """A client without a connection that could end."""
    return False


def _client(scope: Scope, name: str, generation: Generation, received_ns: int, tenant: str) -> Client:
    return Client(
        name,
        caller_of(scope).owner,
        generation.first_id,
        len(generation.choices),
        received_ns,
        generation.submitted_ns,
        given_name=scope.get("given_name", ""),
        tenant=tenant,
    )


def _choices_of(parsed: Parsed, report: PromptReport | None) -> MakeChoice:
    if isinstance(parsed, TgiParsed):
        return TgiText
    return ChoiceText if report is None else report.make_choice


def _writer(parsed: Parsed, generation: Generation, fingerprint: str | None) -> Writer:
    if isinstance(parsed, TgiParsed):
        return TgiWriter(parsed.tgi, generation)
    logprobs = parsed.params.logprobs
    marks = {"system_fingerprint": fingerprint, **({"service_tier": "default"} if parsed.wishes.tier else {})}
    options: dict[str, Any] = {"include_usage": parsed.wishes.usage, "marks": marks, "report": generation.report}
    if parsed.messages:
        return ChatWriter(parsed.model, logprobs=logprobs is not None, **options)
    return CompletionWriter(parsed.model, num_logprobs=logprobs, **options)


def _json(value: Any, status: int = 200) -> Response:
    return WholeResponse(msgspec.json.encode(value), status, media_type="application/json")
