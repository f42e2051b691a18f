"""From the configuration to what a scheduler takes; a real server and a simulated one are set up by the same lines.

It must not know what runs the plans: a setting of the scheduler that is read here counts for both.
"""

from __future__ import annotations

from typing import Any

from everystop.config import Config
from everystop.core.limits import Limits
from everystop.core.policy import QUANTUM, TENANT_SETTINGS, Share, Targets
from everystop.tenants import Tenant, Tenants, read_tenants

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def scheduler_limits(config: Config, max_model_len: int) -> Limits:
    """What a step and a sequence may use; `max_model_len` is what model and KV cache allow, in tokens."""
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prefill_tokens=config.max_num_prefill_tokens,
        max_model_len=max_model_len,
        admission=config.admission,
        target_itl_ns=None if config.target_itl_ms is None else round(config.target_itl_ms * NS_PER_MS),
    )


def policy_settings(config: Config) -> dict[str, Any]:
    """What `make_policy` takes beside the name; raises ConfigError for a file of tenants that cannot be used."""
    return {
        "batch_wait_ns": config.batch_wait_ms * NS_PER_MS,
        "ageing_ns": round(config.ageing * NS_PER_S),
        "shares": {name: _share(tenant) for name, tenant in tenants_of(config).by_name.items()},
        "quantum": config.fair_quantum or QUANTUM,
        "targets": Targets.from_ms(config.ttft_target_ms, config.itl_target_ms),
    }


def tenants_of(config: Config) -> Tenants:
    """The file of `--tenants`, or nobody; raises ConfigError, also for what the policy does not honour."""
    return read_tenants(config.tenants, TENANT_SETTINGS.get(config.policy, ()))


def _share(tenant: Tenant) -> Share:
    ttft_ns, itl_ns = (None if ms is None else round(ms * NS_PER_MS) for ms in (tenant.ttft_ms, tenant.itl_ms))
    return Share(
        tenant.weight, tenant.max_running, tenant.max_queued, tenant.token_rate, tenant.kv_share, ttft_ns, itl_ns
    )
