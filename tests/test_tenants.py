"""The file of tenants: what it says, and what is said when it is wrong."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from everystop.config import Config
from everystop.config.rules import POLICY_OPTIONS
from everystop.core.errors import ConfigError
from everystop.core.policy import POLICIES, QUANTUM, PolicySettings, Share, Targets, make_policy
from everystop.keys import hash_key
from everystop.observe import metrics
from everystop.scheduling import changed_settings, policy_settings
from everystop.tenants import OTHERS, SETTINGS, SHARE_SETTINGS, TARGET_SETTINGS, Tenant, Tenants, read_tenants

FILE = """
header = "X-Tenant"
user = true
[tenant.gold]
weight = 2.5
max_running = 16
max_queued = 0
token_rate = 500
kv_share = 0.25
keys = ["sk-1", "sk-2"]
[tenant."a b"]
"""
TARGETS = """
[tenant.chat]
ttft_ms = 250
itl_ms = 12.5
keys = ["sk-3"]
[tenant.batch]
ttft_ms = 60_000
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tenants.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_file_is_read_whole(tmp_path: Path) -> None:
    gold = Tenant(weight=2.5, max_running=16, max_queued=0, token_rate=500.0, kv_share=0.25, keys=("sk-1", "sk-2"))
    assert read_tenants(write(tmp_path, FILE)) == Tenants(
        by_name={"gold": gold, "a b": Tenant()}, header="x-tenant", user=True
    )


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('\ufeffheader = "X-Tenant"\n', encoding="utf-8")
    assert read_tenants(str(path)).header == "x-tenant"


def test_no_file_means_that_nobody_is_told_apart() -> None:
    assert read_tenants(None) == Tenants()


@pytest.mark.parametrize("policy", ["fair", "fair-prefix"])
def test_policy_gets_the_shares_of_the_file(tmp_path: Path, policy: str) -> None:
    config = Config(policy=policy, tenants=write(tmp_path, FILE))
    settings = policy_settings(config)
    assert settings.shares == {"gold": Share(2.5, 16, 0, 500.0, 0.25), "a b": Share()}
    assert settings.quantum == QUANTUM
    make_policy(policy, settings)


def test_times_are_those_of_the_flags_or_the_defaults() -> None:
    assert policy_settings(Config(policy="priority", ageing=2.5)).ageing_ns == 2_500_000_000
    assert policy_settings(Config(policy="static", batch_wait_ms=0)).batch_wait_ns == 0
    usual = policy_settings(Config())
    assert (usual.ageing_ns, usual.batch_wait_ns) == (10_000_000_000, 50_000_000)


def test_quantum_is_that_of_the_flag_and_of_its_policy_only() -> None:
    assert policy_settings(Config(policy="fair-prefix", fair_quantum=7)).quantum == 7
    with pytest.raises(ConfigError, match="--fair-quantum needs --policy fair-prefix; it has no effect"):
        Config(policy="fair", fair_quantum=7)


def test_what_the_policy_does_not_honour_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "[tenant.a]\nweight = 2\nkv_share = 0.5")
    with pytest.raises(ConfigError, match=r"tenant\.a\.kv_share has no effect under this --policy, only weight"):
        read_tenants(path, ("weight",))
    assert read_tenants(write(tmp_path, "[tenant.a]\nkeys = ['k']"), ()).by_name["a"].keys == (hash_key("k"),)


def test_every_setting_of_a_tenant_has_a_policy_that_honours_it() -> None:
    policies = [make_policy(name) for name in POLICIES]
    assert any(policy.has_shares for policy in policies)
    assert any(policy.has_targets for policy in policies)
    assert (*SHARE_SETTINGS, *TARGET_SETTINGS) == SETTINGS
    assert OTHERS == metrics.OTHERS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenant.a]\nweight = 0", ["tenant.a.weight", "0.001 to 1000"]),
        ("[tenant.a]\nweight = nan", ["tenant.a.weight", "nan"]),
        ('[tenant.a]\nweight = "2"', ["tenant.a.weight", "'2'"]),
        ("[tenant.a]\nmax_running = 0", ["tenant.a.max_running", "from 1"]),
        ("[tenant.a]\nmax_running = true", ["tenant.a.max_running", "True"]),
        ("[tenant.a]\nmax_queued = -1", ["tenant.a.max_queued", "-1", "from 0"]),
        ("[tenant.a]\nmax_queued = 1.0", ["tenant.a.max_queued", "1.0"]),
        ("[tenant.a]\ntoken_rate = 0", ["tenant.a.token_rate", "0.001 to 1e+09"]),
        ("[tenant.a]\ntoken_rate = inf", ["tenant.a.token_rate", "inf"]),
        ("[tenant.a]\nkv_share = 1.5", ["tenant.a.kv_share", "0.001 to 1"]),
        ("[tenant.a]\nkv_share = 0", ["tenant.a.kv_share is 0"]),
        ("[tenant.a]\nttft_ms = 0.5", ["tenant.a.ttft_ms", "0.5", "1 to 3.6e+06"]),
        ('[tenant.a]\nitl_ms = "20"', ["tenant.a.itl_ms", "'20'"]),
        ("[tenant.a]\nmax_waiting = 3", ["'max_waiting'", "max_queued, token_rate, kv_share, ttft_ms, itl_ms, keys"]),
        ("[tenant.other]", ["'other'", "in metrics"]),
        ('[tenant.a]\nkeys = ["k"]\n[tenant.b]\nkeys = ["k"]', ["a and b share a key"]),
        ('[tenants.a]\nkeys = ["k"]', ["'tenants'", "header, user, tenant"]),
        ('header = "x y"', ["header", "'x y'"]),
        ('header = "Authorization"', ["header", "'Authorization'", "no secret"]),
        ("user = 1", ["user", "true or false"]),
        ("tenant = 3", ["tenant is 3", "[tenant.gold]"]),
        ("tenant.a = 3", ["tenant.a is 3"]),
        ("user", ["is not TOML"]),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_tenants(write(tmp_path, text))
    assert [word for word in ["tenants.toml", *words] if word not in str(caught.value)] == []


