"""The forms in which servers take prompts: token ids, which say exactly what is computed; text; or a chat's message."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from everystop.sim.workloads import Job

SHORT_WORDS = (
    "a all and any are as at be but by can could day did do each end few first for from get good had has have her "
    "here him his how if in into is it its just know like long look made make many may more most must my new no not "
    "now of on one or our out over own part"
)
WORDS = SHORT_WORDS.split()


class PromptForm(StrEnum):
    """How a job's prompt is sent."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Where such requests go."""
        return "/v1/chat/completions" if self is PromptForm.CHAT else "/v1/completions"

    def fields(self, job: Job) -> dict[str, Any]:
        """What a request says of the job: to servers that know texts alone, nothing that only some of them know."""
        given = {"max_tokens": job.max_tokens}
        if self is PromptForm.IDS:
            return given | {"prompt": job.prompt, "ignore_eos": job.ignore_eos}
        text = as_words(job.prompt)
        if self is PromptForm.TEXT:
            return given | {"prompt": text}
        return given | {"messages": [{"role": "user", "content": text}]}


def as_words(token_ids: Sequence[int]) -> str:
    """A word for each id, of those that are a single token in the usual vocabularies; common beginnings stay common."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)
