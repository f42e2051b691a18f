"""The clients that are tried: where each is installed, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Site:
    """Where a client finds what it needs: the server, the model's name there, its tokenizer as a folder, and a folder
    for whatever the client writes.
    """

    url: str
    model: str
    tokenizer: Path
    scratch: Path


@dataclass(frozen=True)
class ClientKind:
    """One client: its package, the lock file that pins it, and the arguments behind its environment's `bin/`.

    `lock` is dev for what the tests' own environment holds and clients for `.venv/clients`; without one the client is
    installed alone, and `package` names the version.
    """

    name: str
    package: str
    lock: str | None
    command: Callable[[Site], list[str]]

    @property
    def distribution(self) -> str:
        """The package's name without a version."""
        return self.package.partition("==")[0]


def _script(name: str) -> Callable[[Site], list[str]]:
    return lambda site: ["python", str(HERE / "drive" / name), site.url, site.model]


def _guidellm(site: Site) -> list[str]:
    return [
        *("guidellm", "run", "--backend", f"kind=openai_http,target={site.url},model={site.model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={site.tokenizer}"),
        *("--output", f"kind=json,path={site.scratch}/report.json", "--disable-console-interactive"),
    ]


def _aiperf(site: Site) -> list[str]:
    return [
        *("aiperf", "profile", "--model", site.model, "--url", site.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(site.tokenizer), "--request-count", "6", "--concurrency", "2", "--ui", "none"),
        *("--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8"),
        *("--output-artifact-dir", str(site.scratch)),
    ]


def _lm_eval(site: Site) -> list[str]:
    where = f"model={site.model},base_url={site.url}/v1/completions,tokenizer={site.tokenizer},num_concurrent=2"
    return [
        *("lm_eval", "--model", "local-completions", "--model_args", where + ",tokenizer_backend=huggingface"),
        *("--tasks", "capitals,capitals_choice", "--include_path", str(HERE / "lm_eval_tasks")),
        *("--output_path", str(site.scratch), "--log_samples"),
    ]


CLIENTS = {
    kind.name: kind
    for kind in (
        ClientKind("openai-python", "openai", "dev", _script("openai_python.py")),
        ClientKind("huggingface_hub", "huggingface-hub", "dev", _script("hub.py")),
        ClientKind("langchain-openai", "langchain-openai", "clients", _script("langchain_chat.py")),
        ClientKind("litellm", "litellm", "clients", _script("litellm_client.py")),
        ClientKind("lm-eval", "lm-eval", "clients", _lm_eval),
        ClientKind("guidellm", "guidellm==0.8.1", None, _guidellm),
        ClientKind("aiperf", "aiperf==0.13.0", None, _aiperf),
    )
}
