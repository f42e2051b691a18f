"""Traces are read line by line, in every format, and what is wrong with one is said with its line."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from everystop.core.errors import ConfigError
from everystop.sim.traces import FORMATS, TraceError, TraceOptions, TraceRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.6805901,396,109
2023-11-16 18:15:50.9951690,0,0
"""
MOONCAKE = """{"timestamp": 10, "input_length": 1100, "output_length": 6, "hash_ids": [4, 5, 6]}
{"timestamp": 12.5, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}
"""
SHAREGPT = "arrival_s,input_tokens,output_tokens\n0.5,2358,531\n1.25,10,2\n"
TENANT = "req_time_s,client,prompt_tokens,output_tokens\n0.000,ann,13,199\n0.208,bob,36,137\n"
OWN = """{"arrival_ns": 5, "num_prompt_tokens": 64, "num_output_tokens": 3}

{"arrival_ns": 9, "num_prompt_tokens": 64, "num_output_tokens": 4, "prefix_ids": [1], "prefix_id_tokens": 32, "tenant": "ann", "ttft_target_ms": 250, "itl_target_ms": 12.5}
"""  # noqa: E501
TEXTS = {"azure": AZURE, "mooncake": MOONCAKE, "sharegpt": SHAREGPT, "tenant": TENANT, "own": OWN}
LENGTHS = {
    "azure": [(0, 374, 44), (100, 396, 109), (4_314_579_000, 1, 1)],
    "mooncake": [(0, 1100, 6), (2_500_000, 600, 7)],
    "sharegpt": [(0, 2358, 531), (750_000_000, 10, 2)],
    "tenant": [(0, 13, 199), (208_000_000, 36, 137)],
    "own": [(0, 64, 3), (4, 64, 4)],
}


def read(path: Path, text: str, options: TraceOptions | None = None) -> list[TraceRequest]:
    path.write_text(text, encoding="utf-8")
    return list(read_trace(path, options))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_named", [False, True])
def test_each_format_is_read_by_name_and_by_its_looks(name: str, is_named: bool, tmp_path: Path) -> None:
    requests = read(tmp_path / "trace", TEXTS[name], TraceOptions(format=name if is_named else None))
    assert [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in requests] == LENGTHS[name]


def test_tenants_and_prefixes_are_kept(tmp_path: Path) -> None:
    assert [r.tenant for r in read(tmp_path / "a", TENANT)] == ["ann", "bob"]
    assert [r.prefix_ids for r in read(tmp_path / "b", MOONCAKE)] == [(4, 5, 6), (4, 9)]
    own = read(tmp_path / "c", OWN)[1]
    assert (own.tenant, own.prefix_ids, own.prefix_id_tokens) == ("ann", (1,), 32)
    assert (own.ttft_target_ns, own.itl_target_ns) == (250_000_000, 12_500_000)


def test_compressed_trace_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(TENANT.encode()))
    assert len(list(read_trace(tmp_path / "trace.csv.gz"))) == 2


def test_lengths_are_scaled_and_time_is_dilated(tmp_path: Path) -> None:
    options = TraceOptions(scale_lengths=0.25, dilate_time=2.0)
    requests = read(tmp_path / "trace", MOONCAKE, options)
    assert [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in requests] == [
        (0, 275, 2),
        (5_000_000, 150, 2),
    ]
    assert requests[0].prefix_id_tokens == 128


def test_limit_ends_the_trace_before_a_later_fault(tmp_path: Path) -> None:
    assert len(read(tmp_path / "trace", TENANT + "oh,dear,1,x\n", TraceOptions(limit=2))) == 2


def test_endless_trace_is_read_as_it_is_used(tmp_path: Path) -> None:
    """A fault in the last line is met only there: nothing reads ahead."""
    (tmp_path / "trace").write_text(TENANT + "1.0,ann,many,2\n")
    requests = read_trace(tmp_path / "trace")
    assert [r.tenant for r in itertools.islice(requests, 2)] == ["ann", "bob"]
    with pytest.raises(TraceError, match=r"trace:4: .*many"):
        next(requests)


def test_block_keys_name_the_prompt_up_to_a_blocks_last_token(tmp_path: Path) -> None:
    first, second = read(tmp_path / "trace", MOONCAKE)
    keys, others = first.block_keys(256), second.block_keys(256)
    assert keys == [b"4:0", b"4:1", b"5:2", b"5:3"]
    assert others == [b"4:0", b"4:1"]
    assert len(first.block_keys(32)) == 34
    assert len(set(first.block_keys(32))) == 34


def test_scaled_prefixes_are_shared_up_to_the_same_point(tmp_path: Path) -> None:
    """512 tokens an id become 51.2: of 16-token blocks, the three that end at token 48 lie in the first id."""
    first, second = read(tmp_path / "trace", MOONCAKE, TraceOptions(scale_lengths=0.1))
    keys, others = first.block_keys(16), second.block_keys(16)
    assert (len(keys), len(others)) == (6, 3)
    assert keys[:3] == others
    assert keys[3] == b"5:3"


