"""The clients that are tried: what each is installed from, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


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
    """One client: packages as pip takes them, and the arguments behind its environment's `bin/`."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[Site], list[str]]


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
        *("--output_path", str(site.scratch)),
    ]


CLIENTS = {
    kind.name: kind
    for kind in (
        ClientKind("openai-python", ("openai==3.57.0",), _script("openai_python.py")),
        ClientKind("huggingface_hub", ("huggingface-hub==2.4.0",), _script("hub.py")),
        ClientKind("langchain-openai", ("langchain-openai==1.7.4",), _script("langchain_chat.py")),
        ClientKind("litellm", ("litellm==1.110.2",), _script("litellm_client.py")),
        ClientKind("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.24.0"), _lm_eval),
        ClientKind("guidellm", ("guidellm==0.8.1",), _guidellm),
        ClientKind("aiperf", ("aiperf==0.13.0",), _aiperf),
    )
}