@pytest.mark.parametrize("keys", ['["secret "]', '[""]', '"secret"', "[7]"])
def test_wrong_key_is_refused_without_being_shown(tmp_path: Path, keys: str) -> None:
    with pytest.raises(ConfigError, match=r"tenant\.a\.keys") as caught:
        read_tenants(write(tmp_path, f"[tenant.a]\nkeys = {keys}"))
    assert "secret" not in str(caught.value)


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        read_tenants("none.toml")


@pytest.mark.parametrize("policy", POLICIES)
def test_tenants_are_told_apart_under_every_policy(tmp_path: Path, policy: str) -> None:
    path = write(tmp_path, 'header = "X-Tenant"\n[tenant.a]\nkeys = ["k"]\n[tenant.b]')
    assert policy_settings(Config(policy=policy, tenants=path)).shares == {"a": Share(), "b": Share()}


def test_settings_come_back_from_plain_data() -> None:
    settings = PolicySettings(
        batch_wait_ns=1,
        ageing_ns=2,
        shares={"ann": Share(2.0, 3, ttft_ns=4), "bob": Share(kv_share=0.5)},
        quantum=5,
        targets=Targets(6, 7),
    )
    data = json.loads(json.dumps(settings.as_data()))
    assert PolicySettings.from_data(data) == settings
    assert PolicySettings.from_data(settings.numbered().as_data()).shares == {
        "0": settings.shares["ann"],
        "1": settings.shares["bob"],
    }


def test_headers_of_older_records_are_read() -> None:
    first = {"batch_wait_ns": 3}
    assert PolicySettings.from_data(first) == PolicySettings(batch_wait_ns=3)
    last = {"batch_wait_ns": 0, "ageing_ns": 0, "quantum": 0, "shares": [[2.0, 3, None]], "targets": [5, None]}
    assert PolicySettings.from_data(last) == PolicySettings(shares={"0": Share(2.0, 3)}, targets=Targets(5))


def test_options_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    recorded = PolicySettings(batch_wait_ns=1, ageing_ns=2, shares={"0": Share()}, quantum=5, targets=Targets(6, 7))
    assert changed_settings("static", recorded, {"batch_wait_ms": 4}) == replace(recorded, batch_wait_ns=4_000_000)
    assert changed_settings("deadline", recorded, {"itl_target_ms": 4.0}).targets == Targets(6, 4_000_000)
    assert changed_settings("deadline", recorded, {"ttft_target_ms": 4.0}).targets == Targets(4_000_000, 7)
    path = write(tmp_path, "[tenant.gold]\nweight = 3")
    assert changed_settings("fair", recorded, {"tenants": path}) == replace(recorded, shares={"0": Share(3.0)})
    with pytest.raises(ConfigError, match="has 1 tenants, and the file of the server that was recorded had 2"):
        changed_settings("fair", replace(recorded, shares={"0": Share(), "1": Share()}), {"tenants": path})
    with pytest.raises(ConfigError, match="--ageing needs --policy priority or shortest; it has no effect under"):
        changed_settings("fair", recorded, {"ageing": 4.0})


def test_every_field_of_the_settings_has_an_option_and_a_policy() -> None:
    names = {field.name for field in fields(PolicySettings)}
    assert set(POLICY_OPTIONS.values()) == names
    assert {name for policy in POLICIES for name in make_policy(policy).honours} == names


def test_policy_gets_the_targets_of_the_file_and_of_the_flags(tmp_path: Path) -> None:
    path = write(tmp_path, TARGETS)
    settings = policy_settings(Config(policy="deadline", tenants=path, ttft_target_ms=800, itl_target_ms=40))
    assert settings.shares["chat"] == Share(ttft_ns=250_000_000, itl_ns=12_500_000)
    assert settings.shares["batch"] == Share(ttft_ns=60_000_000_000)
    assert settings.targets == Targets(800_000_000, 40_000_000)
    assert policy_settings(Config(policy="deadline")).targets == Targets(1_000_000_000, None)


@pytest.mark.parametrize(
    ("policy", "text", "words"),
    [
        ("deadline", FILE, ["tenant.gold.weight has no effect", "only ttft_ms, itl_ms"]),
        ("continuous", FILE, ["tenant.gold.weight has no effect", "only keys"]),
        ("fair", TARGETS, ["tenant.chat.ttft_ms has no effect", "only weight, max_running"]),
    ],
)
def test_setting_without_effect_under_the_policy_is_refused(
    tmp_path: Path, policy: str, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_settings(Config(policy=policy, tenants=write(tmp_path, text)))
    assert [word for word in ["tenants.toml", *words] if word not in str(caught.value)] == []


@pytest.mark.parametrize("ageing", [0.0, -1.0, float("nan"), float("inf")])
def test_ageing_must_be_a_time(ageing: float) -> None:
    with pytest.raises(ConfigError, match="--ageing is"):
        Config(ageing=ageing)