def test_trace_without_prefixes_has_no_keys(tmp_path: Path) -> None:
    assert [r.block_keys(16) for r in read(tmp_path / "trace", SHAREGPT)] == [[], []]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "trace:1: no known format has a, b"),
        ('{"timestamp": 1}\n', "trace:1: no known format"),
        ("{nonsense\n", "trace:1: not JSON"),
        (TENANT + "x,ann,1,1\n", "trace:4: .*'x'"),
        (TENANT + "1.0,ann,1\n", "trace:4: no output_tokens"),
        (TENANT + "1.0,ann,-1,1\n", "trace:4: a length is below 0"),
        (TENANT + "inf,ann,1,1\n", "trace:4: .*infinity"),
        (TENANT + "0.1,ann,1,1\n", "trace:4: arrives 108 ms before the line above"),
        (AZURE + "yesterday,1,1\n", "trace:5: 'yesterday' is not a UTC time"),
        (OWN + "[1]\n", "trace:4: each line must be a JSON object"),
        (OWN + '{"arrival_ns": 1}\n', "trace:4: no num_prompt_tokens and no num_output_tokens"),
        (OWN.replace('"tenant"', '"tenent"'), "trace:3: unknown field 'tenent'"),
        (OWN.replace("32,", "0,"), "trace:3: prefix_id_tokens is 0"),
        (OWN.replace("250", "true"), "trace:3: ttft_target_ms is True"),
        (OWN.replace("12.5", "0"), "trace:3: itl_target_ms is 0"),
        (OWN.replace("9,", "9.5,"), "trace:3: 9.5 is not a whole number"),
        (MOONCAKE.replace("[4, 9]", "[4]"), "trace:2: 1 hash_ids of 512 tokens do not cover 600"),
        (MOONCAKE.replace("[4, 9]", "9"), "trace:2: hash_ids is 9; it must be a list"),
        (OWN.replace("[1]", '"12"'), "trace:3: prefix_ids is '12'; it must be a list"),
        (OWN.replace('"ann"', '{"ann": 1}'), "trace:3: tenant is .*; it must be text"),
        (OWN + "[" * 100_000 + "\n", "trace:4: not JSON"),
        ("\n" + "a" * 200_000 + ",b\n", "trace:2: field larger"),
        ("\na,b\n", "trace:2: no known format has a, b"),
        (SHAREGPT + "2,1.5,1\n", "trace:4: '1.5' is not a whole number"),
        (SHAREGPT + "2,1,1,1\n", "trace:4: 4 values, but the first line names 3 columns"),
        (SHAREGPT.replace("output_tokens", "output_tokens,output_tokens"), "trace:1: two columns are named"),
        (SHAREGPT.partition("\n")[0] + "\n", "has no requests"),
        (SHAREGPT + "2,3000000000,1\n", "trace:4: 3,000,000,000 tokens are too many; at most 2,147,483,647"),
        (SHAREGPT + "2,1," + "9" * 400 + "\n", "trace:4: .* tokens are too many"),
        (SHAREGPT + "1e100,1,1\n", "trace:4: .* nanoseconds are too many"),
    ],
)
def test_fault_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path / "trace", text)


@pytest.mark.parametrize("options", [{"scale_lengths": 1e308}, {"dilate_time": 1e308}])
def test_factor_that_makes_a_trace_too_long_is_named(options: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace:.: .* × 1e\+308 (tokens|nanoseconds) are too many"):
        read(tmp_path / "trace", SHAREGPT, TraceOptions(**options))  # type: ignore[arg-type]


def test_limit_beyond_any_trace_is_no_limit(tmp_path: Path) -> None:
    assert len(read(tmp_path / "trace", TENANT, TraceOptions(limit=10**30))) == 2


def test_blanks_around_the_names_of_columns_do_not_count(tmp_path: Path) -> None:
    [request, _] = read(tmp_path / "trace", SHAREGPT.replace(",", ", "))
    assert (request.num_prompt_tokens, request.num_output_tokens) == (2358, 531)


def test_tenant_null_is_nobody(tmp_path: Path) -> None:
    assert read(tmp_path / "trace", OWN.replace('"ann"', "null"))[1].tenant == ""


def test_named_format_must_fit(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace:2: no TIMESTAMP"):
        read(tmp_path / "trace", TENANT, TraceOptions(format="azure"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TENANT.encode())[:-12])
    (tmp_path / "bent.gz").write_bytes(gzip.compress(TENANT.encode())[:10] + bytes(range(255, 200, -1)))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "cut.gz", "bent.gz", "binary"):
        with pytest.raises(TraceError, match=f"{name} cannot be read"):
            list(read_trace(tmp_path / name))


@pytest.mark.parametrize("options", [{"scale_lengths": 0}, {"dilate_time": float("nan")}, {"limit": 0}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"--(scale-lengths|dilate-time|limit) is"):
        TraceOptions(**options)  # type: ignore[arg-type]


def test_a_name_that_comes_twice_in_a_line_is_refused(tmp_path: Path) -> None:
    line = '{"arrival_ns": 0, "num_prompt_tokens": 8, "num_output_tokens": 2, "num_prompt_tokens": 9}'
    with pytest.raises(TraceError, match=r"trace:1: not JSON: the name 'num_prompt_tokens' comes twice"):
        read(tmp_path / "trace", line, TraceOptions(format="own"))
