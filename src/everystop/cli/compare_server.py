"""`everystop compare --url`: the same requests to a server that runs already, as its clients see it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from everystop.cli import settings
from everystop.core.errors import ConfigError
from everystop.server_url import ServerUrl

if TYPE_CHECKING:
    from everystop.observe.comparison import Comparison, Run
    from everystop.sim.workloads import Workload
    from everystop.trial.repeats import Watcher

SERVER = "server"
FORMS = ("ids", "text", "chat")
NOT_TAKEN = re.compile(r"HTTP (400|404|405|422)\b")
OPTIONS = {
    "url_key": "--api-key",
    "url_ca_file": "--ca-file",
    "allow_remote": "--allow-remote",
    "prompts": "--prompts",
    "extra": "--extra",
}


def add_server(group: Any) -> None:
    """Where else the requests may go, and in which form."""
    add = group.add_argument
    add("--url", help="any OpenAI-compatible server; only what its clients see is measured")
    add("--api-key", dest="url_key", metavar="KEY", help="sent as Bearer token (default: EVERYSTOP_API_KEY)")
    settings.add_ca_file(group, dest="url_ca_file")
    add("--allow-remote", action="store_true", default=None, help="send load to another machine")
    add(
        "--prompts",
        choices=FORMS,
        help="send prompts as token ids, with ignore_eos (default), as text, or as a chat's message, the last two with "
        "standard fields alone and about as many tokens",
    )
    add("--extra", metavar="JSON", help="more fields of every request, as an object: '{\"ignore_eos\": true}'")


def check_server_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that concerns a server where none is asked."""
    given = [option for name, option in OPTIONS.items() if getattr(arguments, name) is not None]
    if arguments.url is None and given:
        raise ConfigError(f"{' and '.join(given)}: only for a server; give its --url too, or leave this out")


def on_server(
    arguments: argparse.Namespace, workload: Workload, watcher: Watcher, method: Mapping[str, Any]
) -> Comparison:
    """What the clients of a running server see; raises ConfigError, LoadError and WarmUpFailed."""
    url, extra = check_url(arguments), parse_extra(arguments.extra)
    key, tls = settings.key_to_send(arguments.url_key), url.tls(arguments.url_ca_file)
    from everystop.trial.http_client import Target
    from everystop.trial.on_server import run_on_server
    from everystop.trial.prompt_forms import PromptForm
    from everystop.trial.repeats import WarmUpFailed, compare

    form = PromptForm(arguments.prompts or FORMS[0])
    target = Target(
        url=str(url),
        tls=tls,
        model=arguments.model,
        api_key=key,
        form=form,
        extra=extra,
        timeout_s=3600.0,
        max_run_s=86_400.0,
    )

    def play(workload: Workload, policy: str, repeat: int, progress: Callable[[int, int], None]) -> Run:
        return run_on_server(workload, target, policy, repeat, progress)

    described = {"backend": "openai", "url": str(url), "model_id": arguments.model, "prompts": form, "extra": extra}
    names = [SERVER if arguments.policies is None else arguments.policies]
    try:
        return compare(
            workload, names, arguments.repeats, play, watcher, num_warm_up_jobs=16, settings={**described, **method}
        )
    except WarmUpFailed as error:
        if not NOT_TAKEN.search(str(error)):
            raise
        others = " or ".join(other for other in FORMS if other != form)
        hint = f"prompts were sent as {form}; --prompts {others} may suit the server"
        raise WarmUpFailed(f"{error} ({hint})") from None


def check_url(arguments: argparse.Namespace) -> ServerUrl:
    """The server to ask; raises ConfigError, also for what no server can be asked."""
    url = ServerUrl.parse(arguments.url)
    url.check_load(allow_remote=bool(arguments.allow_remote))
    if hasattr(arguments, "seed") or arguments.temperature:
        raise ConfigError("--url asks for greedy outputs; leave --temperature and --seed out")
    if arguments.policies is not None and "," in arguments.policies:
        raise ConfigError("--policies names several, but a server has one; give the one name to show it under")
    if arguments.policies is not None and not arguments.policies.strip():
        raise ConfigError("--policies names none; give the name to show the server under, or leave it out")
    return url


def parse_extra(text: str | None) -> dict[str, Any]:
    """Fields from JSON; raises ConfigError, also for those that the measurement needs as they are."""
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is no JSON: {error}") from None
    except RecursionError:
        raise ConfigError("--extra is nested too deeply; give one object with the fields of a request") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra must be a JSON object with fields, not {text[:60]}")
    if own := sorted({"stream", "stream_options", "prompt", "messages", "n"} & set(fields)):
        raise ConfigError(f"--extra sets {', '.join(own)}, which the measurement sets itself; leave it out")
    return fields
