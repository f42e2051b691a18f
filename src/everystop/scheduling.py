"""From the configuration to what a scheduler takes; a real server and a simulated one are set up by the same lines.

It must not know what runs the plans: a setting of the scheduler that is read here counts for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystop.config import Config
from everystop.config.rules import POLICY_OPTIONS, check_honoured
from everystop.core.durations import NS_PER_MS, NS_PER_S
from everystop.core.errors import ConfigError
from everystop.core.limits import Limits
from everystop.core.policy import AGEING_NS, QUANTUM, PolicySettings, Share, Targets, make_policy
from everystop.tenants import SHARE_SETTINGS, TARGET_SETTINGS, Tenant, Tenants, read_tenants

BATCH_WAIT_MS = 50
PREFILL_PER_DECODE = 5
MAX_NUM_SCORED_TOKENS = 16  # in a step that is planned by time: as many as such a step gives to prompts at least


def scheduler_limits(config: Config, max_model_len: int) -> Limits:
    """What a step and a sequence may use; `max_model_len` is what model and KV cache allow, in tokens."""
    per_decode = config.max_prefill_per_decode
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prefill_tokens=config.max_num_prefill_tokens,
        max_model_len=max_model_len,
        admission=config.admission,
        target_itl_ns=None if config.target_itl_ms is None else round(config.target_itl_ms * NS_PER_MS),
        max_num_scored_tokens=MAX_NUM_SCORED_TOKENS,
        max_prefill_per_decode=PREFILL_PER_DECODE if per_decode is None else per_decode,
    )


def batch_wait_ms(config: Config) -> int:
    """How long a static batch waits for company at most, under a policy that has such batches."""
    return BATCH_WAIT_MS if config.batch_wait_ms is None else config.batch_wait_ms


def policy_settings(config: Config) -> PolicySettings:
    """What `make_policy` takes beside the name; raises ConfigError for a file of tenants that cannot be used."""
    return PolicySettings(
        batch_wait_ns=batch_wait_ms(config) * NS_PER_MS,
        ageing_ns=AGEING_NS if config.ageing is None else round(config.ageing * NS_PER_S),
        shares={name: _share(tenant) for name, tenant in tenants_of(config).by_name.items()},
        quantum=config.fair_quantum or QUANTUM,
        targets=Targets.from_ms(config.ttft_target_ms, config.itl_target_ms),
    )


def changed_settings(policy: str, recorded: PolicySettings, options: Mapping[str, Any]) -> PolicySettings:
    """The settings of a record with those in place that the options, by name, set for a policy.

    A record numbers its tenants, so a file must have as many as the server's had, in the same order. Raises
    ConfigError, also for an option that has no effect under the policy.
    """
    for option in options:
        check_honoured(option, policy)
    given = policy_settings(Config(policy=policy, **options)).numbered()
    if "tenants" in options and len(given.shares) != len(recorded.shares):
        raise ConfigError(
            f"--tenants has {len(given.shares)} tenants, and the file of the server that was recorded had "
            f"{len(recorded.shares)}; name as many, in the same order, since a record holds no names"
        )
    changed = {field: getattr(given, field) for option, field in POLICY_OPTIONS.items() if option in options}
    if "targets" in changed:
        ttft_ns = (given if "ttft_target_ms" in options else recorded).targets.ttft_ns
        changed["targets"] = Targets(ttft_ns, (given if "itl_target_ms" in options else recorded).targets.itl_ns)
    return replace(recorded, **changed)


def tenants_of(config: Config) -> Tenants:
    """The file of `--tenants`, or nobody; raises ConfigError, also for what the policy does not honour."""
    policy = make_policy(config.policy)
    honoured = (*(SHARE_SETTINGS if policy.has_shares else ()), *(TARGET_SETTINGS if policy.has_targets else ()))
    return read_tenants(config.tenants, honoured)


def _share(tenant: Tenant) -> Share:
    ttft_ns, itl_ns = (None if ms is None else round(ms * NS_PER_MS) for ms in (tenant.ttft_ms, tenant.itl_ms))
    return Share(
        tenant.weight, tenant.max_running, tenant.max_queued, tenant.token_rate, tenant.kv_share, ttft_ns, itl_ns
    )
