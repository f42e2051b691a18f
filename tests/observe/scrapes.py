"""What a scrape says, sample by sample."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from everystop.observe.catalogue import FAMILIES
from everystop.observe.vllm_names import FAMILIES_OF_VLLM

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples_of(text: bytes) -> dict[Sample, float]:
    """Every sample by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def from_events(found: dict[Sample, float]) -> dict[Sample, float]:
    """The samples that are counted from the engine's events and the ends of answers."""
    names = {family.name for family in (*FAMILIES, *FAMILIES_OF_VLLM)}
    ends = ("_bucket", "_sum", "_count")
    return {
        key: value
        for key, value in found.items()
        if key[0] in names or any(key[0].endswith(end) and key[0].removesuffix(end) in names for end in ends)
    }
