"""Joins the pieces of a life into segments that can be drawn: few, consecutive, and together as long as the life.

Steps of one kind that follow each other become one stretch, in which the time of each cause is drawn in one, in sum:
500 decodes are one segment of hand-over, one of decode and one of sampling, not 1,500.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from everystop.core.events import WaitEvent
from everystop.observe.causes import ORDER, Cause
from everystop.observe.culprits import prefill_in_steps
from everystop.observe.life import Life, Piece, Served
from everystop.observe.wording import NameOf, counted, who, whose

MAX_STRETCHES = 500


class Segment(NamedTuple):
    """Times count from the beginning of the life; `num_steps` are those that served the request in this stretch."""

    start_ns: int
    end_ns: int
    cause: Cause
    num_steps: int
    detail: str | None


def segments_of(life: Life, name_of: NameOf) -> list[Segment]:
    """The segments, in order: each begins where the one before ends, the last ends with the life."""
    segments: list[Segment] = []
    at_ns = 0
    for stretch in _stretches(life.pieces):
        steps = _distinct(piece.served for piece in stretch)
        for cause, pieces in _by_cause(stretch).items():
            ns = sum(piece.ns for piece in pieces)
            if cause.is_queue:
                detail = _wait_detail(pieces[0].wait, life.trail.request_id, name_of)
            else:
                detail = _detail(cause, steps, name_of)
            segments.append(Segment(at_ns, at_ns + ns, cause, len(steps), detail))
            at_ns += ns
    return segments


def _stretches(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Neighbours that are alike; where that makes too many, those on board are joined further, alike or not."""
    stretches: list[list[Piece]] = []
    last_kind: object = None
    for piece in pieces:
        kind = _kind(piece)
        is_between = piece.cause is Cause.HOST and piece.served is None
        if stretches and (kind == last_kind or (is_between and stretches[-1][-1].served is not None)):
            stretches[-1].append(piece)
        else:
            stretches.append([piece])
            last_kind = kind
    if len(stretches) <= MAX_STRETCHES:
        return stretches
    return _joined(stretches, -(-len(stretches) // MAX_STRETCHES))


def _kind(piece: Piece) -> object:
    """What pieces of one stretch have in common."""
    if piece.cause is Cause.PREEMPTED:
        return Cause.PREEMPTED
    if piece.served is not None:
        return piece.served.activity, piece.served.share.others_ns > 0
    ahead = None if piece.wait is None else (piece.wait.request_id, piece.wait.behind)
    return piece.cause, ahead


def _joined(stretches: list[list[Piece]], num: int) -> list[list[Piece]]:
    """Stretches on board joined, `num` at a time."""
    joined: list[list[Piece]] = []
    num_in_last = num
    for stretch in stretches:
        is_on_board = stretch[0].served is not None or stretch[0].cause in (Cause.SKIPPED, Cause.PREEMPTED, Cause.HOST)
        if is_on_board and num_in_last < num:
            joined[-1] += stretch
            num_in_last += 1
        else:
            joined.append(list(stretch))
            num_in_last = 1 if is_on_board else num
    return joined


def _by_cause(stretch: list[Piece]) -> dict[Cause, list[Piece]]:
    """Pieces of a stretch by cause: hand-over first, as in a step, then in the order of the causes."""
    found: dict[Cause, list[Piece]] = {}
    for piece in sorted(stretch, key=lambda piece: -1 if piece.cause is Cause.HOST else ORDER[piece.cause]):
        found.setdefault(piece.cause, []).append(piece)
    return found


def _distinct(steps: Iterable[Served | None]) -> list[Served]:
    return list({one.record.step_id: one for one in steps if one is not None}.values())


def _detail(cause: Cause, steps: list[Served], name_of: NameOf) -> str | None:
    """What can be said of a segment of time on board beyond its cause."""
    if cause is Cause.OTHERS_PREFILL:
        found = prefill_in_steps(steps)
        return None if found is None else f"mostly {whose(found[0].request_id, name_of)} prompt"
    num_tokens = sum(one.num_tokens for one in steps if one.activity is cause)
    if cause is Cause.PREEMPTED and num_tokens:
        return f"{counted(num_tokens, 'token')} computed again"
    return counted(num_tokens, "token") if num_tokens and cause in (Cause.PREFILL, Cause.DECODE) else None


def _wait_detail(wait: WaitEvent | None, request_id: int, name_of: NameOf) -> str | None:
    """Whom a request was behind, and how many blocks were needed where they were short; of a stranger not that."""
    if wait is None:
        return None
    ahead = wait.behind if wait.behind >= 0 else wait.request_id
    parts = [f"behind {who(ahead, name_of)}"] if ahead >= 0 and ahead != request_id else []
    if wait.need and (wait.request_id in (-1, request_id) or name_of(wait.request_id) is not None):
        parts.append(f"{counted(wait.need, 'block')} needed, {wait.have:,} free")
    return ", ".join(parts) or None
